"""The fork server of a local run: who starts it, and that nothing of it is left after a refused or ended launcher."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.utils.fork_server import VARIABLE
from pipeline.utils.forked_process import ForkServer
from pipeline.utils.waiting import wait_for
from slurm.submission import submit_run
from tests.patience import WAIT_SECONDS
from tests.support.processes import runs

ROOT = Path(__file__).resolve().parents[3]
SLOW_TASK = """
import time
from pathlib import Path
Path(__file__).with_suffix(".checked").touch()
time.sleep(600)
"""


def servers_below(pid: int) -> list[psutil.Process]:
    """The running processes of fork servers below a process."""
    running = filter(runs, psutil.Process(pid).children(recursive=True))
    return [process for process in running if "fork server" in " ".join(process.cmdline())]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The launcher's folder for temporary files, with a short name, as sockets need."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def environment(temporary: Path, tmp_path: Path) -> dict[str, str]:
    home = tmp_path / "home"
    home.mkdir()
    variables = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return variables | {"HOME": str(home), "TMPDIR": str(temporary), "PYTHONPATH": str(tmp_path)}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ForkServer]:
    """The servers that commands in this process start."""
    monkeypatch.delenv(VARIABLE)
    servers: list[ForkServer] = []
    start = ForkServer.start

    def recorded(*arguments: object) -> ForkServer:
        servers.append(start(*arguments))  # type: ignore[arg-type]
        return servers[-1]

    monkeypatch.setattr(ForkServer, "start", recorded)
    return servers


def test_the_server_of_a_refused_run_is_gone_and_the_error_is_the_same(
    started: list[ForkServer], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["experiment=demo", "cluster=local", f"output={tmp_path}", "task.options.digitz=2"]
    assert submit_run.main(command) == 2
    refused = capsys.readouterr()
    assert len(started) == 1
    assert VARIABLE not in os.environ
    assert not Path(started[0].address).parent.exists()
    wait_for("the server to end", lambda: not servers_below(os.getpid()), WAIT_SECONDS)
    monkeypatch.setenv(VARIABLE, "/no/server")
    assert submit_run.main(command) == 2
    assert capsys.readouterr() == refused
    assert len(started) == 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["cluster=local", "--dry-run"], 0),
        (["cluster=local", "--cfg"], 0),
        (["cluster=local", "--detach"], 2),
        (["cluster=local", "-m", "seed=1,2", "--dry-run"], 0),
        (["cluster=slurm"], 2),
        (["cluster=local", "optim.lrr=1"], 2),
    ],
)
def test_a_command_that_starts_no_local_run_starts_no_server(
    arguments: list[str], code: int, started: list[ForkServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))  # without Slurm
    assert submit_run.main(["experiment=demo", f"output={tmp_path}", *arguments]) == code
    assert started == []


@pytest.fixture
def unignored_interrupt() -> Iterator[None]:
    """Where tests run in the background the shell ignores INT, which a launcher would inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("unignored_interrupt")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_a_launcher_that_is_ended_during_its_checks_leaves_nothing(
    number: signal.Signals, code: int, environment: dict[str, str], temporary: Path, tmp_path: Path
) -> None:
    (tmp_path / "slow_task.py").write_text(SLOW_TASK)
    command = ["launchers/submit.py", "experiment=demo", "cluster=local", f"output={tmp_path}/runs"]
    with subprocess.Popen(
        [sys.executable, *command, "task.name=slow_task:Task"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as launcher:
        try:
            wait_for("the checks", (tmp_path / "slow_task.checked").exists, WAIT_SECONDS)
            below = wait_for("the fork server", lambda: servers_below(launcher.pid), WAIT_SECONDS)
            launcher.send_signal(number)
            printed = launcher.communicate(timeout=WAIT_SECONDS)[0]
        finally:
            launcher.kill()
    assert launcher.returncode == code
    assert printed == ("interrupted; nothing was started\n" if number == signal.SIGINT else "")
    wait_for("the server to end", lambda: not any(map(runs, below)), WAIT_SECONDS)
    wait_for("its folder to be removed", lambda: list(temporary.iterdir()) == [], WAIT_SECONDS)
    assert not (tmp_path / "runs").exists()


def test_a_models_size_is_counted_by_a_fork_and_not_by_the_launcher(
    environment: dict[str, str], temporary: Path, tmp_path: Path
) -> None:
    code = """
import sys
from slurm.submission import submit_run
code = submit_run.main(sys.argv[1:])
print("torch" in sys.modules, code)
"""
    memory = ["resources=gpus", "resources.nodes=1", "resources.gpu_memory=1G"]
    command = [
        "experiment=demo",
        "cluster=local",
        f"output={tmp_path}/runs",
        *memory,
        "training.micro_batch_tokens=9e9",
    ]
    # Without a GPU for the test the next check would refuse the run anyway.
    done = subprocess.run(
        [sys.executable, "-c", code, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False 2"
    assert len(list((tmp_path / "home/.cache/rollcall/sizes").iterdir())) == 1
    assert list(temporary.iterdir()) == []
