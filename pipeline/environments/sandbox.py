"""Python code of the policy's, run apart.

Owns the process that such code runs in, and what it is kept from: more than its seconds, and more memory, output, files
and processes than it is given; the network, other processes, and any file but those in its own memory (`jail`), by
namespaces that a process without rights may have (`unshare`). Whatever it started ends with it, in sessions of its own
too. Where the kernel gives no such namespaces, code is refused unless `task.sandbox=none` says otherwise.

Promises an answer in any case, as text that says what happened. It is a fence, not a wall against an attacker: the code
reads whatever files the worker's user can, and memory is counted for each process.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
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
    """What became of some code: what it printed, errors included, why it ended early, if it did, and whether because
    its time was up."""

    output: str
    failed: str = ""
    late: bool = False

    @property
    def text(self) -> str:
        """Both in one."""
        return "\n".join(filter(None, (self.output.strip(), self.failed)))


def choose_mode(mode: Mode) -> None:
    """How code is run in this process from now on; without a choice in namespaces."""
    global _chosen
    _chosen = mode


def require_namespaces() -> None:
    """`ConfigError` unless this machine gives code of the policy's namespaces of its own."""
    if why := missing_namespaces():
        expected = f"a node where a process without rights may have namespaces of its own ({why})"
        hint = (
            "ask for unprivileged user namespaces and mounts, or set task.sandbox=none: code of the policy's can then "
            "use the network, and read and end your other processes"
        )
        raise ConfigError("task.sandbox", "namespaces", expected, hint)


@cache
def missing_namespaces() -> str:
    """Why code cannot have namespaces here; empty where it can."""
    if shutil.which(_UNSHARE[0]) is None:
        return "there is no command unshare"
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        try:
            probe = subprocess.run(
                [*_in_jail(folder), "pass"], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    told = (probe.stderr.strip().splitlines() or [_exit_text(probe.returncode)])[-1]
    return "" if probe.returncode == 0 else told


def _in_jail(folder: str) -> tuple[str, ...]:
    """The command that runs the code after it, with the files in `folder`."""
    bounds = (str(MAX_DISK), str(MAX_PROCESSES))
    return (*_UNSHARE, sys.executable, "-I", "-S", sandbox_jail.__file__, folder, *bounds)


def run_python(
    code: str, seconds: float, memory_bytes: int, *, files: Mapping[str, str] = MappingProxyType({}), given: str = ""
) -> SandboxResult:
    """Run `code` with Python's standard library and what is installed beside it, in a folder that holds `files` by
    name, with `given` as its standard input. `ConfigError` where code may not run, see `require_namespaces`."""
    if _chosen == "namespaces":
        require_namespaces()
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-") as folder,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as told,
    ):
        for name, text in files.items():
            Path(folder, name).write_bytes(text.encode(errors="replace"))
        told.write(given.encode(errors="replace"))
        told.seek(0)
        process = subprocess.Popen(
            [*(_in_jail(folder) if _chosen == "namespaces" else (sys.executable, "-I", "-c")), code],
            stdin=told,
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


def _bound(seconds: float, memory_bytes: int) -> None:
    """In the child, before it begins. CPU time is bounded a little later than the clock, which tells more."""
    cpu = int(seconds) + 2
    for what, most in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_FSIZE, MAX_FILE),
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (bound, bound))


def _kill_process(process: "subprocess.Popen[bytes]") -> None:
    """End it and what is in its session; what left that is below the worker, and ended with it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _exit_text(code: int) -> str:
    if code == 0:
        return ""
    return f"error: killed by {signal.Signals(-code).name}" if code < 0 else f"error: exited with code {code}"
