"""Hostile programs of the policy's: none gets out of the sandbox, and nothing of them is left."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from pipeline.config.task_keys import SandboxConfig
from pipeline.environments import sandbox
from pipeline.utils.waiting import wait_for
from tests.patience import WAIT_SECONDS

SECRET = "the-secret-of-the-user"
MEMORY_BYTES = 1 << 28
HELD = {
    "read a file of the user": "print(open({secret!r}).read())",
    "read it by a link": "import os; os.symlink({secret!r}, 'link'); print(open('link').read())",
    "read it by the root of process 1": "print(open('/proc/1/root' + {secret!r}).read())",
    "write next to it": "open({secret!r} + '.new', 'w'); print({mark!r})",
    "call a port of the host": "import socket; socket.create_connection(('127.0.0.1', {port})); print({mark!r})",
    "call an abstract socket": "import socket; socket.socket(socket.AF_UNIX).connect({abstract!r}); print({mark!r})",
    "call a Unix socket": "import socket; socket.socket(socket.AF_UNIX).connect({unix!r}); print({mark!r})",
    "read a process of the host": "print(open('/proc/{pid}/environ').read() and {mark!r})",
    "stop a process of the host": "import os; os.kill({pid}, 0); print({mark!r})",
    "write to inherited files": "import os; [os.fstat(fd) for fd in range(3, 64)]; print({mark!r})",
    "fill the memory": "x = bytearray(1 << 30); print({mark!r})",
    "fill the disk": "open('/dev/shm/fill', 'wb').write(bytes(1 << 25)); print({mark!r})",
    "fill a directory of the system": "open('/usr/fill', 'wb'); print({mark!r})",
}
"""Programs that must end with an error; each prints a mark, or the secret, where it succeeds."""
PTRACE = "import ctypes; print(ctypes.CDLL(None).ptrace(16, {pid}, None, None))"
ENDS = {
    "daemon": "import os, time\nif not os.fork():\n os.setsid()\n if not os.fork(): time.sleep(600)\n os._exit(0)",
    "fork bomb": "import os, time\ntry:\n while os.fork(): pass\n time.sleep(600)\nexcept OSError: pass",
    "huge output": "import os\nwhile True: os.write(1, bytes(1 << 20))",
    "hang": "import os, signal; os.kill(0, signal.SIGSTOP); import time; time.sleep(600)",
    "outlive the parent": "import ctypes, os, time; ctypes.CDLL(None).prctl(1, 0); os.setsid(); time.sleep(600)",
}
"""Programs that try to live on; what counts is what is left of them."""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """What the programs aim at: a file, listening sockets and a process of the user, and a mark of this test."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    mark = f"escaped-{os.getpid()}-{time.monotonic_ns()}"
    with ExitStack() as stack, tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        names = {"abstract": f"\0{mark}", "unix": f"{folder}/socket"}
        for name in names.values():
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(name)
            listener.listen(4096)
        yield {"secret": str(secret), "port": port, "pid": os.getpid(), "mark": mark, **names}


def _run(program: str, host: dict[str, object], seconds: float = 60) -> sandbox.SandboxResult:
    return sandbox.run_python(f"{program.format(**host)}\n# {host['mark']}", seconds, MEMORY_BYTES)


def _escaped(result: sandbox.SandboxResult, host: dict[str, object]) -> bool:
    printed = result.output.splitlines()
    return SECRET in printed or host["mark"] in printed


def _left(host: dict[str, object]) -> list[int]:
    def is_marked(process: psutil.Process) -> bool:
        return any(str(host["mark"]) in part for part in process.info["cmdline"] or ())

    return [process.pid for process in psutil.process_iter(["cmdline"]) if is_marked(process)]


def _mounts() -> list[str]:
    """The mounts of this process, without the one of its store that podman, as root, makes at first and keeps."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if "/containers/storage/overlay " not in line]


def _assert_nothing_is_left(host: dict[str, object], mounts: list[str]) -> None:
    wait_for("all processes of the programs to be gone", lambda: not _left(host), WAIT_SECONDS)
    assert _mounts() == mounts
    assert not list(Path(tempfile.gettempdir()).iterdir())
    assert sorted(path.name for path in Path(str(host["secret"])).parent.iterdir()) == ["secret", "temporary"]


def test_no_hostile_program_gets_out_and_nothing_of_them_is_left(
    host: dict[str, object], sandbox_kind: SandboxConfig
) -> None:
    mounts = _mounts()
    for name, program in HELD.items():
        result = _run(program, host)
        assert not _escaped(result, host), name
        assert result.failed == "error: exited with code 1", (name, result)
    assert _run(PTRACE, host).output == "-1\n"
    assert _run(PTRACE, host | {"pid": 1}).output == "-1\n", "the guard"
    for program in ENDS.values():
        _run(program, host, seconds=1)
    _assert_nothing_is_left(host, mounts)


def test_programs_end_with_a_worker_that_is_killed(host: dict[str, object], sandbox_kind: SandboxConfig) -> None:
    """Also one that left its session and cleared the signal of its parent's end."""
    code = f"{ENDS['outlive the parent']}\n# {host['mark']}"
    worker = (
        "from pipeline.config.task_keys import SandboxConfig; from pipeline.environments import sandbox; "
        f"sandbox.choose_sandbox(SandboxConfig(**{sandbox_kind.model_dump()!r})); "
        f"sandbox.run_python({code!r}, 600, {MEMORY_BYTES})"
    )
    with subprocess.Popen([sys.executable, "-c", worker]) as process:
        try:
            wait_for("the program", lambda: len(_left(host)) >= 3, WAIT_SECONDS)  # the worker, the guard, the code
        finally:
            process.kill()
    wait_for("all processes of the program to be gone", lambda: not _left(host), WAIT_SECONDS)


def test_without_a_sandbox_the_same_programs_get_out(host: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the programs would be seen if they got out."""
    monkeypatch.setattr(sandbox, "_chosen", SandboxConfig(kind="none"))
    for name in ("read a file of the user", "read it by a link", "call a port of the host", "call an abstract socket"):
        assert _escaped(_run(HELD[name], host), host), name
    for name in ("call a Unix socket", "read a process of the host", "stop a process of the host"):
        assert _escaped(_run(HELD[name], host), host), name


@pytest.mark.trial
def test_two_thousand_hostile_programs(host: dict[str, object], sandbox_kind: SandboxConfig) -> None:
    mounts = _mounts()
    programs = [*HELD.values(), PTRACE, *ENDS.values()]
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda number: _run(programs[number % len(programs)], host, 2), range(2000)))
    print(f"{len(results) / (time.monotonic() - began):.1f} sandboxes/s")
    assert not any(_escaped(result, host) for result in results)
    _assert_nothing_is_left(host, mounts)
