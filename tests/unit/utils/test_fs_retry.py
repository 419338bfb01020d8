"""A disk that fails: what passes is borne, what lasts ends with a commit, and nothing that was said is lost."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.roles.role_context import RoleContext
from pipeline.run.events import EventPoller, Events
from pipeline.run.paths import AttemptPaths
from pipeline.utils.fs_retry import FS_OUTAGE_TIMEOUT, DeferredWrites, retry_transient
from tests.fakes.agents import RANKS, make_cluster
from tests.fakes.clock import FakeClock
from tests.fakes.disk import Disk, Faults, View
from tests.fakes.run_directory import FakeRun

EIO = OSError(errno.EIO, "Input/output error")


def failing(times: int, error: OSError = EIO) -> Callable[[], str]:
    """Something that succeeds after so many failures."""
    left = iter(range(times))

    def act() -> str:
        if next(left, None) is not None:
            raise error
        return "done"

    return act


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EDQUOT, errno.ETIMEDOUT, errno.ENOSPC])
def test_what_may_pass_is_tried_again(number: int) -> None:
    assert retry_transient("it", failing(5, OSError(number, "")), 30, FakeClock()) == "done"


def test_what_does_not_pass_in_time_is_raised_as_it_is() -> None:
    clock = FakeClock()
    with pytest.raises(OSError, match="Input/output"):
        retry_transient("it", failing(10_000), 30, clock)
    assert clock.time == pytest.approx(30)


def test_what_cannot_pass_is_raised_at_once() -> None:
    clock = FakeClock()
    with pytest.raises(PermissionError):
        retry_transient("it", failing(1, PermissionError(errno.EACCES, "")), 30, clock)
    assert clock.time == 0


def test_what_could_not_be_said_is_said_in_order_once_it_can_be() -> None:
    said: list[int] = []
    outbox, first = DeferredWrites(), failing(2)
    outbox.submit(lambda: (first(), said.append(1)))
    outbox.submit(lambda: said.append(2))
    assert said == []
    assert outbox.flush()
    assert said == [1, 2]
    assert outbox.flush()
    assert said == [1, 2]


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("seconds", [0.05, 5.0, FS_OUTAGE_TIMEOUT - 10])
def test_an_outage_that_passes_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, seconds: float
) -> None:
    cluster = make_cluster(tmp_path, {}, trained=300.0, outages={rank: (100.0, 100.0 + seconds)})
    assert cluster.start(monkeypatch) == ["finished"] * RANKS


def test_an_outage_in_which_training_ends_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outages = {rank: (29.0, 60.0) for rank in range(RANKS) if rank != 1}
    cluster = make_cluster(tmp_path, {}, trained=30.0, outages=outages)
    assert cluster.start(monkeypatch) == ["finished"] * RANKS


def test_an_outage_that_lasts_ends_with_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outages = dict.fromkeys(range(RANKS), (100.0, 100.0 + FS_OUTAGE_TIMEOUT + 15.0))
    cluster = make_cluster(tmp_path, {}, outages=outages)
    assert cluster.start(monkeypatch) == ["preempted"] * RANKS
    assert cluster.committed
    draining = Events(cluster.paths, View(cluster.disk, 99)).get("draining")
    assert draining is not None
    assert "Input/output error" in draining.detail


def test_one_node_without_a_disk_has_all_of_them_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make_cluster(tmp_path, {}, outages={3: (100.0, 100.0 + FS_OUTAGE_TIMEOUT + 15.0)})
    assert cluster.start(monkeypatch) == ["preempted"] * RANKS
    assert cluster.committed


def test_a_listener_never_takes_back_what_it_heard() -> None:
    clock = FakeClock()
    disk = Disk(clock, Faults(outages={1: (10.0, 10.0 + FS_OUTAGE_TIMEOUT + 5.0)}))
    listener = EventPoller(Events(AttemptPaths(Path(), "r", "a-0"), View(disk, 1)), 1, clock)
    heard = []
    while clock.time < 200:
        heard.append("draining" in listener.poll())
        clock.sleep(1.0)
    assert heard == sorted(heard)
    assert heard.index(True) == pytest.approx(9 + FS_OUTAGE_TIMEOUT, abs=1)


def test_what_is_for_people_alone_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make_cluster(tmp_path, {}, trained=30.0)
    cluster.paths.timeline.write_text("in the way")
    assert cluster.start(monkeypatch) == ["finished"] * RANKS


def test_a_report_that_the_disk_does_not_take_ends_no_role(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = FakeRun(tmp_path / "run")
    attempt = run.attempt("7-0")
    world = attempt.meet()
    context = RoleContext(attempt.paths, run.config, world, world.placements[0])
    attempt.paths.statuses.write_text("in the way")
    context.report("ready")
    assert "'ready' is not reported" in caplog.text
    assert context.status() is None
    attempt.paths.statuses.unlink()
    context.report("ready")
    assert context.status() is not None


def test_what_can_never_be_written_is_told_and_holds_nothing_back(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def refused() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    outbox = DeferredWrites()
    outbox.submit(refused)
    outbox.submit(lambda: said.append("the next"))
    assert said == ["the next"]
    assert "Permission denied" in capsys.readouterr().out
