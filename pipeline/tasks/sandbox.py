"""Python code of the policy's, run apart.

Owns the process that such code runs in, and what it is kept from: more than its seconds, and more memory, output and
files than it is given; and, where the kernel lets a process without rights have namespaces of its own (`unshare`), the
network and signals to all other processes, and then whatever it started ends with it, in sessions of its own too.
Promises an answer in any case, as text that says what happened. It is a fence against accidents and idle cleverness,
not against an attacker: it reads, writes and deletes whatever the worker's user can, the run directory included; the
host's `/proc` stays visible, with names and arguments of the user's processes; and memory is counted for each process.
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

MOST_OUTPUT = 1 << 16
MOST_FILE = 1 << 24
MOST_FILES = 64
PROBE_SECONDS = 10.0
_APART = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")


@dataclass(frozen=True)
class Ran:
    """What became of some code: what it printed, errors included, why it ended early, if it did, and whether because
    its time was up."""

    output: str
    failed: str = ""
    late: bool = False

    @property
    def text(self) -> str:
        """Both in one."""
        return "\n".join(filter(None, (self.output.strip(), self.failed)))


@cache
def apart() -> tuple[str, ...]:
    """The command that gives a process namespaces of its own; empty where there is none."""
    if shutil.which(_APART[0]) is None:
        return ()
    with suppress(OSError, subprocess.TimeoutExpired):
        probe = subprocess.run([*_APART, "true"], capture_output=True, timeout=PROBE_SECONDS, check=False)
        return _APART if probe.returncode == 0 else ()
    return ()


def run_python(
    code: str, seconds: float, memory_bytes: int, *, files: Mapping[str, str] = MappingProxyType({}), given: str = ""
) -> Ran:
    """Run `code` with Python's standard library and what is installed beside it, in a folder that holds `files` by
    name, with `given` as its standard input."""
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
            [*apart(), sys.executable, "-I", "-c", code],
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
            _end(process)
        output.seek(0)
        printed = output.read(MOST_OUTPUT).decode(errors="replace")
        return Ran(printed, failed or _fate(process.returncode), late)


def _bound(seconds: float, memory_bytes: int) -> None:
    """In the child, before it begins. CPU time is bounded a little later than the clock, which tells more."""
    cpu = int(seconds) + 2
    for what, most in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_FSIZE, MOST_FILE),
        (resource.RLIMIT_NOFILE, MOST_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (bound, bound))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End it and what is in its session; what left that is below the worker, and ended with it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _fate(code: int) -> str:
    if code == 0:
        return ""
    return f"error: killed by {signal.Signals(-code).name}" if code < 0 else f"error: exited with code {code}"
