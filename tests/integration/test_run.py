"""Whole runs, started as a user starts them: finished, interrupted, resumed, broken, side by side."""

import fcntl
import json
import signal

import pytest

from pipeline.report.samples import Filter, read_kept
from pipeline.rundir.events import Events
from pipeline.system.waiting import wait_for
from pipeline.world.plan import RoleName
from tests.patience import WAIT_SECONDS
from tests.support.runs.launched import PROMPTS, STEPS, Launched, Launches

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ONE_SERVER = "resources.inference.nodes=1"
"""Enough where nothing is sampled: a server costs most of what a run's start does."""


def test_an_interrupted_run_resumes_survives_a_killed_server_and_says_when_it_is_finished(launches: Launches) -> None:
    first = launches.submit("r", ONE_SERVER)
    first.wait_for_step(5)
    first.interrupt(signal.SIGINT)
    assert first.end() == 130, first.output()
    first.assert_nothing_left()
    done = first.rows()[-1]["step"]
    assert list(first.run.checkpoints.glob(f"rl-{done}/*/COMMIT"))
    assert Events(first.attempts[0]).seen("training_finished") is None

    second = launches.submit("r", ONE_SERVER)
    wait_for("a second attempt", lambda: len(second.attempts) == 2, WAIT_SECONDS, missing=second.output)
    second.wait_for_state("inference.0", "ready")
    second.kill_role("inference", 0)
    second.wait_for_step(STEPS)
    wait_for("training_finished", lambda: Events(second.attempts[-1]).seen("training_finished"), WAIT_SECONDS)
    second.assert_nothing_left(seconds=15)
    assert second.end() == 0, second.output()
    assert_whole(second)
    assert len({row["attempt"] for row in second.rows()}) == 2
    states = [state for role, state in second.history() if role == "inference.0"]
    assert states[:5] == ["starting", "ready", "restarting", "starting", "ready"], "the server that was killed"

    third = launches.submit("r", ONE_SERVER)
    assert third.end() == 2
    assert "start a new run with name=r-2" in third.output()

    again = launches.evaluate(second.run, "again", "checkpoint=latest")
    assert again.end() == 0, again.output()
    (measured,) = (row for row in again.rows("eval") if row["step"] == STEPS)
    (then,) = (row for row in second.rows("eval") if row["step"] == STEPS)
    assert measured["eval/accuracy"] == then["eval/accuracy"], "the same weights, from the newest commit"
    found = json.loads(again.run.evaluation.read_text())["sets"]["held_out"]
    assert (found["accuracy"], found["prompts"]) == (then["eval/accuracy"], 32)
    assert len(read_kept(second.run).where(Filter(kind="train"))) >= STEPS * PROMPTS


def test_two_runs_at_once_do_not_disturb_each_other_and_a_crash_loses_nothing(launches: Launches) -> None:
    whole = launches.submit("whole", ONE_SERVER, "streams.backend=files")
    broken = launches.submit("broken", ONE_SERVER)
    whole.wait_for_state("trainer.0", "ready")
    broken.wait_for_step(7)
    broken.kill_role("trainer", 0)
    assert broken.end() == 1
    failure = broken.failure()
    assert failure is not None
    assert (failure.role, failure.rank, failure.cause) == ("trainer.0", 1, "killed by SIGKILL")
    assert failure.last_lines
    assert "failed: trainer.0 on rank 1: killed by SIGKILL" in broken.output()
    broken.assert_nothing_left()
    whole.wait_for_step(STEPS)
    assert whole.end() == 0, whole.output()
    whole.assert_nothing_left()
    assert_whole(whole)
    assert len({*broken.ports(), *whole.ports()}) == len(broken.ports()) + len(whole.ports())

    resumed = launches.submit("broken", ONE_SERVER)
    resumed.wait_for_step(STEPS)
    assert resumed.end() == 0, resumed.output()
    assert_whole(resumed)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("world", signal.SIGKILL),
        ("roles", signal.SIGINT),
        pytest.param("world", signal.SIGINT, marks=pytest.mark.trial),
        pytest.param("roles", signal.SIGKILL, marks=pytest.mark.trial),
    ],
)
def test_a_launcher_that_ends_during_start_up_leaves_nothing(
    moment: str, number: signal.Signals, launches: Launches
) -> None:
    launched = launches.submit("r", ONE_SERVER)
    if moment == "world":
        launched.wait_for_world()
    else:
        launched.wait_for_state("inference.0", "starting")
    launched.interrupt(number)
    launched.assert_nothing_left()
    assert launched.end() == (130 if number == signal.SIGINT else -signal.SIGKILL)


def test_a_job_that_outlives_its_launcher_keeps_the_run_and_a_second_ctrl_c_ends_it_at_once(launches: Launches) -> None:
    launched = launches.submit("r", ONE_SERVER)
    launched.wait_for_state("trainer.0", "starting")
    with (launched.run.job_lock).open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    launched.interrupt(signal.SIGINT)
    launched.interrupt(signal.SIGINT)
    launched.assert_nothing_left()
    assert launched.end() == 130
    with (launched.run.job_lock).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)


@pytest.mark.parametrize(("role", "rank"), [("redis", 0), pytest.param("actor", 0, marks=pytest.mark.trial)])
def test_a_role_that_is_killed_is_named_and_nothing_is_left(role: RoleName, rank: int, launches: Launches) -> None:
    launched = launches.submit("r", ONE_SERVER)
    launched.wait_for_state("actor.0", "ready")
    launched.kill_role(role, 0)
    launched.assert_nothing_left()
    assert launched.end() == 1
    failure = launched.failure()
    assert failure is not None
    assert (failure.role, failure.rank, failure.cause) == (f"{role}.0", rank, "killed by SIGKILL")


def test_an_agent_that_is_killed_is_named_and_nothing_is_left(launches: Launches) -> None:
    launched = launches.submit("r", ONE_SERVER)
    launched.wait_for_state("inference.0", "starting")
    launched.kill_agent(1)
    launched.assert_nothing_left()
    assert launched.end() == 1
    failure = launched.failure()
    assert failure is not None
    assert (failure.role, failure.rank, failure.cause) == ("agent.1", 1, "killed by SIGKILL")


def assert_whole(launched: Launched) -> None:
    """The run did exactly its steps, trained every position once and none too late, and left what it promises."""
    rows = launched.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["lag/max"] for row in rows) <= 2
    assert rows[0]["log_ratio_max"] < 1e-4, "trainer and servers disagree on the first batch, which has no lag"
    assert [row["step"] for row in launched.rows("eval")] == [0, STEPS]
    settled = sorted(json.loads(line)["position"] for line in launched.run.ledger.read_text().splitlines())
    assert len(settled) == len(set(settled)) == STEPS * PROMPTS
    assert launched.run.report.exists()
    assert (launched.run.model / "model.safetensors").exists()
    finished = Events(launched.attempts[-1]).seen("training_finished")
    assert finished is not None
    assert finished.by == "trainer.0"
