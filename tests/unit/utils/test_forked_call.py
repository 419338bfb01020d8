"""A call in a forked program gives what the function gives, and nothing of it stays."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.utils.fork_server import Stage
from pipeline.utils.forked_call import forked_call
from pipeline.utils.forked_process import ForkServer
from tests.support.processes import gone

THERE = "called_there"
FUNCTIONS = """
import os, signal, sys, time
from pathlib import Path
from pipeline.errors import ConfigError
def add(a, b):
    print("from a library")
    return a + b, os.getpid(), "colorsys" in sys.modules
def refuse(value):
    raise ConfigError("model.path", value, "another", "see above")
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def pause(seconds):
    time.sleep(seconds)
    return os.getpid()
def wait(file):
    Path(file).write_text(str(os.getpid()))
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer.start([Stage("small", []), Stage("large", ["colorsys"])], ready=1) as running:
        yield running


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{THERE}.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_the_result_comes_from_a_fork_with_its_stages_modules(
    server: ForkServer, capsys: pytest.CaptureFixture[str]
) -> None:
    total, pid, has_module = forked_call(server.address, "large", THERE, "add", 2, 3)
    assert (total, has_module) == (5, True)
    assert pid != os.getpid()
    assert gone(pid)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "from a library\n")


def test_what_the_function_raises_is_raised(server: ForkServer) -> None:
    with pytest.raises(ConfigError) as refused:
        forked_call(server.address, "small", THERE, "refuse", "here")
    assert str(refused.value) == str(ConfigError("model.path", "here", "another", "see above"))


def test_without_a_result_the_reason_is_an_os_error(server: ForkServer) -> None:
    with pytest.raises(ChildProcessError, match=f"{THERE}.die in a fork: exit code -9"):
        forked_call(server.address, "small", THERE, "die")
    with pytest.raises(ChildProcessError, match="exit code 1"):
        forked_call(server.address, "small", "no_such_module_here", "die", ConfigError)
    with pytest.raises(OSError, match="there is no fork server"):
        forked_call("", "small", THERE, "die")
    with pytest.raises(OSError, match="No such file"):
        forked_call("/no/server", "small", THERE, "die")


def test_a_long_call_reports_once_what_it_waits_for(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("pipeline.utils.forked_call.SILENT_SECONDS", 1.0)
    pid = forked_call(server.address, "small", THERE, "pause", 2.5)
    waited = f"waiting for {THERE}.pause for 1 s, of 300 at most: its process {pid} is at work\n"
    assert capsys.readouterr().err == waited
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(4)\n")
    with ForkServer.start([Stage("slow", ["slow_to_import"])], ready=0) as importing:
        forked_call(importing.address, "slow", THERE, "pause", 0.0)
    waited = f"waiting for {THERE}.pause for 1 s, of 300 at most: stage 'slow' of the fork server imports\n"
    assert capsys.readouterr().err == waited


def test_a_call_ends_at_its_deadline(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.utils.forked_call.SECONDS", 2.0)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="no result within 2 s"):
            forked_call(server.address, "small", THERE, "wait", f"{folder}/pid")
        assert time.monotonic() - began >= 2.0
        pid = int(Path(f"{folder}/pid").read_text())
    deadline = time.monotonic() + 20
    while not gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
