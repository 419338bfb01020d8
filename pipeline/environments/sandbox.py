"""Python code written by the policy, run in isolation.

Owns the process of such code and its limits: a timeout; bounds on memory, output, files and processes; no network, no
other processes, and no files except in the process's own memory (`sandbox_jail`), by means of unprivileged namespaces
(`unshare`). All processes that the code started end with it, also those in other sessions. If the kernel gives no such
namespaces, code is refused unless `task.sandbox=none` permits it.

Promises a result in every case, as text that describes the end. The code sees the system's programs and libraries and
the Python installation, and no other file of the machine. Memory is limited per process, and all system calls that need
no privileges are permitted.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pipeline.environments import sandbox_jail
from pipeline.errors import ConfigError

Mode = Literal["namespaces", "none"]
MAX_OUTPUT = 1 << 16
MAX_FILE = 1 << 24
MAX_FILES = 64
MAX_DISK = 1 << 26
"""Bytes of all files together."""
MAX_PROCESSES = 64
PROBE_SECONDS = 60.0
_NAMESPACES = ("--user", "--map-root-user", "--net", "--ipc", "--pid", "--mount")
_UNSHARE = ("unshare", *_NAMESPACES, "--fork", "--kill-child")
_chosen: Mode = "namespaces"


@dataclass(frozen=True)
class SandboxResult:
    """The result of some code: its output (standard output and errors), the reason if it ended early, and whether the
    reason is the timeout."""

    output: str
    failed: str = ""
    late: bool = False

    @property
    def text(self) -> str:
        """The output followed by the reason of an early end."""
        return "\n".join(filter(None, (self.output.strip(), self.failed)))


def choose_mode(mode: Mode) -> None:
    """Set how this process runs code from now on; the default is `namespaces`."""
    global _chosen
    _chosen = mode


def require_namespaces() -> None:
    """`ConfigError` unless this machine can run code in separate namespaces."""
    if why := missing_namespaces():
        expected = f"a node where an unprivileged process may create namespaces ({why})"
        hint = (
            "ask for unprivileged user namespaces and mounts, or set task.sandbox=none: code written by the policy can "
            "then use the network, and read and end your other processes"
        )
        raise ConfigError("task.sandbox", "namespaces", expected, hint)


@cache
def missing_namespaces() -> str:
    """The reason why this machine cannot run code in namespaces; empty if it can."""
    if shutil.which(_UNSHARE[0]) is None:
        return "there is no command unshare"
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        try:
            probe = subprocess.run(
                [*_in_jail(folder), "pass"], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    message = (probe.stderr.strip().splitlines() or [_exit_text(probe.returncode)])[-1]
    return "" if probe.returncode == 0 else message


def _in_jail(folder: str) -> tuple[str, ...]:
    """The command that runs the code after it in the jail, with the files of `folder`."""
    bounds = (str(MAX_DISK), str(MAX_PROCESSES))
    return (*_UNSHARE, sys.executable, "-I", "-S", sandbox_jail.__file__, folder, *bounds)


def run_python(
    code: str, seconds: float, memory_bytes: int, *, files: Mapping[str, str] = MappingProxyType({}), stdin: str = ""
) -> SandboxResult:
    """Run `code` with Python's standard library and the installed packages, in a folder that holds `files` by name,
    with `stdin` as its standard input. `ConfigError` where code may not run, see `require_namespaces`."""
    if _chosen == "namespaces":
        require_namespaces()
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-") as folder,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as standard_input,
    ):
        for name, text in files.items():
            Path(folder, name).write_bytes(text.encode(errors="replace"))
        standard_input.write(stdin.encode(errors="replace"))
        standard_input.seek(0)
        process = subprocess.Popen(
            [*(_in_jail(folder) if _chosen == "namespaces" else (sys.executable, "-I", "-c")), code],
            stdin=standard_input,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PATH": os.environ.get("PATH", ""), "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=lambda: _bound(seconds, memory_bytes),
        )
        failed, late = "", False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            failed, late = f"error: it took more than {seconds:g} s", True
        finally:
            _kill_process(process)
        output.seek(0)
        printed = output.read(MAX_OUTPUT).decode(errors="replace")
        return SandboxResult(printed, failed or _exit_text(process.returncode), late)


@contextmanager
def open_python(
    code: str, seconds: float, memory_bytes: int, directories: Sequence[str]
) -> "Iterator[subprocess.Popen[bytes]]":
    """A process that runs `code` in the jail, with pipes as its standard input and output, killed at the end of the
    block. `seconds` of CPU time and the other limits bound each of its processes. `directories` of the root, such as
    /app, are writable. `ConfigError` where code may not run in namespaces: without them there are no such directories.
    """
    if _chosen != "namespaces":
        expected = "namespaces: this task needs directories that only a sandbox has"
        raise ConfigError("task.sandbox", _chosen, expected, "remove task.sandbox=none")
    require_namespaces()
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        process = subprocess.Popen(
            [*_in_jail(folder), code, *directories],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.environ.get("PATH", ""), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=lambda: _bound(seconds, memory_bytes),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process
        finally:
            _kill_process(process)
            process.stdout.close()
            with suppress(OSError):
                process.stdin.close()


def _bound(seconds: float, memory_bytes: int) -> None:
    """Runs in the child before the code, and has it end with this worker, also if that is killed. The CPU limit is
    later than the timeout, whose message is more specific."""
    sandbox_jail.end_with_parent()
    cpu = int(seconds) + 2
    for what, limit in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_FSIZE, MAX_FILE),
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (bound, bound))


def _kill_process(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and its session. Without namespaces, processes that left the session end with the worker."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _exit_text(code: int) -> str:
    if _chosen == "namespaces" and code - sandbox_jail.SIGNALED in signal.valid_signals():
        code = sandbox_jail.SIGNALED - code
    if code == 0:
        return ""
    return f"error: killed by {signal.Signals(-code).name}" if code < 0 else f"error: exited with code {code}"
