"""Whole runs, started as a user starts them: finished, interrupted, resumed, broken, side by side."""

import fcntl
import json
import signal
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from pipeline.observability.sample_reader import Filter, read_samples
from pipeline.run.events import Events
from pipeline.run.fault_plan import parse_faults
from pipeline.utils.waiting import wait_for
from tests.patience import WAIT_SECONDS
from tests.support.runs.launched import PROMPTS, STEPS, TWO_RANKS, Launched, Launches

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ONE_SERVER = "resources.inference.nodes=1"
"""Enough where nothing is sampled: a server costs most of what a run's start does."""


FAULTS = ("kill:actor@update", "exit:preprocessor@save", "kill:redis@eval", "kill:trainer@end")
FAULTS_ON_FILES = ("exit:actor@update", "kill:preprocessor@save", "kill:trainer@end")
"""Faults of resumed runs. Their moments come whatever the step from which the runs go on."""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files, with a short name, as sockets need."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.timeout(1200)
def test_two_runs_at_once_of_which_one_is_interrupted_and_one_crashes_resume_and_lose_nothing(
    launches: Launches, temporary: Path
) -> None:
    interrupted, crashed = start_both(launches, temporary)

    def interrupt() -> None:
        interrupted.wait_for_step(5)
        interrupted.interrupt(signal.SIGINT)

    def crash() -> None:
        crashed.wait_for_step(7)
        crashed.kill_role("trainer", 0)

    with ThreadPoolExecutor(2) as pool:  # either may be there first, and at its end before the other
        for done_to in [pool.submit(interrupt), pool.submit(crash)]:
            done_to.result()

    assert interrupted.end() == 130, interrupted.output()
    interrupted.assert_nothing_left()
    done = interrupted.rows()[-1]["step"]
    assert list(interrupted.run.checkpoints.glob(f"rl-{done}/*/COMPLETE"))
    assert Events(interrupted.attempts[0]).get("training_finished") is None
    draining = Events(interrupted.attempts[0]).get("draining")
    assert draining is not None
    assert draining.why == "interrupted by Ctrl-C (SIGINT) at the launcher"
    assert "interrupted by Ctrl-C (SIGINT) at the launcher; the same command resumes it" in interrupted.output()

    assert crashed.end() == 1
    failure = crashed.failure()
    assert failure is not None
    assert (failure.role, failure.rank, failure.cause) == ("trainer.0", 1, "killed by SIGKILL")
    assert failure.last_lines
    assert "failed: trainer.0 on rank 1: killed by SIGKILL" in crashed.output()
    crashed.assert_nothing_left()
    assert_cleared(temporary)
    assert len({*crashed.ports(), *interrupted.ports()}) == len(crashed.ports()) + len(interrupted.ports())

    resumed, other = start_both(launches, temporary, FAULTS, FAULTS_ON_FILES)
    wait_for("a second attempt", lambda: len(resumed.attempts) == 2, WAIT_SECONDS, missing=resumed.output)
    resumed.wait_for_state("inference.0", "ready")
    resumed.kill_role("inference", 0)
    other.wait_for_step(STEPS)
    assert other.end() == 0, other.output()
    assert_whole(other)
    resumed.wait_for_step(STEPS)
    wait_for("training_finished", lambda: Events(resumed.attempts[-1]).get("training_finished"), WAIT_SECONDS)
    resumed.assert_nothing_left()
    assert resumed.end() == 0, resumed.output()
    assert_whole(resumed)
    assert_cleared(temporary)
    assert len({row["attempt"] for row in resumed.rows()}) == 2
    assert_goodput(resumed, done)
    assert_recovered(resumed, other)
    traces = {file.name for file in resumed.run.attempts.glob("*/traces/*")}
    assert traces == {f"rl-{step}.rank-{rank}.json.gz" for step in range(4, 8) for rank in range(2)}

    refused = launches.submit("r", ONE_SERVER, TWO_RANKS)
    assert refused.end() == 2
    assert "start a new run with name=r-2" in refused.output()
    assert_evaluated_alike(launches, resumed)


def assert_goodput(resumed: Launched, interrupted_at: int) -> None:
    """The interrupted trainer and the last one each logged the goodput of the run so far."""
    interruption, end = resumed.rows("goodput")
    assert (interruption["step"], interruption["goodput/restarts"]) == (interrupted_at, 0)
    assert end["goodput/restarts"] > 1
    assert end["goodput/requeue_seconds"] > 0
    assert 0 < end["goodput/useful_seconds"] < end["goodput/wall_seconds"]


def assert_recovered(resumed: Launched, on_files: Launched) -> None:
    """Every role was restarted once in the attempt that resumed the run, the trainer with its fault in the timeline."""
    again = ["starting", "ready", "restarting", "starting", "ready"]
    assert states_of(resumed, "inference.0")[:5] == again, "the server that was killed by hand"
    assert states_of(resumed, "trainer.0")[:6] == [*again[:2], "fault", *again[2:]]
    for launched, faults in ((resumed, FAULTS), (on_files, FAULTS_ON_FILES)):
        for fault in parse_faults(faults):
            assert states_of(launched, f"{fault.target}.0").count("restarting") == 1, fault.text


def assert_cleared(temporary: Path) -> None:
    """What torch compiled may stay, for the next attempt."""
    caches = ("torchinductor_", "rollcall-cache-")
    assert [each.name for each in temporary.iterdir() if not each.name.startswith(caches)] == []


def start_both(
    launches: Launches, temporary: Path, faults: Sequence[str] = (), faults_on_files: Sequence[str] = ()
) -> tuple[Launched, Launched]:
    """Two runs, new or resumed: they differ in where their samples travel, and one has two trainer processes. The new
    one of these starts a fork server of its own, as a user's run does."""
    env = {"TMPDIR": str(temporary)}
    files = ("streams.backend=files", f"recovery.trainer={len(faults)}")
    return (
        launches.submit(
            "r",
            ONE_SERVER,
            TWO_RANKS,
            "debug.profile_steps=[4,7]",
            f"faults=[{','.join(faults)}]",
            env=env,
            own_forks=not faults,
        ),
        launches.submit("crashed", ONE_SERVER, *files, f"faults=[{','.join(faults_on_files)}]", env=env),
    )


def states_of(launched: Launched, role: str) -> list[str]:
    """The states of a role in the newest attempt, in order."""
    return [state for name, state in launched.history() if name == role]


def assert_evaluated_alike(launches: Launches, finished: Launched) -> None:
    """Evaluating the newest commit of a run gives what the run itself said of these weights."""
    again = launches.evaluate(finished.run, "again", "checkpoint=latest")
    assert again.end() == 0, again.output()
    (measured,) = (row for row in again.rows("eval") if row["step"] == STEPS)
    (then,) = (row for row in finished.rows("eval") if row["step"] == STEPS)
    assert measured["eval/accuracy"] == then["eval/accuracy"], "the same weights, from the newest commit"
    found = json.loads(again.run.evaluation.read_text())["sets"]["held_out"]
    assert (found["accuracy"], found["prompts"]) == (then["eval/accuracy"], 32)
    assert len(read_samples(finished.run).where(Filter(kind="train"))) >= STEPS * PROMPTS


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
    launched = launches.submit("r", ONE_SERVER, own_forks=True)
    if moment == "world":
        launched.wait_for_world()
    else:
        launched.wait_for_state("inference.0", "starting")
    launched.interrupt(number)
    launched.assert_nothing_left()
    assert launched.end() == (130 if number == signal.SIGINT else -signal.SIGKILL)


def test_a_job_that_outlives_its_launcher_keeps_the_run_and_a_second_ctrl_c_ends_it_at_once(launches: Launches) -> None:
    launched = launches.submit("r", ONE_SERVER, own_forks=True)
    launched.wait_for_state("trainer.0", "starting")
    with (launched.run.job_lock).open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert_forked_by_launcher(launched, "pipeline.roles.actor")
    launched.interrupt(signal.SIGINT)
    launched.interrupt(signal.SIGINT)
    launched.assert_nothing_left()
    assert launched.end() == 130
    with (launched.run.job_lock).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)


def assert_forked_by_launcher(launched: Launched, role: str) -> None:
    """The job has one fork server, the launcher's, and the role is below it."""
    children = {process.pid: " ".join(process.cmdline()) for process in psutil.Process(launched.process.pid).children()}
    assert sorted("fork server" in command for command in children.values()) == [False, True], children
    (server,) = [pid for pid, command in children.items() if "fork server" in command]
    (controller,) = {*children} - {server}
    below = psutil.Process(controller).children(recursive=True)
    assert not [process for process in below if "fork server" in " ".join(process.cmdline())]

    def is_below() -> bool:
        processes = psutil.Process(server).children(recursive=True)
        return any(role in " ".join(process.cmdline()) for process in processes)

    wait_for(f"{role} below the launcher's fork server", is_below, WAIT_SECONDS)


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
    assert max(row["staleness/max"] for row in rows) <= 2
    assert rows[0]["mismatch_max"] < 1e-4, "trainer and servers disagree on the first batch, which has no lag"
    assert [row["step"] for row in launched.rows("eval")] == [0, STEPS]
    settled = sorted(json.loads(line)["position"] for line in launched.run.ledger.read_text().splitlines())
    assert len(settled) == len(set(settled)) == STEPS * PROMPTS
    assert launched.run.report.exists()
    assert (launched.run.model / "model.safetensors").exists()
    finished = Events(launched.attempts[-1]).get("training_finished")
    assert finished is not None
    assert finished.by == "trainer.0"
