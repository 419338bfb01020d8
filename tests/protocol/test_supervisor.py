"""Supervisors of several ranks with real processes: who ends, in which order, and what is said of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from pipeline.run.events import LAUNCHER
from pipeline.utils import shared_files
from pipeline.utils.subprocesses import Child
from pipeline.utils.waiting import Deadline, wait_for
from slurm.agent import agent, neighbor_watch, oom
from slurm.agent.control_tree import ChangeBoard
from slurm.submission.launcher_signals import describe
from tests.fakes.configs import make_config
from tests.patience import WAIT_SECONDS
from tests.protocol.small_roles import BEATS, FOREVER, RANKS, STUBBORN, STUCK, UNTIL_TOLD, Attempt

pytestmark = pytest.mark.integration


def test_a_finished_run_comes_down_in_order_and_redis_last(attempt: Callable[..., Attempt]) -> None:
    run = attempt(trainer=UNTIL_TOLD)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    run.events.publish("training_finished", "trainer.0")
    assert run.join() == {"finished"}
    stopped = [role for role, state in run.history() if state == "stopped"]
    assert set(stopped[:3]) == {"actor.0", "preprocessor.0", "trainer.0"}
    assert stopped[3:] == ["inference.0", "redis.0"]


def test_a_role_without_gpus_sees_none(attempt: Callable[..., Attempt], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    tells = f"import os; print('GPUs', repr(os.environ['CUDA_VISIBLE_DEVICES']))\n{FOREVER}"
    run = attempt(gpus={"inference": (0, 1)}, inference=tells, actor=tells)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    run.events.publish("training_finished", "trainer.0")
    assert run.join() == {"finished"}
    assert run.paths.log("actor", 0).read_text().startswith("GPUs ''\n")
    assert run.paths.log("inference", 0).read_text().startswith("GPUs '0,1'\n")


def test_a_role_that_is_killed_fails_every_rank_and_is_named(attempt: Callable[..., Attempt]) -> None:
    run = attempt()
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    os.kill(run.pid_of("inference"), 9)
    assert run.join() == {"failed"}
    failure = run.first_failure
    assert (failure.role, failure.rank, failure.cause) == ("inference.0", 2, "killed by SIGKILL")
    assert failure.last_lines == ("up",)
    assert ("redis.0", "stopped") in run.history()


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel says of its own counters: three processes have been ended for lack of memory."""
    made = tmp_path / "vmstat"
    made.write_text("pgfault 7\noom_kill 3\nthp_fault 1\n")
    monkeypatch.setattr(oom, "NODE", made)
    monkeypatch.setattr(oom, "GROUPS", tmp_path / "none")
    return made


def test_a_role_that_the_kernel_ended_for_lack_of_memory_says_so(
    attempt: Callable[..., Attempt], counters: Path
) -> None:
    run = attempt()
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    counters.write_text("pgfault 9\noom_kill 4\nthp_fault 1\n")
    os.kill(run.pid_of("inference"), 9)
    assert run.join() == {"failed"}
    failure = run.first_failure
    told = "killed by SIGKILL, as the kernel ended 1 of the processes of this node for lack of memory"
    assert failure.cause == told
    assert "cluster.memory" in failure.hint


def test_a_server_whose_engine_was_ended_for_lack_of_memory_says_so_though_it_ends_well(
    attempt: Callable[..., Attempt], counters: Path
) -> None:
    says = "print('EngineCore: Signal 9 (SIGKILL) received by PID 7', flush=True)"
    run = attempt(inference=f"open({str(counters)!r}, 'w').write('oom_kill 5'); {says}")
    assert run.join() == {"failed"}
    told = "exited with code 0, after one of its processes was killed by SIGKILL, as the kernel ended 2 of"
    assert run.first_failure.cause.startswith(told)


def test_a_role_that_fails_while_the_kernel_ends_strangers_is_not_said_to_lack_memory(
    attempt: Callable[..., Attempt], counters: Path
) -> None:
    fails = "raise OSError(98, 'Address already in use')"
    run = attempt(inference=f"open({str(counters)!r}, 'w').write('oom_kill 5'); {fails}")
    assert run.join() == {"failed"}
    assert run.first_failure.cause == "exited with code 1"
    assert "a port was taken" in run.first_failure.hint


def test_a_role_that_ends_well_but_too_early_has_failed(attempt: Callable[..., Attempt]) -> None:
    run = attempt(inference="print('up', flush=True)")
    assert run.join() == {"failed"}
    failure = run.first_failure
    assert (failure.role, failure.cause) == ("inference.0", "exited with code 0")


def test_a_role_whose_port_is_taken_names_who_has_it(attempt: Callable[..., Attempt]) -> None:
    listen = "import socket, time; s = socket.create_server(('127.0.0.2', 0)); print(s.getsockname()[1], flush=True)"
    # A process apart: what this one forks for the roles holds copies of its sockets for a moment.
    command = [sys.executable, "-c", f"{listen}; time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as another:
        try:
            assert another.stdout is not None
            port = int(another.stdout.readline())
            run = attempt(ports={"inference": (port,)}, inference="raise SystemExit('Address already in use')")
            assert run.join() == {"failed"}
        finally:
            another.kill()
    assert f"exited with code 1; its port {port} is taken by uid {os.getuid()} (" in run.first_failure.cause
    assert f"pid {another.pid} (" in run.first_failure.cause


def test_a_role_that_never_becomes_ready_fails_by_its_deadline(attempt: Callable[..., Attempt]) -> None:
    run = attempt(startup_seconds=4, actor="import time; time.sleep(600)")
    assert run.join() == {"failed"}
    assert run.first_failure.cause == "waited 4.0 s for actor.0 to become ready"


def test_a_role_that_gives_no_answer_keeps_nobody_from_hearing_the_end(attempt: Callable[..., Attempt]) -> None:
    run = attempt(actor=f"{FOREVER}  # mute", startup_seconds=60)
    try:
        wait_for("the other roles", lambda: run.ready() == {f"{role}.0" for role in RANKS} - {"actor.0"}, WAIT_SECONDS)
        run.notices[0].reason = "SIGTERM"
        assert run.join() == {"preempted"}
    finally:
        run.spoken.set()
    assert ("actor.0", "ready") not in run.history()


def test_a_question_that_raises_is_told_when_the_time_is_up(attempt: Callable[..., Attempt]) -> None:
    run = attempt(startup_seconds=1.5, actor=f"{FOREVER}  # no log")
    assert run.join() == {"failed"}
    assert run.first_failure.cause.endswith("to become ready; missing: FileNotFoundError: no log")


def test_a_role_that_is_stopped_is_found_ended_and_named_with_its_stacks(attempt: Callable[..., Attempt]) -> None:
    run = attempt(heartbeat_seconds=2, actor=f"{BEATS}\nwork()")
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    os.kill(run.pid_of("actor"), signal.SIGSTOP)
    assert run.join() == {"failed"}
    failure = run.first_failure
    assert (failure.role, failure.rank, failure.last_lines) == ("actor.0", 0, ("up",))
    assert "hung: its process python" in failure.cause
    assert " has been stopped (SIGSTOP) for " in failure.cause
    assert any(" in work" in line for line in failure.stacks)
    assert " in work" in run.paths.log("actor", 0).read_text()
    assert "cluster.heartbeat_seconds" in failure.hint
    assert run.left() == set()


def test_a_role_that_tells_seldom_that_it_works_is_said_to_be_stopped_too(attempt: Callable[..., Attempt]) -> None:
    """What it told last of its work is older than what its thread told: the longer silence is not the reason."""
    run = attempt(heartbeat_seconds=3, actor=f"{BEATS}\nwhile True: heartbeat.beat(); time.sleep(2)")
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    os.kill(run.pid_of("actor"), signal.SIGSTOP)
    assert run.join() == {"failed"}
    assert "stopped (SIGSTOP)" in run.first_failure.cause


def test_a_program_that_is_not_ours_and_is_stopped_is_named_before_those_that_wait_for_it(
    attempt: Callable[..., Attempt],
) -> None:
    run = attempt(heartbeat_seconds=8, redis=FOREVER)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    os.kill(run.pid_of("redis"), signal.SIGSTOP)
    assert run.join() == {"failed"}
    failure = run.first_failure
    assert failure.role == "redis.0"
    assert " has been stopped (SIGSTOP) for 4 s" in failure.cause
    assert any("thread python" in line and "stopped (SIGSTOP)" in line for line in failure.stacks)
    assert "thread python" in run.paths.log("redis", 0).read_text()


def starts(program: str) -> str:
    """A program that starts another one and waits for it."""
    return f"import subprocess, sys\nprint('up', flush=True)\nsubprocess.run([sys.executable, '-c', {program!r}])"


def test_a_stopped_torchrun_is_named_although_its_ranks_run(attempt: Callable[..., Attempt]) -> None:
    run = attempt(heartbeat_seconds=4, trainer=starts(f"{BEATS}\nwork()"))
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    torchrun = run.pid_of("trainer")
    os.kill(torchrun, signal.SIGSTOP)
    assert run.join() == {"failed"}
    failure = run.first_failure
    assert failure.role == "trainer.0"
    assert f"(pid {torchrun}) has been stopped" in failure.cause
    assert any("stopped (SIGSTOP)" in line for line in failure.stacks)
    assert " in work" in run.paths.log("trainer", 0).read_text(), "its ranks tell their stacks beside it"


def test_an_engine_that_is_stopped_behind_its_server_is_named_and_shows_its_stacks(
    attempt: Callable[..., Attempt],
) -> None:
    engine = "from pipeline.utils import heartbeat\nheartbeat.show_stacks()\nimport time\n" + (
        "def answer():\n    print('engine', flush=True)\n    time.sleep(600)\nanswer()"
    )
    run = attempt(heartbeat_seconds=4, inference=starts(engine))
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    log = run.paths.log("inference", 0)
    wait_for("the engine", lambda: "engine" in log.read_text(), WAIT_SECONDS)
    (stopped,) = psutil.Process(run.pid_of("inference")).children()
    stopped.suspend()
    assert run.join() == {"failed"}
    failure = run.first_failure
    assert (failure.role, f"(pid {stopped.pid}) has been stopped" in failure.cause) == ("inference.0", True)
    assert any(" in answer" in line for line in failure.stacks)
    assert "thread python" in log.read_text(), "the server itself registered nothing"


def test_an_agent_that_shows_no_sign_of_life_fails_the_attempt_and_is_named(
    attempt: Callable[..., Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbor_watch, "TOUCH_SECONDS", 0.2)
    run = attempt()
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    with neighbor_watch.NeighborWatch(
        run.paths, 2, 3, 1.0, partial(agent._handle_lost_rank, run.paths, make_config(), "agent.2", ChangeBoard(2, 3))
    ):  # rank 0 is silent
        assert run.join() == {"failed"}
    failure = run.first_failure
    assert (failure.role, failure.rank) == ("agent.0", 0)
    assert failure.cause.startswith("no sign of life for 1 s")


def test_a_role_whose_work_is_stuck_is_found_although_its_process_runs(attempt: Callable[..., Attempt]) -> None:
    stuck = f"{BEATS}{STUCK}\nwith heartbeat.busy_with('stepping', 1):\n    get_stuck()"
    run = attempt(heartbeat_seconds=2, trainer=stuck)
    assert run.join() == {"failed"}
    failure = run.first_failure
    assert failure.role == "trainer.0"
    assert "makes no progress in 'stepping'" in failure.cause
    assert any(" in get_stuck" in line for line in failure.stacks)


def test_a_silence_while_the_attempt_ends_is_no_failure(attempt: Callable[..., Attempt]) -> None:
    until_told = UNTIL_TOLD.replace("time.sleep", "heartbeat.beat() or time.sleep")
    run = attempt(heartbeat_seconds=2, trainer=f"{BEATS}\n{until_told}\ntime.sleep(2.6)")
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    run.notices[0].reason = "SIGTERM"
    assert run.join() == {"preempted"}
    assert not run.paths.first_failure.exists()


def test_draining_waits_for_the_trainer_to_commit_and_end(attempt: Callable[..., Attempt]) -> None:
    run = attempt(trainer=f"{UNTIL_TOLD}\ntime.sleep(1.5)")
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    run.notices[2].reason = "SIGTERM"
    assert run.join() == {"preempted"}
    history = run.history()
    assert ("trainer.0", "stopping") not in history
    assert history.index(("trainer.0", "stopped")) < history.index(("inference.0", "stopping"))


def test_a_trainer_that_does_not_end_within_the_grace_is_ended(attempt: Callable[..., Attempt]) -> None:
    run = attempt(trainer=STUBBORN)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    run.notices[0].reason = "SIGTERM"
    assert run.join() == {"preempted"}
    assert ("trainer.0", "stopping") in run.history()
    assert run.left() == set()


def test_a_trainer_has_as_much_time_to_commit_when_something_else_failed(attempt: Callable[..., Attempt]) -> None:
    run = attempt(trainer=f"{UNTIL_TOLD}\ntime.sleep(1.5)")
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    os.kill(run.pid_of("actor"), 9)
    assert run.join() == {"failed"}
    history = run.history()
    assert ("trainer.0", "stopping") not in history
    assert history.index(("inference.0", "stopping")) < history.index(("trainer.0", "stopped"))
    assert history.index(("trainer.0", "stopped")) < history.index(("redis.0", "stopping"))


def test_a_role_that_the_kernel_does_not_end_keeps_no_other_alive(
    attempt: Callable[..., Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, kill = attempt(redis=STUBBORN, actor=STUBBORN), Child.kill
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    stuck = run.pid_of("redis")

    def cannot(child: Child, seconds: float = 0.0) -> int:
        return -9 if child.pid == stuck else kill(child, seconds)

    monkeypatch.setattr(Child, "kill", cannot)
    run.events.publish("failed", "agent.9", "for the test")
    try:
        assert run.join() == {"failed"}
        assert {process.pid for process in run.left()} == {stuck}
        assert "the kernel keeps it" in next(run.paths.timeline.glob("rank-0.jsonl")).read_text()
    finally:
        monkeypatch.undo()
        next(role for role in run.supervisors[0].roles if role.name == "redis.0").kill()


def test_stubborn_roles_are_ended_with_their_groups(attempt: Callable[..., Attempt]) -> None:
    run = attempt(actor=STUBBORN, redis=STUBBORN)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    run.events.publish("failed", "agent.9", "for the test")
    assert run.join() == {"failed"}
    assert not run.paths.first_failure.exists()
    assert run.left() == set()


def test_stubborn_roles_do_not_keep_a_finished_run_beyond_its_bound(attempt: Callable[..., Attempt]) -> None:
    run = attempt(actor=STUBBORN, preprocessor=STUBBORN, inference=STUBBORN, redis=STUBBORN, trainer=UNTIL_TOLD)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    run.events.publish("training_finished", "trainer.0")
    deadline = Deadline("the descent", 2 * run.cluster.stop_seconds + 1)
    assert run.join() == {"finished"}
    assert not deadline.passed
    assert run.left() == set()


def test_nobody_waits_for_roles_whose_agent_has_left(attempt: Callable[..., Attempt]) -> None:
    run = attempt(trainer=STUBBORN)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    shared_files.write_document(run.paths.down("agent.1"), "left")
    run.notices[2].reason = "SIGTERM"
    wait_for("Redis to be down", lambda: ("redis.0", "stopped") in run.history(), run.cluster.grace_seconds - 0.5)
    assert run.join() == {"preempted"}


def test_a_trainer_that_fails_to_commit_while_draining_is_a_failure(attempt: Callable[..., Attempt]) -> None:
    run = attempt(trainer=f"{UNTIL_TOLD}\nraise SystemExit(5)")
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    run.notices[0].reason = "SIGTERM"
    run.join()
    assert run.ends[RANKS["trainer"]] == "failed"
    failure = run.first_failure
    assert (failure.role, failure.exit_code) == ("trainer.0", 5)


SLOW_STEP = (
    f"{UNTIL_TOLD}\ntime.sleep(GRACE + 3)\n"
    "pathlib.Path(sys.argv[1], '..', 'checkpoint').touch()  # what a step and its checkpoint end with"
)
"""A trainer whose step and checkpoint take longer than the grace and the time to stop together."""


def by_launcher(run: Attempt) -> None:
    why = describe(signal.SIGINT)
    assert run.events.publish("draining", LAUNCHER, why, patient=True)


@pytest.mark.parametrize(("patient", "saved"), [(True, True), (False, False)])
def test_a_launcher_that_waits_lets_a_step_and_its_checkpoint_take_longer_than_the_grace(
    attempt: Callable[..., Attempt], patient: bool, saved: bool
) -> None:
    run = attempt(trainer=SLOW_STEP.replace("GRACE", "3"))
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    if patient:
        by_launcher(run)
    else:
        run.notices[0].reason = "SIGTERM"  # as Slurm tells it
    assert run.join() == {"preempted"}
    assert (run.paths.root / "checkpoint").exists() == saved
    states = dict(run.history())
    assert states["trainer.0"] == "stopped"
    assert [role for role, state in run.history() if state == "stopped"][-1] == "redis.0"


def test_a_launcher_that_waits_no_longer_leaves_the_trainer_its_grace_from_then_on(
    attempt: Callable[..., Attempt],
) -> None:
    run = attempt(trainer=STUBBORN)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    by_launcher(run)
    wait_for("the actor to be down", lambda: ("actor.0", "stopped") in run.history(), WAIT_SECONDS)
    time.sleep(run.cluster.grace_seconds + run.cluster.stop_seconds)
    assert ("trainer.0", "stopping") not in run.history()
    for notice in run.notices.values():  # its controller, once the launcher is gone
        notice.reason = "SIGTERM"
    assert run.join() == {"preempted"}
    asked = next(line for line in run.lines() if (line["role"], line["state"]) == ("trainer.0", "stopping"))
    told = next(line for line in run.lines() if (line["role"], line["state"]) == ("actor.0", "stopped"))
    assert asked["time"] - told["time"] > 2 * run.cluster.grace_seconds, "once without an end to it, once for good"


def test_a_trainer_that_hangs_while_its_launcher_waits_is_found(attempt: Callable[..., Attempt]) -> None:
    run = attempt(heartbeat_seconds=2, trainer=f"{BEATS}{STUCK}\nget_stuck()")
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    by_launcher(run)
    assert run.join() == {"failed"}
    assert run.first_failure.role == "trainer.0"
    assert any("get_stuck" in line for line in run.first_failure.stacks)
