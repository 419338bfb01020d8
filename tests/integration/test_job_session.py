"""What a run is told of the jobs that its trainer does, and what it keeps a replaced attempt from."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoints import Fence
from pipeline.errors import SupersededError, TrainingError
from pipeline.roles.offline_session import OfflineSession
from pipeline.roles.role_context import RoleContext
from pipeline.roles.trainer import session_of
from pipeline.run.events import EventPoller, Events
from pipeline.run.metrics_log import read_rows
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.group_batches import Interrupted
from pipeline.train.offline import job_execution as execution
from tests.fakes.run_directory import FakeRun
from tests.support.models.jobs import STEPS, config_of, events, write_job

pytestmark = pytest.mark.integration
Attempt = Callable[[str], RoleContext]


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    (tmp_path / "queue").mkdir()
    return tmp_path / "queue"


@pytest.fixture
def attempt(model: Path, queue: Path, tmp_path: Path) -> Iterator[Attempt]:
    """A new attempt of the run of the queue: the context of its trainer."""
    plain = config_of(model)
    training = plain.training.model_copy(update={"steps": 0, "jobs": str(queue)})
    tracking = plain.tracking.model_copy(update={"trackers": ()})
    run = FakeRun(tmp_path / "run", plain.model_copy(update={"training": training, "tracking": tracking}))

    def begin(name: str) -> RoleContext:
        made = run.attempt(name)
        world = made.meet()
        return RoleContext(made.paths, run.config, world, world.of_role("trainer")[0])

    before = signal.getsignal(signal.SIGINT)  # which a controller ignores from its first job on
    yield begin
    signal.signal(signal.SIGINT, before)


def steps_of(context: RoleContext) -> list[tuple[Any, ...]]:
    return [(row["step"], row["job"], row["file"], row["done"], row["of"]) for row in read_rows(context.run.metrics)]


def test_a_run_counts_the_steps_of_all_its_jobs_and_finishes_after_the_last(
    attempt: Attempt, queue: Path, dispatch: RankGroup
) -> None:
    write_job(queue, "sft", "1")
    write_job(queue, "rl", "2")
    context = attempt("12-0")
    session = session_of(context, dispatch)
    assert isinstance(session, OfflineSession)
    session.run()
    sft = [(step, "sft", "1", step, STEPS) for step in range(1, STEPS + 1)]
    rl = [(STEPS + step, "rl", "2", step, STEPS) for step in range(1, STEPS + 1)]
    assert steps_of(context) == sft + rl
    assert Events(context.paths).get("training_finished") is not None
    assert context.paths.checkpointed.exists()
    status = context.status()
    assert status is not None
    assert (status.state, status.detail) == ("ready", f"2 step {STEPS} of {STEPS}")


def test_an_attempt_that_is_ending_commits_and_the_next_one_does_the_rest(
    attempt: Attempt, queue: Path, dispatch: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(queue, "sft", "1")
    first, pulses = attempt("12-0"), OfflineSession._pulse

    def pulse(session: OfflineSession) -> None:
        if len(steps_of(first)) == 3:
            Events(first.paths).publish("draining", "agent.0", "SIGTERM")
            raise Interrupted("draining by agent.0")
        pulses(session)

    monkeypatch.setattr(OfflineSession, "_pulse", pulse)
    session_of(first, dispatch).run()
    assert Events(first.paths).get("training_finished") is None
    assert events(queue / "1.jsonl")[-1] == "interrupted"
    monkeypatch.undo()
    second = attempt("12-1")
    session_of(second, dispatch).run()
    assert steps_of(second) == [(step, "sft", "1", step, STEPS) for step in range(1, STEPS + 1)]
    assert [row["attempt"] for row in read_rows(second.run.metrics)] == ["12-0"] * 3 + ["12-1"] * (STEPS - 3)


def interrupted_after(steps: int, context: RoleContext, dispatch: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the session until so many steps are done, and have it commit them."""
    pulses = OfflineSession._pulse

    def pulse(session: OfflineSession) -> None:
        if len(steps_of(context)) == steps:
            raise Interrupted("the test")
        pulses(session)

    with monkeypatch.context() as patch:
        patch.setattr(OfflineSession, "_pulse", pulse)
        session_of(context, dispatch).run()


@pytest.mark.parametrize("name", ["1", "2"])
def test_a_job_whose_state_is_lost_is_refused_with_what_to_do(
    name: str, attempt: Attempt, queue: Path, dispatch: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job that had saved a checkpoint, and another one that would take over its optimizer."""
    write_job(queue, "sft", "1")
    interrupted_after(3, attempt("12-0"), dispatch, monkeypatch)
    (queue / "sft-state").rename(queue / "lost")
    if name == "2":
        (queue / "1.json").unlink()
        write_job(queue, "sft", "2")
    context = attempt("12-1")
    with pytest.raises(TrainingError, match=f"failed: {name}.json"):
        session_of(context, dispatch).run()
    reason = (queue / "failed" / f"{name}.error").read_text()
    assert "sft-state: it has no" in reason
    assert "resume=scratch" in reason
    assert len(steps_of(context)) == 3  # the rows of the lost steps stay


def test_rows_of_a_job_that_a_damaged_commit_covered_are_kept_aside(
    attempt: Attempt, queue: Path, dispatch: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(queue, "sft", "1")
    interrupted_after(3, attempt("12-0"), dispatch, monkeypatch)  # commits at steps 2 and 3
    damage_newest(queue / "sft-state")
    context = attempt("12-1")
    session_of(context, dispatch).run()
    assert [row["done"] for row in read_rows(context.run.aside / "1" / "metrics.jsonl")] == [3]
    assert steps_of(context) == [(step, "sft", "1", step, STEPS) for step in range(1, STEPS + 1)]


def damage_newest(state: Path) -> None:
    newest = max(state.glob("sft-*"), key=lambda path: int(path.name.partition("-")[2]))
    for shard in newest.glob("*/*.distcp"):
        shard.write_bytes(b"damaged")


def test_a_job_that_would_begin_again_beside_the_commits_of_another_is_refused(
    attempt: Attempt, queue: Path, dispatch: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(queue, "sft", "1")
    session_of(attempt("12-0"), dispatch).run()
    write_job(queue, "sft", "2")
    interrupted_after(STEPS + 1, attempt("12-1"), dispatch, monkeypatch)
    damage_newest(queue / "sft-state")
    with pytest.raises(TrainingError, match=r"failed: 2\.json"):
        session_of(attempt("12-2"), dispatch).run()
    assert "no whole checkpoint of this job" in (queue / "failed" / "2.error").read_text()


def test_a_run_one_of_whose_jobs_failed_does_the_others_and_fails(
    attempt: Attempt, queue: Path, dispatch: RankGroup
) -> None:
    write_job(queue, "rl", "1", checkpoint="gone")
    write_job(queue, "sft", "2")
    context = attempt("12-0")
    with pytest.raises(TrainingError, match=r"^failed: 1\.json"):
        session_of(context, dispatch).run()
    assert Events(context.paths).get("training_finished") is None
    assert [row["file"] for row in read_rows(context.run.metrics)] == ["2"] * STEPS
    assert context.paths.checkpointed.exists()
    assert context.paths.exhausted.exists()


def test_an_attempt_that_was_replaced_takes_no_job_any_more(
    attempt: Attempt, queue: Path, dispatch: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that was cut off: another attempt has claimed the run, and none of its jobs yet."""
    write_job(queue, "sft", "1")
    write_job(queue, "sft", "2")
    context, removed = attempt("12-0"), execution.remove_packed

    def remove(folder: Path) -> None:
        Fence(str(context.run.checkpoints), "12-1").claim()
        removed(folder)

    monkeypatch.setattr(execution, "remove_packed", remove)
    with pytest.raises(SupersededError, match="attempt 12-1 has taken over"):
        session_of(context, dispatch).run()
    assert (queue / "done" / "1.json").exists()
    assert (queue / "2.json").exists()
    assert not (queue / "2.jsonl").exists()
    assert not (queue / "failed").exists()
    with pytest.raises(SupersededError):  # nor does it begin again
        session_of(context, dispatch).run()


def test_an_attempt_that_is_ending_begins_no_further_job(
    attempt: Attempt, queue: Path, dispatch: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(queue, "sft", "1")
    write_job(queue, "sft", "2")
    context, removed = attempt("12-0"), execution.remove_packed

    def remove(folder: Path) -> None:
        Events(context.paths).publish("draining", "agent.0", "SIGTERM")
        removed(folder)

    monkeypatch.setattr(execution, "remove_packed", remove)
    monkeypatch.setattr(EventPoller, "poll", lambda listener, at_once=False: listener._events.read_all())
    session_of(context, dispatch).run()
    assert (queue / "done" / "1.json").exists()
    assert not (queue / "2.jsonl").exists()
    assert Events(context.paths).get("training_finished") is None


def test_an_attempt_without_a_commit_leaves_no_mark(attempt: Attempt, queue: Path, dispatch: RankGroup) -> None:
    write_job(queue, "rl", "1", checkpoint="gone")
    context = attempt("12-0")
    with pytest.raises(TrainingError):
        session_of(context, dispatch).run()
    assert not context.paths.checkpointed.exists()
