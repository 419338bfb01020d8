"""A server that dies or hangs is started again by its supervisor; with real processes."""

import errno
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from pipeline.utils.subprocesses import Child
from pipeline.utils.waiting import wait_for
from slurm.agent import supervisor
from slurm.agent.role_process import FIRST_PAUSE
from tests.patience import WAIT_SECONDS
from tests.protocol.small_roles import BEATS, FOREVER, Attempt

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
    os.kill(run.pid_of("inference"), 9)
    assert run.join() == {"failed"}
    failure = run.first_failure
    assert (failure.role, failure.cause) == ("inference.0", "killed by SIGKILL")
    assert run.has_been("inference.0", [*UP, *again, *again, "failed"])
    assert run.paths.log("inference", 0).read_text() == "up\n" * 3
    assert run.left() == set()


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
        time.sleep(2 * FIRST_PAUSE)
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

    def fails(_child: Child, _argv: object, log: Path, _env: object) -> None:
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


def test_a_server_that_never_was_ready_and_other_roles_are_not_started_again(attempt: Callable[..., Attempt]) -> None:
    run = attempt(restarts=2, inference="import time; time.sleep(600)", startup_seconds=1.5)
    assert run.join() == {"failed"}
    assert run.has_been("inference.0", ["starting", "failed"])


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
