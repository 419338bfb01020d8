"""The controller of a local job, over agents that are a few rules."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.run.events import Events
from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import RunPaths
from pipeline.utils import shared_files
from slurm.batch import local_controller
from slurm.batch.local_controller import LocalController
from slurm.scheduler.local.local_environment import local_job_environment
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun

TO_COMMIT = 5
"""Looks for which an agent whose trainer commits is still up after it was asked to end."""


class FakeTask:
    """An agent: it has ended with `code`, or ends with 0 some looks after it was asked to."""

    pid = 0

    def __init__(self, code: int | None = None) -> None:
        self._code, self._left = code, TO_COMMIT
        self._asked = False

    def poll(self) -> int | None:
        self._left -= self._asked
        if self._code is None and self._left <= 0:
            self._code = 0
        return self._code

    def send_signal(self, _number: int) -> None:
        self._asked = True


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return FakeRun(tmp_path / "run", make_config(model={"path": "tiny_qwen3", "init": "random"})).paths


@pytest.fixture
def controlled(run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalController:
    """Of an agent that was killed, and one whose trainer commits."""
    for name, value in local_job_environment("local1", "true", 2, run.code).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(local_controller, "_PAUSE", 0.0)
    monkeypatch.setattr(local_controller, "_FINAL_SECONDS", 0.05)
    made = LocalController(tmp_path, run, "local1-0", psutil.Process())
    made.tasks = [FakeTask(-9), FakeTask()]  # type: ignore[list-item]
    return made


def fail_writes(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes nothing for so many writes."""
    left = [times]

    def failing(write: Any) -> Any:
        def act(path: Path, data: bytes) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return write(path, data)

        return act

    for name in ("write_atomic", "create_exclusive"):
        monkeypatch.setattr(shared_files, name, failing(getattr(shared_files, name)))


@pytest.mark.parametrize("times", [0, 3, TO_COMMIT + 2])
def test_what_a_killed_agent_could_not_say_is_said_once_the_disk_takes_it(
    times: int, controlled: LocalController, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_writes(times, monkeypatch)
    assert list(controlled.wait()) == [-9, 0]
    attempt = controlled._paths
    failure = shared_files.read_document(attempt.first_failure, FirstFailure)
    assert failure is not None
    assert failure.one_line().startswith("agent.0 on rank 0: killed by SIGKILL")
    assert Events(attempt).get("failed") is not None
    assert attempt.down("agent.0").exists()


def test_an_agent_that_is_stopped_is_ended_and_named(
    controlled: LocalController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_controller, "STOPPED_SECONDS", 0.3)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        controlled.tasks = [stopped, FakeTask()]  # type: ignore[list-item]
        assert list(controlled.wait()) == [-9, 0]
    failure = shared_files.read_document(controlled._paths.first_failure, FirstFailure)
    assert failure is not None
    assert (failure.role, failure.cause) == ("agent.0", "stopped (SIGSTOP) for 0.3 s, and killed for it")
    assert Events(controlled._paths).get("failed") is not None


def test_a_launcher_that_is_gone_is_named_as_the_reason(
    controlled: LocalController, monkeypatch: pytest.MonkeyPatch
) -> None:
    controlled.tasks = [FakeTask(), FakeTask()]  # type: ignore[list-item]
    monkeypatch.setattr(controlled, "_launcher", None)
    assert list(controlled.wait()) == [0, 0]
    draining = Events(controlled._paths).get("draining")
    assert draining is not None
    assert (draining.why, draining.patient) == ("the launcher was killed", False)


def test_a_disk_that_takes_nothing_any_more_leaves_the_others_their_time(
    controlled: LocalController, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_writes(1_000_000, monkeypatch)
    assert list(controlled.wait()) == [-9, 0]
    assert "the disk to take the events" in capsys.readouterr().out
