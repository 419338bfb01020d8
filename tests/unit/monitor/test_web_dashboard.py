"""Trackio's dashboard of runs: whose files it shows, where it listens, and that it ends with its command."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from pipeline.tracking.tracker_protocol import is_installed
from pipeline.utils.waiting import wait_for
from slurm.monitor import live_view, web_dashboard
from tests.fakes.run_directory import FakeRun
from tests.patience import WAIT_SECONDS

ROOT = Path(__file__).parents[3]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`demo` and the point `sweep/3` have Trackio's files, `plain` has none."""
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "plain", "sweep/3"):
        run = FakeRun(tmp_path / "runs" / name)
        if name != "plain":
            store = run.paths.tracking / "trackio"
            store.mkdir(parents=True)
            (store / "rollcall.db").write_bytes(b"")
    return tmp_path / "runs"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert live_view.main(["web", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_without_trackio_the_error_has_the_command_that_installs_it(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_dashboard, "is_installed", lambda package: False)
    assert "-m pip install 'trackio>=" in refused(capsys)


def test_an_input_that_cannot_work_is_one_error_line(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_dashboard, "is_installed", lambda package: True)
    assert "expected run=<name or directory>, host=<address> or port=<number>" in refused(capsys, "rnu=demo")
    assert "expected run=<name or directory>" in refused(capsys, "demo")
    assert "found there: demo, plain, sweep/3" in refused(capsys, "run=demon")
    assert "submit it with tracking=trackio" in refused(capsys, "run=plain")
    assert "a number from 1 to 65535" in refused(capsys, "port=70000")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "name another: port=" in refused(capsys, f"port={port}")


def test_a_run_is_shown_by_its_name_and_all_runs_by_theirs(runs: Path) -> None:
    file = "tracking/trackio/rollcall.db"
    assert web_dashboard._files("demo") == {"demo": runs / "demo" / file}
    assert web_dashboard._files("") == {"demo": runs / "demo" / file, "sweep.3": runs / "sweep" / "3" / file}


def test_a_run_that_was_resumed_with_another_project_is_shown_with_both(runs: Path) -> None:
    store = runs / "demo" / "tracking" / "trackio"
    (store / "other.db").touch()
    both = {f"demo.{project}": store / f"{project}.db" for project in ("other", "rollcall")}
    assert web_dashboard._files("demo") == both
    assert web_dashboard._files("").items() >= both.items()


def test_a_run_and_a_point_of_a_sweep_with_one_name_are_both_shown(runs: Path) -> None:
    store = FakeRun(runs / "sweep.3").paths.tracking / "trackio"
    store.mkdir(parents=True)
    (store / "rollcall.db").touch()
    shown = web_dashboard._files("")
    assert {"demo", "sweep.3", "sweep.3-2"} == set(shown)
    assert {shown["sweep.3"], shown["sweep.3-2"]} == {
        store / "rollcall.db",
        runs / "sweep/3/tracking/trackio/rollcall.db",
    }


def answer_of(port: int) -> bytes | None:
    request = Request(f"http://127.0.0.1:{port}/api/get_all_projects", b"{}", {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=5) as response:
            return bytes(response.read())
    except (URLError, OSError):
        return None


@pytest.mark.skipif(not is_installed("trackio"), reason="needs the extra trackio")
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_dashboard_shows_the_run_on_this_machine_only_and_ends_with_its_command(
    runs: Path, ending: signal.Signals
) -> None:
    program = (
        "import trackio; run = trackio.init('rollcall', 'r-1', embed=False); run.log({'reward': 1.0}); run.finish()"
    )
    store = runs / "demo" / "tracking" / "trackio"
    (store / "rollcall.db").unlink()
    subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "TRACKIO_DIR": str(store)}, check=True, timeout=120
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, str(ROOT / "launchers" / "watch.py"), "web", "run=demo", f"port={port}"]
    with subprocess.Popen(command, cwd=runs.parent, stdout=subprocess.PIPE, text=True) as watching:
        answer = wait_for("the dashboard", lambda: answer_of(port), WAIT_SECONDS)
        assert b'"demo"' in answer
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", port), timeout=5)
        assert watching.stdout is not None
        assert (
            watching.stdout.readline() == f"http://127.0.0.1:{port}/ shows demo; Ctrl-C ends it, and affects no run\n"
        )
        watching.send_signal(ending)
        assert watching.wait(WAIT_SECONDS) == (-ending if ending == signal.SIGKILL else 0)
        deadline = time.monotonic() + WAIT_SECONDS
        while answer_of(port) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert answer_of(port) is None
