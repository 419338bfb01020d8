"""A role that crashes or hangs is restarted in place by its supervisor; with real processes."""

import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pipeline.roles.redis import find_server
from pipeline.run.fault_moments import FaultRecords
from pipeline.run.fault_plan import parse_faults
from pipeline.utils import subprocesses
from pipeline.utils.subprocesses import Child
from pipeline.utils.waiting import wait_for
from slurm.agent import supervisor
from slurm.agent.fault_injection import exit_with
from slurm.agent.recovery_policy import RECOVERY
from tests.patience import WAIT_SECONDS
from tests.protocol.small_roles import BEATS, FOREVER, Attempt
from tests.support.processes import runs

pytestmark = pytest.mark.integration

UP = ["starting", "ready"]
"""What a role's states are until it works."""


def test_a_server_that_was_ready_is_started_again_as_often_as_agreed(attempt: Callable[..., Attempt]) -> None:
    run = attempt(restarts=2)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    again = ["restarting", *UP]
    for states in (UP + again, UP + again * 2):
        killed = run.pid_of("inference")
        os.kill(killed, 9)
        wait_for("a new server", partial(run.has_been, "inference.0", states), WAIT_SECONDS)
        assert run.pid_of("inference") != killed
    wait_for("the third server to run", lambda: run.paths.log("inference", 0).read_text() == "up\n" * 3, WAIT_SECONDS)
    os.kill(run.pid_of("inference"), 9)
    assert run.join() == {"failed"}
    failure = run.first_failure
    assert (failure.role, failure.cause) == ("inference.0", "killed by SIGKILL")
    assert run.has_been("inference.0", [*UP, *again, *again, "failed"])
    assert run.paths.log("inference", 0).read_text() == "up\n" * 3
    assert run.left() == set()


def test_a_server_that_fails_at_its_start_is_started_again_unless_it_refuses_its_command_line(
    attempt: Callable[..., Attempt],
) -> None:
    fails = "import sys; sys.exit(1 if '--restart' not in sys.argv else 2)"
    run = attempt(restarts=3, inference=fails)
    assert run.join() == {"failed"}
    assert run.has_been("inference.0", ["starting", "restarting", "starting", "failed"])
    assert run.first_failure.cause == "exited with code 2"


def test_a_role_whose_start_fails_for_a_while_is_started_again_and_one_that_refuses_its_command_line_is_not(
    attempt: Callable[..., Attempt],
) -> None:
    at = "import pathlib, sys, time\nat = pathlib.Path(sys.argv[1]).parent"
    taken = (
        f"{at}\nwith (at / 'tries').open('a') as file: file.write('x')\n"
        f"if len((at / 'tries').read_text()) < 3: sys.exit(1)\n(at / 'go').touch()\n{FOREVER}"
    )
    refused = f"{at}\nwhile not (at / 'go').exists(): time.sleep(0.02)\ntime.sleep(1)\nsys.exit(2)"
    run = attempt(restarts=2, redis=taken, actor=refused)
    assert run.join() == {"failed"}
    assert (run.first_failure.role, run.first_failure.cause) == ("actor.0", "exited with code 2")
    assert run.has_been("actor.0", ["starting", "failed"])
    states = [state for name, state in run.history() if name == "redis.0"]
    assert states[:6] == ["starting", "restarting", "starting", "restarting", *UP]
    assert [line["detail"] for line in run.lines() if line["state"] == "restarting"] == [
        f"exited with code 1; restarted, {used} of recovery.redis=2" for used in (1, 2)
    ]


def test_a_server_is_started_again_once_nothing_of_its_group_is_left(
    attempt: Callable[..., Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    helps = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)  # helper'])"
    run = attempt(restarts=2, inference=f"{helps}\n{FOREVER}")
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    below = psutil.Process(run.pid_of("inference")).children()
    (helper,) = (process for process in below if "helper" in process.cmdline()[-1])
    with monkeypatch.context() as patch:  # the kernel ends the helper late, as one whose GPU has much memory
        patch.setattr(Child, "_signal", lambda child, number: os.kill(child.pid, number))
        os.kill(run.pid_of("inference"), 9)
        wait_for("the end of the server", partial(run.has_been, "inference.0", [*UP, "restarting"]), WAIT_SECONDS)
        time.sleep(2 * RECOVERY["inference"].pauses[0])
        assert run.has_been("inference.0", [*UP, "restarting"])
        assert helper.is_running()
    helper.kill()
    wait_for("a new server", partial(run.has_been, "inference.0", [*UP, "restarting", *UP]), WAIT_SECONDS)
    run.events.publish("training_finished", "trainer.0")
    assert run.join() == {"finished"}
    assert run.left() == set()


def test_a_disk_that_fails_while_a_server_is_started_again_holds_and_fails_nobody(
    attempt: Callable[..., Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = attempt(restarts=2)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    tried: list[Path] = []

    def fails(_child: Child, _argv: object, log: Path, *_: object) -> None:
        tried.append(log)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(supervisor, "FINAL_WRITE_TIMEOUT", 0.5)
        patch.setattr(Child, "__init__", fails)
        os.kill(run.pid_of("inference"), 9)
        wait_for("many tries", lambda: len(tried) > 15, WAIT_SECONDS)
    wait_for("a new server", partial(run.has_been, "inference.0", [*UP, "restarting", *UP]), WAIT_SECONDS)
    monkeypatch.setattr(Child, "__init__", fails)
    tried.clear()
    os.kill(run.pid_of("inference"), 9)
    wait_for("the first try", lambda: bool(tried), WAIT_SECONDS)
    heard = time.monotonic()
    run.events.publish("training_finished", "trainer.0")
    assert run.join() == {"finished"}
    assert time.monotonic() - heard < supervisor.FINAL_WRITE_TIMEOUT / 2
    assert run.has_been("inference.0", [*UP, "restarting", *UP, "restarting", "stopped"])


def test_a_server_that_cannot_be_started_again_for_long_fails_the_attempt(
    attempt: Callable[..., Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = attempt(restarts=2)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    monkeypatch.setattr(supervisor, "FS_OUTAGE_TIMEOUT", 2.0)
    monkeypatch.setattr(Child, "group_is_gone", lambda _child: False)
    os.kill(run.pid_of("inference"), 9)
    assert run.join() == {"failed"}
    assert run.first_failure.cause.startswith(
        "waited 2.0 s for inference.0 to be restarted; missing: the end of its processes"
    )


def test_actor_preprocessor_and_redis_are_restarted_while_the_other_roles_stay(
    attempt: Callable[..., Attempt],
) -> None:
    early = (
        "import pathlib, sys, time\nprint('up', flush=True)\ngo = pathlib.Path(sys.argv[1]).with_name('go')\n"
        "while not go.exists(): time.sleep(0.02)\ngo.unlink()"
    )
    run = attempt(restarts=1, preprocessor=early)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    os.kill(run.pid_of("actor"), signal.SIGKILL)
    os.kill(run.pid_of("redis"), signal.SIGTERM)  # blocked by the shield, so nothing happens
    os.kill(run.pid_of("redis"), signal.SIGABRT)
    go = run.paths.events.with_name("go")
    go.touch()
    for role in ("actor.0", "redis.0", "preprocessor.0"):
        wait_for(f"{role} again", partial(run.has_been, role, [*UP, "restarting", *UP]), WAIT_SECONDS)
    go.touch()
    assert run.join() == {"failed"}
    failure = run.first_failure
    assert (failure.role, failure.cause) == ("preprocessor.0", "exited with code 0"), "it exits early a second time"
    assert run.history().count(("preprocessor.0", "restarting")) == 1
    details = {line["role"]: line["detail"] for line in run.lines() if line["state"] == "restarting"}
    assert details["actor.0"] == "killed by SIGKILL; restarted, 1 of recovery.actor=1"
    assert details["redis.0"] == "killed by SIGABRT; restarted, 1 of recovery.redis=1"
    assert [state for name, state in run.history() if name == "trainer.0"][:2] == UP
    assert run.left() == set()


@pytest.fixture
def orphans() -> Iterator[None]:
    """This process adopts orphans, as an agent does, and ends those that are left."""
    subprocesses.adopt_orphans()
    yield
    subprocesses.end_descendants()
    ctypes.CDLL(None).prctl(subprocesses.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.usefixtures("orphans")
@pytest.mark.parametrize("steps", [1, 0])
def test_a_trainer_is_restarted_with_a_new_name_once_it_has_completed_a_step_and_no_worker_is_left(
    attempt: Callable[..., Attempt], steps: int
) -> None:
    worker = (
        "import os, sys, time\nfrom pipeline.utils import heartbeat\nheartbeat.start()\n"
        "print('worker', os.getpid(), flush=True)\ntime.sleep(600)"
    )
    reports = (
        f"import pathlib, subprocess, sys, time\nprint('up', *sys.argv[2:], flush=True)\n"
        f"subprocess.Popen([sys.executable, '-c', {worker!r}], start_new_session=True)\n"
        "from pipeline.run.paths import AttemptPaths\nfrom pipeline.roles.role_context import PROGRESS, Status\n"
        "from pipeline.utils import shared_files\n"
        "paths = AttemptPaths(pathlib.Path(sys.argv[1]).parents[2], 'r', 'a-0')\n"
        f"status = Status(state='ready', pid=1, time=0.0, numbers={{PROGRESS: {steps}.0}})\n"
        "shared_files.write_document(paths.status('trainer.0'), status)\nprint('reported', flush=True)\ntime.sleep(600)"
    )
    run = attempt(restarts=1, trainer=reports)
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    log = run.paths.log("trainer", 0)
    wait_for("its worker and report", lambda: all(word in log.read_text() for word in ("worker", "rep")), WAIT_SECONDS)
    (old,) = psutil.Process(run.pid_of("trainer")).children()
    os.kill(run.pid_of("trainer"), 9)
    if steps:
        wait_for("a new trainer", partial(run.has_been, "trainer.0", [*UP, "restarting", *UP]), WAIT_SECONDS)
        assert not runs(old), "the new process starts after the last worker of the old one"
        wait_for("its restart count", lambda: "up --restart 1\n" in log.read_text(), WAIT_SECONDS)
        run.events.publish("failed", "agent.9", "for the test")
        assert run.join() == {"failed"}
        return
    assert run.join() == {"failed"}
    assert run.first_failure.cause == "killed by SIGKILL"
    assert run.has_been("trainer.0", [*UP, "failed"])


def test_planned_faults_happen_once_each_at_their_moments_and_are_in_the_timeline(
    attempt: Callable[..., Attempt],
) -> None:
    faults = (
        "exit:preprocessor@save, early:actor@0.5s, kill:redis@step=1, kill:redis@end, stop:inference@step=1, "
        "kill:trainer[1]@1s"
    )
    run = attempt(restarts=2, heartbeat_seconds=4, faults=faults, preprocessor=f"{BEATS}work()", actor=f"{BEATS}work()")
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    records = FaultRecords(run.paths)
    again = [*UP, "fault", "restarting", *UP]
    twice = [*again, *again[2:]]
    wait_for("the actor again", partial(run.has_been, "actor.0", again), WAIT_SECONDS)
    assert run.has_been("redis.0", UP), "its moment has not come"
    for fault in parse_faults(faults.split(",")):
        records.reach(fault)
    for role, states in (("redis.0", twice), ("preprocessor.0", again), ("inference.0", again)):
        wait_for(f"{role} again", partial(run.has_been, role, states), WAIT_SECONDS)
    details = {line["role"]: line["detail"] for line in run.lines() if line["state"] == "restarting"}
    assert details["actor.0"].startswith("exited with code 0; restarted")
    assert details["preprocessor.0"].startswith("exited with code 1; restarted")
    assert details["redis.0"].startswith("killed by SIGKILL; restarted")
    assert "has been stopped (SIGSTOP)" in details["inference.0"]
    assert {line["detail"] for line in run.lines() if line["state"] == "fault"} == set(faults.split(", ")[:5])
    assert [records.is_done(fault) for fault in parse_faults(faults.split(","))] == [True] * 5 + [False]
    run.events.publish("training_finished", "trainer.0")
    assert run.join() == {"finished"}


def test_a_role_that_is_stopped_while_it_starts_is_found_long_before_its_time_to_start_is_over(
    attempt: Callable[..., Attempt],
) -> None:
    run = attempt(heartbeat_seconds=1, faults="stop:actor@start", actor="import time; time.sleep(600)")
    assert run.join() == {"failed"}
    assert "has been stopped (SIGSTOP)" in run.first_failure.cause
    assert run.has_been("actor.0", ["starting", "fault", "failed"])
    assert run.left() == set()


@pytest.mark.parametrize("code", [0, 1])
def test_redis_exits_with_the_code_that_a_fault_requests(tmp_path: Path, code: int) -> None:
    argv = (str(find_server()), "--port", "0", "--dir", str(tmp_path), "--unixsocket", "socket")
    child = Child(argv, tmp_path / "log", dict(os.environ))
    wait_for("redis", lambda: "eady to accept" in (tmp_path / "log").read_text(), WAIT_SECONDS)
    role = SimpleNamespace(pid=child.pid)
    exit_with(role, code)  # type: ignore[arg-type]
    wait_for("its end", lambda: child.poll() is not None, WAIT_SECONDS)
    assert child.poll() == code


def test_a_role_whose_error_would_come_again_is_not_restarted(attempt: Callable[..., Attempt]) -> None:
    reports = (
        "import json, os, pathlib, sys, time\nprint('up', flush=True)\n"
        "from pipeline.errors import TaskError\nfrom pipeline.run.paths import AttemptPaths\n"
        "from pipeline.roles.role_context import Status\nfrom pipeline.utils import shared_files\n"
        "paths = AttemptPaths(pathlib.Path(sys.argv[1]).parents[2], 'r', 'a-0')\n"
        "status = Status(state='failed', pid=1, time=0.0, detail='no reward', is_final=TaskError.is_final)\n"
        "shared_files.write_document(paths.status('actor.0'), status)\nsys.exit(1)"
    )
    run = attempt(restarts=2, actor=reports)
    assert run.join() == {"failed"}
    assert run.first_failure.cause == "exited with code 1: no reward"
    assert ("actor.0", "restarting") not in run.history()


def test_a_server_that_never_was_ready_is_restarted_as_often_as_agreed(attempt: Callable[..., Attempt]) -> None:
    run = attempt(restarts=2, inference="import time; time.sleep(600)", startup_seconds=1.5)
    assert run.join() == {"failed"}
    assert [state for name, state in run.history() if name == "inference.0"].count("starting") == 3


def test_a_server_that_hangs_is_started_again_and_one_that_does_not_come_back_ends_the_attempt(
    attempt: Callable[..., Attempt],
) -> None:
    once = (
        "import pathlib, sys\nat = pathlib.Path(sys.argv[1]).parent / 'once'\nif at.exists(): sys.exit(3)\nat.touch()"
    )
    run = attempt(restarts=2, heartbeat_seconds=2, inference=f"{once}\n{BEATS}\nwork()")
    wait_for("all roles", run.all_ready, WAIT_SECONDS)
    os.kill(run.pid_of("inference"), signal.SIGSTOP)
    assert run.join() == {"failed"}
    assert run.first_failure.cause == "exited with code 3"
    assert [state for name, state in run.history() if name == "inference.0"].count("starting") == 3
