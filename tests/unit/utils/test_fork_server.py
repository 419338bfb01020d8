"""Programs that a fork server starts: what they get, what they end with, and what starts them without it."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pipeline.utils import fork_server, subprocesses
from pipeline.utils.fork_server import Stage
from pipeline.utils.forked_process import ForkedProcess, ForkRequest, ForkServer
from pipeline.utils.subprocesses import Child
from pipeline.utils.waiting import wait_for
from tests.support.processes import gone, runs

SECONDS = 20
SMALL, LARGE = "small", "large"
REPORTS = """
import json, os, random, signal, sys
print(json.dumps({
    "argv": sys.argv, "name": __name__, "environment": dict(os.environ), "directory": os.getcwd(),
    "leads": [os.getpid() == os.getsid(0), os.getpid() == os.getpgrp()], "parent": os.getppid(),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "handler": str(signal.getsignal(signal.SIGINT)),
    "descriptors": sorted(os.listdir("/proc/self/fd"))[:-1], "drawn": random.random(), "path": sys.path[0],
    "modules": [name for name in ("fractions", "colorsys") if name in sys.modules],
}), flush=True)
print("in stderr", file=sys.stderr)
"""
WAITS = "import time\nprint('up', flush=True)\ntime.sleep(600)"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    stages = [Stage(SMALL, ["fractions"]), Stage(LARGE, ["colorsys", "a_module_that_is_not_installed"])]
    with ForkServer.start(stages, ready=1) as running:
        yield running


Start = Callable[..., Child]


@pytest.fixture
def start(server: ForkServer, tmp_path: Path) -> Iterator[Start]:
    children: list[Child] = []

    def begin(
        code: str,
        *arguments: str,
        stage: str = SMALL,
        nests: bool = False,
        address: str = server.address,
        variables: Mapping[str, str] | None = None,
    ) -> Child:
        folder = tmp_path / f"program{len(children)}"
        folder.mkdir()
        (folder / "program.py").write_text(code)
        environment = {"PYTHONPATH": str(folder), "HOME": str(tmp_path), **(variables or {})}
        argv = [sys.executable, "-P", "-m", "program", *arguments]
        child = Child(argv, folder / "log", environment, ForkRequest(address, stage, nests))
        children.append(child)
        return child

    yield begin
    for child in children:
        child.kill()


def end_of(child: Child) -> int:
    wait_for("the program's end", lambda: child.poll() is not None, SECONDS)
    code = child.poll()
    assert code is not None
    return code


def is_up(child: Child) -> None:
    wait_for(
        "the program", lambda: child.poll() is not None or (child.pid > 0 and "up" in child.log.read_text()), SECONDS
    )
    assert child.poll() is None, child.log.read_text()


def parent_of(child: Child) -> psutil.Process:
    return psutil.Process(psutil.Process(child.pid).ppid())


def test_a_program_has_what_its_request_says(start: Start, tmp_path: Path) -> None:
    child = start(REPORTS + WAITS, "an argument", "--flag")
    is_up(child)
    assert psutil.Process(child.pid).cmdline()[:4] == [sys.executable, "-P", "-m", "program"]
    report = json.loads(child.log.read_text().splitlines()[0])
    folder = tmp_path / "program0"
    assert report["argv"] == [str(folder / "program.py"), "an argument", "--flag"]
    assert (report["name"], report["path"], report["directory"]) == ("__main__", str(folder), str(Path.cwd()))
    assert report["environment"] == {"PYTHONPATH": str(folder), "HOME": str(tmp_path)}
    assert report["leads"] == [True, True]
    assert report["blocked"] == sorted({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP})
    assert "default_int_handler" in report["handler"]
    assert report["descriptors"] == ["0", "1", "2"]
    assert "in stderr" in child.log.read_text()
    assert report["parent"] == parent_of(child).pid != os.getpid()


def test_a_later_stage_has_the_modules_of_earlier_ones(start: Start) -> None:
    reports = []
    for stage in (SMALL, LARGE):
        child = start(REPORTS, stage=stage)
        assert end_of(child) == 0
        reports.append(json.loads(child.log.read_text().splitlines()[0]))
    assert [report["modules"] for report in reports] == [["fractions"], ["fractions", "colorsys"]]
    assert reports[0]["drawn"] != reports[1]["drawn"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise ValueError('a reason')", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.execv('/bin/sh', ['sh', '-c', 'exit 7'])", 7),
    ],
)
def test_the_requester_gets_the_exit_code(start: Start, code: str, expected: int) -> None:
    child = start(code)
    assert end_of(child) == expected
    assert ("ValueError: a reason" in child.log.read_text()) == (expected == 1)
    assert child.group_is_gone()


ROOT = Path(__file__).resolve().parents[3]
LEAVES = """
import os, subprocess, sys, time
for leads in (False, True):
    print(subprocess.Popen(["sleep", "600"], start_new_session=leads).pid, flush=True)
print("up", flush=True)
"""


def descendants(child: Child) -> list[int]:
    return [int(line) for line in child.log.read_text().split() if line.isdecimal()]


def test_what_a_program_leaves_behind_ends_with_it(start: Start) -> None:
    child = start(LEAVES)
    assert end_of(child) == 0
    assert len(descendants(child)) == 2
    assert all(map(gone, descendants(child)))


LEAVES_FROZEN = """
import subprocess, sys
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
sys.stdin.close()
print("up", flush=True)
try:
    import time
    time.sleep(600)
except KeyboardInterrupt:
    sys.exit(7)
"""
FREEZER = Path("/sys/fs/cgroup/freezer")


def freezer_folder() -> Path:
    return FREEZER / f"rollcall-test-{os.getpid()}"


def thaw() -> None:
    (freezer_folder() / "freezer.state").write_text("THAWED")


@pytest.fixture
def freezer() -> Iterator[Callable[[int], None]]:
    """Freezes a process, which no signal ends then, as one that waits in a driver of the kernel."""
    folder = freezer_folder()
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("there is no freezer of control groups here")

    def freeze(pid: int) -> None:
        (folder / "cgroup.procs").write_text(str(pid))
        (folder / "freezer.state").write_text("FROZEN")
        wait_for("the process to freeze", lambda: "FROZEN" in (folder / "freezer.state").read_text(), SECONDS)

    yield freeze
    thaw()
    wait_for("an empty group", lambda: not (folder / "cgroup.procs").read_text(), SECONDS)
    folder.rmdir()


def test_the_end_of_a_program_is_known_although_the_kernel_cannot_end_what_it_left(
    start: Start, freezer: Callable[[int], None]
) -> None:
    child = start(LEAVES_FROZEN)
    wait_for("the program", lambda: "up" in child.log.read_text(), SECONDS)
    (left,) = descendants(child)
    freezer(left)
    child.terminate()
    assert end_of(child) == 7
    assert not gone(left)
    os.kill(left, signal.SIGKILL)


def test_a_server_that_the_kernel_cannot_end_does_not_hold_its_owner(freezer: Callable[[int], None]) -> None:
    server = ForkServer.start([Stage(SMALL, [])], 0)
    freezer(server.pid)
    began = time.monotonic()
    closing = threading.Thread(target=server.close, daemon=True)
    closing.start()
    closing.join(SECONDS)
    assert not closing.is_alive()
    assert time.monotonic() - began < SECONDS
    thaw()
    server._process.wait(SECONDS)


ENDED_ORPHAN = """
import os
read, write = os.pipe()
if not os.fork():
    if not os.fork():
        print(os.getpid(), flush=True)
        os._exit(0)
    os._exit(0)
os.wait()
os.close(write)
os.read(read, 1)  # until the orphan, the last other holder of the pipe, has ended
"""


def test_an_orphan_that_ended_before_its_program_is_reaped(start: Start, server: ForkServer) -> None:
    # Whoever adopts the keeper's children, such as an agent, would have a zombie for each.
    subprocesses.adopt_orphans()
    try:
        child = start(ENDED_ORPHAN)
        assert end_of(child) == 0
        (orphan,) = descendants(child)
        wait_for("the keeper's end", lambda: not psutil.pid_exists(child.pid), SECONDS)
        assert not psutil.pid_exists(orphan)
    finally:
        subprocesses.adopt_orphans(False)


def test_an_interrupt_reaches_the_program_and_a_kill_its_whole_group(start: Start) -> None:
    # Short sleeps: Python notices a signal that arrives just before a sleep only after it.
    child = start(
        "import time\ntry:\n print('up', flush=True)\n while True: time.sleep(0.01)\n"
        "except KeyboardInterrupt:\n exit(5)"
    )
    is_up(child)
    assert child.stop(SECONDS) == 5
    child = start(LEAVES + "time.sleep(600)")
    is_up(child)
    assert child.kill() == -signal.SIGKILL
    assert child.group_is_gone()


def test_a_program_ends_with_its_requester(start: Start, server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LEAVES + "time.sleep(600)")
    code = f"""
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from pipeline.utils.forked_process import ForkRequest
from pipeline.utils.subprocesses import Child
environment = {{"PYTHONPATH": {str(tmp_path)!r}}}
child = Child([sys.executable, "-m", "program"], Path({str(tmp_path)!r}, "log"), environment,
              ForkRequest({server.address!r}, {SMALL!r}))
while child.poll() is None and "up" not in child.log.read_text():
    time.sleep(0.01)
print(child.pid, *child.log.read_text().split()[:2], flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as requester:
        assert requester.stdout is not None
        pids = [int(pid) for pid in requester.stdout.readline().split()]
        requester.kill()
    assert len(pids) == 3
    wait_for("the program and its descendants to end", lambda: all(map(gone, pids)), SECONDS)


def test_a_program_ends_with_its_keeper_and_counts_as_killed(start: Start) -> None:
    child = start(WAITS)
    is_up(child)
    parent_of(child).kill()
    assert end_of(child) == -signal.SIGKILL
    wait_for("the program to end", lambda: gone(child.pid), SECONDS)


def test_the_request_that_makes_a_stage_leaves_no_descriptor_there(start: Start) -> None:
    """The requester would not notice the end of its keeper, as the stage would have its connection open."""
    with ForkServer.start([Stage(SMALL, []), Stage(LARGE, [])], ready=0) as server:
        child = start(WAITS, stage=LARGE, address=server.address)
        is_up(child)
        parent_of(child).kill()
        assert end_of(child) == -signal.SIGKILL


def test_a_server_that_ends_leaves_its_programs_and_exec_starts_the_next_ones(start: Start, tmp_path: Path) -> None:
    waits = (
        "import pathlib, sys, time\nprint('up', flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\nsys.exit(4)"
    )
    with ForkServer.start([Stage(SMALL, [])], ready=0) as short:
        survivor = start(waits, str(tmp_path / "go"), address=short.address)
        is_up(survivor)
    child = start(REPORTS, address=short.address)
    assert child.pid != 0
    assert end_of(child) == 0
    assert json.loads(child.log.read_text().splitlines()[0])["parent"] == os.getpid()
    (tmp_path / "go").touch()
    assert end_of(survivor) == 4
    assert not Path(short.address).parent.exists()


SLOW = "import time; time.sleep(600)"


def modules(folder: Path, **codes: str) -> dict[str, str]:
    """The environment of a server that can import these modules."""
    for name, code in codes.items():
        (folder / f"{name}.py").write_text(code)
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_a_request_that_a_server_cannot_answer_any_more_is_started_with_exec(start: Start, tmp_path: Path) -> None:
    environment = modules(tmp_path, slow_import=SLOW)
    with ForkServer.start([Stage(SMALL, ["slow_import"])], 0, environment) as stuck:
        child = start(REPORTS, address=stuck.address)
        assert (child.poll(), child.pid) == (None, 0)
        assert not child.group_is_gone()
    assert end_of(child) == 0
    assert json.loads(child.log.read_text().splitlines()[0])["parent"] == os.getpid()


def test_a_request_that_is_killed_or_asked_to_end_never_starts(start: Start, tmp_path: Path) -> None:
    environment = modules(
        tmp_path,
        wait_for_file="import os, time\nwhile not os.path.exists('{}'): time.sleep(0.01)".format(tmp_path / "go"),
    )
    with ForkServer.start([Stage(SMALL, ["wait_for_file"])], 0, environment) as waiting:
        killed, ended = start(WAITS, address=waiting.address), start(WAITS, address=waiting.address)
        later = start("pass", address=waiting.address)
        ended.terminate()
        assert ended.poll() == -signal.SIGINT, "nobody waits for the server's imports"
        assert ended.group_is_gone()
        assert killed.kill() == -signal.SIGKILL
        assert killed.group_is_gone()
        (tmp_path / "go").touch()
        assert end_of(later) == 0  # the server answers requests in their order
    assert killed.log.read_text() == ended.log.read_text() == ""


def test_a_stage_with_pyarrow_forks(start: Start) -> None:
    """Its allocator starts a thread, unless it is told not to."""
    pytest.importorskip("pyarrow")
    with ForkServer.start([Stage(SMALL, ["pyarrow"])], 0) as server:
        child = start(REPORTS, address=server.address)
        assert end_of(child) == 0
        assert json.loads(child.log.read_text().splitlines()[0])["parent"] != os.getpid()


def test_a_stage_whose_modules_start_threads_forks_nothing(start: Start, tmp_path: Path) -> None:
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    with ForkServer.start([Stage(SMALL, ["threaded"])], 0, modules(tmp_path, threaded=thread)) as threaded:
        with Path(os.devnull).open("r+") as null:
            refused = ForkedProcess(threaded.address, SMALL, [sys.executable, "-c", ""], {}, [null.fileno()] * 3)
            assert not refused.started()
        assert refused.refusal.startswith("the imported modules have started threads: ")
        child = start(REPORTS, address=threaded.address)
        assert end_of(child) == 0
        assert json.loads(child.log.read_text().splitlines()[0])["parent"] == os.getpid()


NESTS = """
import os, sys
from pipeline.utils.forked_process import ForkedProcess
argv, address = [sys.executable, "-m", "nested"], os.environ["ROLLCALL_FORK_SERVER"]
child = ForkedProcess(address, "", argv, dict(os.environ), [0, 1, 2])
assert child.started()
print("nested", child.pid, flush=True)
sys.exit(child.wait())
"""


def test_a_program_has_the_variables_that_its_imports_set_unless_the_request_does(start: Start, tmp_path: Path) -> None:
    sets = "import os; os.environ |= {'SET': 'by an import', 'REQUESTED': 'by an import'}"
    with ForkServer.start([Stage(SMALL, ["sets"])], 0, modules(tmp_path, sets=sets)) as setting:
        child = start(REPORTS, address=setting.address, variables={"REQUESTED": "by the request"})
        assert end_of(child) == 0
    environment = json.loads(child.log.read_text().splitlines()[0])["environment"]
    assert (environment["SET"], environment["REQUESTED"]) == ("by an import", "by the request")


def test_a_program_that_nests_starts_programs_below_itself(start: Start, tmp_path: Path) -> None:
    (tmp_path / "nested.py").write_text("import fractions, sys, time\nprint('up', flush=True)\ntime.sleep(600)")
    paths = os.pathsep.join([str(tmp_path / "program0"), str(ROOT), str(tmp_path)])
    child = start(NESTS, stage=LARGE, nests=True, variables={"PYTHONPATH": paths})
    is_up(child)
    below = psutil.Process(child.pid).children(recursive=True)
    (nested,) = (process for process in below if process.cmdline()[-1] == "nested")
    child.terminate()
    assert end_of(child) != 0
    assert not any(map(runs, [nested, *below]))


def test_a_server_ends_with_its_owner_and_leaves_no_folder() -> None:
    code = """
import time
from pipeline.utils import fork_server, subprocesses
from pipeline.utils.fork_server import Stage
from pipeline.utils.forked_process import ForkServer
server = ForkServer.start([Stage("a", []), Stage("b", [])], 1)
print(server.address, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip()).parent
        below = wait_for("both stages", lambda: _both(psutil.Process(owner.pid)), SECONDS)
        owner.kill()
    wait_for("the server to end", lambda: all(gone(pid) for pid in below) and not folder.exists(), SECONDS)


def test_a_server_that_cannot_be_started_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="Argument list too long"):
        ForkServer.start([Stage(SMALL, [])], ready=0, environment={"LARGE": "x" * (1 << 20)})
    assert not list(tmp_path.iterdir())


def test_a_new_server_removes_the_folder_of_one_that_was_killed_and_of_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = [Stage(SMALL, [])]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with ForkServer.start(stages, 0) as killed, ForkServer.start(stages, 0) as living:
            killed.kill()
            (Path(folder) / "rollcall-fork-new").mkdir(mode=0o700)
            assert Path(killed.address).exists()
            with ForkServer.start(stages, 0):
                assert not Path(killed.address).parent.exists()
                assert Path(living.address).exists()
                assert (Path(folder) / "rollcall-fork-new").exists(), "its log is not locked yet"


def test_a_new_server_removes_the_old_folder_of_an_owner_that_was_killed_before_it_had_a_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        old, open_to_others = Path(folder) / "rollcall-fork-old", Path(folder) / "rollcall-fork-shared"
        for path, mode in ((old, 0o700), (open_to_others, 0o770)):
            path.mkdir()
            path.chmod(mode)
            (path / "log.new").touch()
            os.utime(path, (time.time() - 120,) * 2)
        with ForkServer.start([Stage(SMALL, [])], 0):
            assert not old.exists()
            assert open_to_others.exists()


def test_a_request_that_no_server_answers_is_withdrawn() -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        Path(os.devnull).open("r+") as null,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent,
    ):
        silent.bind(f"{folder}/socket")
        silent.listen()
        program = ForkedProcess(f"{folder}/socket", SMALL, [sys.executable, "-c", ""], {}, [null.fileno()] * 3)
        assert not program.started(0.1)
        assert program.refusal == "the fork server did not start it within 0.1 s"
        assert program.poll() == -signal.SIGKILL


def _both(owner: psutil.Process) -> Sequence[int]:
    below = [process.pid for process in owner.children(recursive=True)]
    return below if len(below) == 2 else []


def test_a_role_compiles_only_if_its_own_environment_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo = SimpleNamespace(disable=False)
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", dynamo)
    for value, disabled in (("1", True), ("0", False)):
        fork_server._renew_state({"TORCH_COMPILE_DISABLE": value})
        assert dynamo.disable is disabled
