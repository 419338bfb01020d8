"""Code of the policy's: what it cannot do, and where it is refused."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import psutil
import pytest

from pipeline.config.task_keys import SandboxConfig
from pipeline.environments import sandbox_guard, sandbox_jail
from pipeline.environments.sandbox import MAX_DISK, MAX_PROCESSES, _bounds, missing_sandbox, run_python
from pipeline.environments.sandbox_kinds import Namespaces, SandboxSpec
from pipeline.utils.waiting import wait_for
from tests.patience import WAIT_SECONDS

needs_namespaces = pytest.mark.skipif(bool(missing_sandbox(SandboxConfig())), reason="no namespaces here")
in_each_sandbox = pytest.mark.usefixtures("sandbox_kind")


@in_each_sandbox
def test_a_program_is_bounded_in_memory_output_and_files(tmp_path: Path) -> None:
    assert "MemoryError" in run_python("x = 'a' * (1 << 30)", 60, 1 << 28).text
    flood = run_python("while True: print('and on ' * 1000)", 60, 1 << 28)
    assert len(flood.output) == 1 << 16
    assert flood.failed.startswith("error: ")
    assert run_python("import os; print(os.listdir('.'))", 60, 1 << 28).output == "[]\n"


@in_each_sandbox
def test_a_program_has_neither_network_nor_other_processes_where_the_kernel_lets_them_be_taken() -> None:
    assert run_python("import socket; print(socket.if_nameindex())", 60, 1 << 28).output == "[(1, 'lo')]\n"
    assert run_python("import os; print(os.getpid(), os.getppid())", 60, 1 << 28).output == "2 1\n", "and the guard"


@in_each_sandbox
def test_what_a_program_starts_ends_with_it(tmp_path: Path) -> None:
    mark = f"daemon-{tmp_path.parent.name}-{tmp_path.name}"
    daemon = f"import os, time\nif not os.fork(): os.setsid(); time.sleep(600)  # {mark}\ntime.sleep(0.2)"
    assert run_python(daemon, 60, 1 << 28).failed == ""

    def gone() -> bool:
        return not any(mark in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))

    wait_for("the daemon to be gone", gone, WAIT_SECONDS)


BOMB = """
import os, time
started = 0
try:
    while started < 1000:
        if not os.fork():
            time.sleep(30)
            os._exit(0)
        started += 1
    time.sleep(60)  # until it is ended
except OSError as error:
    print(type(error).__name__, started)
"""


@pytest.mark.skipif(
    sandbox_guard.kernel() < sandbox_jail._OWN_PID_MAX, reason="this kernel bounds no processes of root's"
)
def test_a_program_cannot_start_processes_without_end(sandbox_kind: SandboxConfig) -> None:
    result = run_python(BOMB, 60, 1 << 30)
    if sandbox_kind.kind != "namespaces" and not os.geteuid():
        assert result.failed == "error: it had more than 301 processes"  # of root, of which the kernel refuses none
        return
    kind, started = result.output.split()
    assert kind == "BlockingIOError"
    assert int(started) < (MAX_PROCESSES if os.geteuid() else sandbox_jail._MIN_PID_MAX)


TOGETHER = """
import os, time
for _ in range(20):
    if not os.fork():
        held = bytearray(100 << 20)
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""
FILES_IN_MEMORY = """
import ctypes, os, time
ctypes.CDLL(None).prctl(4, 0)
for _ in range(40):
    file = os.memfd_create("hidden")
    for _ in range(15):
        os.write(file, bytes(1 << 20))
time.sleep(60)
"""


NOT_RESIDENT = """
import mmap, time
kept = []
for _ in range(12):
    kept.append(mmap.mmap(-1, 1 << 26))
    kept[-1].write(bytes(1 << 26))
    kept[-1].madvise(mmap.MADV_DONTNEED)
time.sleep(60)
"""
MAIN_THREADS_ENDED = """
import ctypes, os, threading, time
def hold():
    time.sleep(0.5)
    held = bytearray(300 << 20)
    time.sleep(60)
for _ in range(4):
    if not os.fork():
        threading.Thread(target=hold).start()
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
time.sleep(60)
"""
FILES_OF_A_THREAD = """
import ctypes, os, threading, time
def hold():
    ctypes.CDLL(None).unshare(0x400)
    for _ in range(40):
        os.write(os.memfd_create("hidden"), bytes(15 << 20))
    time.sleep(60)
threading.Thread(target=hold).start()
"""
PAGE_TABLES = """
import mmap, time
sparse = mmap.mmap(-1, 1 << 40, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, mmap.PROT_READ)
for offset in range(0, 1 << 39, 1 << 21):
    sparse[offset]
time.sleep(60)
"""
CALLED_LIKE_A_SIZE = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, {name!r})
for _ in range(8):
    if not os.fork(): break
held = bytearray(b"1" * (100 << 20))
time.sleep(60)
"""
NAME_WITH_A_SEPARATOR = """
import ctypes, os, time
libc, low, size = ctypes.CDLL(None), 1 << 32, 15 << 20
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
libc.mmap(low, 4096, 3, 0x11, os.memfd_create("a\x1cb"), 0)  # the first line of /proc/self/maps
for _ in range(60):
    file = os.memfd_create("hidden")
    os.truncate(file, size)
    ctypes.memset(libc.mmap(None, size, 3, 1, file, 0), 1, size)
    os.close(file)
time.sleep(60)
"""
MOSTLY_UNMAPPED = """
import ctypes, time
libc, size = ctypes.CDLL(None), 100 << 20
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
for _ in range(12):
    begin = libc.mmap(None, size, 3, 0x21, -1, 0)
    ctypes.memset(begin, 1, size)
    time.sleep(0.3)
    libc.munmap(begin + 4096, size - 4096)  # the pages stay
time.sleep(60)
"""
TOO_MUCH = {
    "twenty processes": TOGETHER,
    "files in memory that no process maps": FILES_IN_MEMORY,
    "shared memory that is not resident": NOT_RESIDENT,
    "processes whose main threads have ended": MAIN_THREADS_ENDED,
    "files that only a thread has open": FILES_OF_A_THREAD,
    "page tables": PAGE_TABLES,
    "shared memory of which one page is mapped": MOSTLY_UNMAPPED,
    "processes called like a size": CALLED_LIKE_A_SIZE.format(name=b"x kB"),
    "processes called by no text": CALLED_LIKE_A_SIZE.format(name=b"\xff"),
    "a file whose name ends a line of text": NAME_WITH_A_SEPARATOR,
}


@pytest.mark.parametrize("program", TOO_MUCH.values(), ids=TOO_MUCH)
@in_each_sandbox
def test_all_processes_of_a_program_together_are_bounded_in_memory(program: str) -> None:
    """None of the processes has more private memory than the limit. One of them cannot be dumped."""
    began = time.monotonic()
    result = run_python(program, 50, 512 << 20)
    assert result.failed == "error: its processes together used more memory than the limit"
    assert time.monotonic() - began < 40, "before the timeout"


@in_each_sandbox
def test_a_program_that_starts_another_is_not_charged_twice() -> None:
    """The child of vfork(2) has the memory of its parent, here for as long as it looks for a program."""
    starts = """
import subprocess
held = bytearray(b"1") * (300 << 20)
try:
    subprocess.run(["absent"], env={"PATH": ":".join(["/absent"] * 300000)})
except OSError:
    print("done")
"""
    result = run_python(starts, 50, 512 << 20)
    assert (result.output, result.failed) == ("done\n", "")


@in_each_sandbox
def test_pages_that_processes_share_count_once() -> None:
    shared = """
import os, time
shared = bytearray(b"1" * (100 << 20))
children = []
for _ in range(10):
    child = os.fork()
    if not child:
        time.sleep(0.5)
        os._exit(0)
    children.append(child)
for child in children: os.waitpid(child, 0)
print("done")
"""
    assert run_python(shared, 50, 512 << 20).output == "done\n"


@in_each_sandbox
def test_what_a_program_writes_is_bounded_and_goes_with_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    flood = f"""
import os
for place in (os.getcwd(), os.environ["TMPDIR"], "/dev/shm"):
    try:
        for number in range(100):
            with open(f"{{place}}/flood-{{number}}", "wb") as file:
                file.write(bytes(1 << 22))
    except OSError as error:
        print(error.strerror)
try:
    open("{tmp_path}/outside", "w")
except OSError as error:
    print(type(error).__name__)
print(sum(os.path.getsize(name) for name in os.listdir(".")))
"""
    *said, written = run_python(flood, 60, 1 << 28).output.splitlines()
    assert said[:3] == ["No space left on device"] * 3
    assert said[3] in ("OSError", "FileNotFoundError")
    assert int(written) <= MAX_DISK
    assert not list(tmp_path.iterdir())
    assert not list(Path("/dev/shm").glob("flood-*"))


UNSTARTED = """
from pathlib import Path
from pipeline.environments import sandbox
from pipeline.errors import RolloutError
print(sandbox.run_python("print(1)", 60, 1 << 28).output.strip())
Path("/proc/sys/user/max_user_namespaces").write_text("0")
try:
    print(sandbox.run_python("print(1)", 60, 1 << 28))
except RolloutError as error:
    print(error)
"""


@needs_namespaces
def test_a_sandbox_that_does_not_start_is_no_failure_of_the_program() -> None:
    command = ["unshare", "--user", "--map-root-user", "--mount", "--", sys.executable, "-c", UNSTARTED]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "1"
    assert second.startswith("the sandbox did not start: unshare: unshare failed")


@needs_namespaces
def test_the_start_of_a_sandbox_does_not_count_as_time_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_python("print(1)", 60, 1 << 28).output == "1\n"
    slow = tmp_path / "unshare"
    slow.write_text(f'#!/bin/sh\nsleep 3\nexec {shutil.which("unshare")} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    result = run_python("print(1)", 2, 1 << 28)
    assert (result.output, result.failed) == ("1\n", "")


@in_each_sandbox
def test_a_program_cannot_end_its_guard_by_a_signal() -> None:
    """Process 1 gets only the signals for which it has a handler, and Python has one for SIGINT."""
    result = run_python("import os, time\nos.kill(1, 2)\ntime.sleep(0.5)\nprint('on')", 60, 1 << 28)
    assert (result.output, result.failed) == ("on\n", "")


@in_each_sandbox
def test_a_program_sees_no_variable_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "https_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "http://user:secret@proxy:1")
    shown = run_python("import os; print(dict(os.environ))", 60, 1 << 28)
    assert shown.failed == ""
    assert "secret" not in shown.output


REGAIN = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for what, code in (
    ("mount", libc.mount(b"", b"/", b"", ctypes.c_ulong(32 | 4096), b"")),
    ("umount", libc.umount2(b"/tmp", 2)),
    ("namespace", libc.unshare(0x10000000)),
):
    print(what, code)
print([line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapPrm", "CapEff"))])
print([name for name in os.listdir("/proc") if name.isdigit()])
"""


def test_a_program_cannot_undo_its_bounds_nor_see_other_processes(sandbox_kind: SandboxConfig) -> None:
    regain = REGAIN
    if sandbox_kind.kind in ("podman", "apptainer"):  # these permit a user namespace, see docs/security.md
        regain = REGAIN.replace("libc.unshare(0x10000000)", "-1")
    assert run_python(regain, 60, 1 << 28).output.splitlines() == [
        "mount -1",
        "umount -1",
        "namespace -1",
        "['0000000000000000', '0000000000000000']",
        "['1', '2']",
    ]


@needs_namespaces
def test_mounts_are_read_only_also_on_kernels_that_take_each_by_itself(tmp_path: Path) -> None:
    tries = (
        "from pathlib import Path; from pipeline.environments import sandbox_jail;"
        " sandbox_jail.make_read_only(at_once=False); "
    )
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c"]
    done = subprocess.run(
        [*command, f"{tries} Path({str(tmp_path / 'file')!r}).touch()"], capture_output=True, text=True, check=False
    )
    assert "Read-only file system" in done.stderr
    assert not list(tmp_path.iterdir())


REFUSED = """
import subprocess
from pipeline.config import TaskConfig
from pipeline.config.task_keys import SandboxConfig
from pipeline.errors import ConfigError
from pipeline.environments import check_sandbox, load_task, sandbox
task = load_task(TaskConfig(name="tools", options={"tools": ["python"]}), 0)
for tried in (
    lambda: check_sandbox(task, TaskConfig(name="tools")),
    lambda: sandbox.run_python("print(1)", 60, 1 << 28),
):
    try:
        print(tried())
    except ConfigError as error:
        print(error)
sandbox.choose_sandbox(SandboxConfig(kind="none"))
check_sandbox(task, TaskConfig(name="tools", sandbox=SandboxConfig(kind="none")))
print(sandbox.run_python("print(1)", 60, 1 << 28).output)
"""


@needs_namespaces
def test_where_the_kernel_gives_no_namespaces_code_is_refused_unless_the_user_says_otherwise() -> None:
    without = f"echo 0 > /proc/sys/user/max_user_namespaces; exec {sys.executable} -c '{REFUSED}'"
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", without]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second, ran, *_ = done.stdout.splitlines()
    assert first == second
    assert first.startswith("task.sandbox.kind='namespaces'")
    assert "unshare failed" in first
    assert "task.sandbox.kind=none" in first
    assert ran == "1"


@needs_namespaces
def test_a_python_below_tmp_stays_in_sight() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        venv.create(f"{folder}/venv", symlinks=True)
        given = Path(folder, "given")
        given.mkdir()
        spec = SandboxSpec(str(given), _bounds(60, 1 << 30), MAX_DISK)
        command = [*Namespaces().command(spec, ""), "import os; print(os.getcwd() == os.environ['HOME'], os.listdir())"]
        command[command.index(sys.executable)] = f"{folder}/venv/bin/python"
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout == "True []\n", done.stderr
