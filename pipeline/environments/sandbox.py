"""Python code written by the policy, run in isolation.

Owns the process of such code and its limits: a timeout; bounds on memory, output, files and processes; no network, no
other processes, and no files except in the process's own memory, by means of the program that `task.sandbox` names
(`sandbox_kinds`), as Linux namespaces by default. All processes that the code started end with it, also those in other
sessions, and those of a worker that is killed. If this machine cannot run that program, code is refused unless
`task.sandbox.kind=none` permits it.

Promises a result, as text that describes the end, whatever the code does. Where its sandbox does not start, the code
has no result: `RolloutError`. The code sees the system's programs and libraries and the Python installation, or an
image, and no other file of the machine. All system calls that need no privileges are permitted.
"""

import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import IO

from pipeline.config.data_keys import located_path
from pipeline.config.task_keys import SandboxConfig
from pipeline.environments import sandbox_guard
from pipeline.environments.sandbox_guard import Bounds
from pipeline.environments.sandbox_kinds import KINDS, SandboxSpec, client_environment
from pipeline.errors import ConfigError, RolloutError

MAX_OUTPUT = 1 << 16
MAX_FILE = 1 << 24
MAX_FILES = 64
MAX_DISK = 1 << 26
"""Bytes of all files together."""
MAX_PROCESSES = 64
PROBE_SECONDS = 60.0
PROBE_MEMORY_BYTES = 1 << 30
START_SECONDS = 60
"""Wall-clock seconds for the start of a sandbox, and after the timeout at which a guard ends its sandbox itself."""
_LOOK_SECONDS = 0.05
DAY_SECONDS = 86400
_UNSAFE = (
    "or set task.sandbox.kind=none: code written by the policy can then use the network, and read and end your other "
    "processes"
)
_REASONS = {
    sandbox_guard.OUT_OF_MEMORY: "error: its processes together used more memory than the limit",
    sandbox_guard.OUT_OF_PROCESSES: f"error: it had more than {sandbox_guard.MAX_PROCESSES} processes",
    sandbox_guard.OUT_OF_TIME: "error: its sandbox was ended after its timeout",
}
_chosen = SandboxConfig()


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


def choose_sandbox(chosen: SandboxConfig) -> None:
    """Set how this process runs code from now on; the default is `namespaces`."""
    global _chosen
    _chosen = chosen


def refuse_none(chosen: SandboxConfig) -> None:
    """`ConfigError` if code is to run without a sandbox."""
    if chosen.kind == "none":
        expected = "namespaces: this task needs directories that only a sandbox has"
        raise ConfigError("task.sandbox.kind", chosen.text, expected, "remove task.sandbox.kind=none")


def require_sandbox(chosen: SandboxConfig, *, suggests_none: bool = True) -> None:
    """`ConfigError` unless this machine can run code as `chosen`; it suggests `none` where the task can do with it."""
    if chosen.kind == "none":
        return
    kind, image = KINDS[chosen.kind], chosen.image
    if kind.needs_image and not image:
        expected = f"an image for task.sandbox.kind={chosen.kind}"
        raise ConfigError("task.sandbox.image", image, expected, kind.hint)
    if image and not kind.takes_image:
        expected = f"nothing with task.sandbox.kind={chosen.kind}, which shows the programs of the machine"
        raise ConfigError("task.sandbox.image", image, expected, "leave it out, or choose another kind")
    if why := missing_sandbox(chosen):
        expected = f"a node where {kind.program} runs without privileges ({why})"
        hint = f"{kind.hint}, {_UNSAFE}" if suggests_none else kind.hint
        raise ConfigError("task.sandbox.kind", chosen.text, expected, hint)


@cache
def missing_sandbox(chosen: SandboxConfig) -> str:
    """The reason why this machine cannot run code as `chosen`; empty if it can."""
    if chosen.kind == "none":
        return ""
    if shutil.which(KINDS[chosen.kind].program) is None:
        return f"there is no command {KINDS[chosen.kind].program}"
    bounds = _bounds(PROBE_SECONDS, PROBE_MEMORY_BYTES)
    try:
        with _started(chosen, "pass", bounds, {}, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as (process, _):
            _, errors = process.communicate(timeout=PROBE_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    lines = errors.decode(errors="replace").strip().splitlines() or [_exit_text(chosen, process.returncode)]
    return "" if process.returncode == 0 else lines[-1]


def run_python(
    code: str, seconds: float, memory_bytes: int, *, files: Mapping[str, str] = MappingProxyType({}), stdin: str = ""
) -> SandboxResult:
    """Run `code` with Python's standard library and the installed packages, in a folder that holds `files` by name,
    with `stdin` as its standard input. `seconds` count from the start of the code, and `memory_bytes` bounds each
    process and all together. `ConfigError` where code may not run, see `require_sandbox`; `RolloutError` where a
    sandbox does not start, as on a node without memory or processes left."""
    require_sandbox(_chosen)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as standard_input:
        standard_input.write(stdin.encode(errors="replace"))
        standard_input.seek(0)
        failed, late = "", False
        with _started(_chosen, code, _bounds(seconds, memory_bytes), files, stdin=standard_input, stdout=output) as (
            process,
            started,
        ):
            if not _await_start(process, started):
                output.seek(0)
                lines = output.read(MAX_OUTPUT).decode(errors="replace").strip().splitlines()
                raise RolloutError(f"the sandbox did not start: {(lines or ['no reason is known'])[-1]}")
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                failed, late = f"error: it took more than {seconds:g} s", True
        output.seek(0)
        printed = output.read(MAX_OUTPUT).decode(errors="replace")
        return SandboxResult(printed, failed or _exit_text(_chosen, process.returncode), late)


@contextmanager
def open_python(
    code: str, seconds: float, memory_bytes: int, directories: Sequence[str]
) -> "Iterator[subprocess.Popen[bytes]]":
    """A process that runs `code` in a sandbox, with pipes as its standard input and output, killed at the end of the
    block. `seconds` of CPU time and the other limits bound each of its processes. `directories` of the root, such as
    /app, are writable. `ConfigError` where code may not run in a sandbox: without one there are no such directories.
    """
    refuse_none(_chosen)
    require_sandbox(_chosen, suggests_none=False)
    bounds = _bounds(seconds, memory_bytes)._replace(seconds=DAY_SECONDS)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with _started(_chosen, code, bounds, {}, directories, **pipes) as (process, _):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process
        finally:
            _kill_process(process)
            process.stdout.close()
            with suppress(OSError):
                process.stdin.close()


@contextmanager
def _started(
    chosen: SandboxConfig,
    code: str,
    bounds: Bounds,
    files: Mapping[str, str],
    directories: Sequence[str] = (),
    *,
    stdin: "IO[bytes] | int",
    stdout: "IO[bytes] | int" = subprocess.DEVNULL,
    stderr: int = subprocess.STDOUT,
) -> "Iterator[tuple[subprocess.Popen[bytes], int | None]]":
    """The process of a new sandbox, which is gone after the block, whatever happened in it. The second value is the
    FIFO of its start; None without a sandbox."""
    kind = KINDS.get(chosen.kind)
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        spec = SandboxSpec(f"{folder}/files", bounds, MAX_DISK, tuple(directories))
        Path(spec.files).mkdir()
        for name, text in files.items():
            Path(spec.files, name).write_bytes(text.encode(errors="replace"))
        with _lease(folder, kind is not None and kind.outlives_worker) as lease, _start_fifo(folder) as started:
            spec = replace(spec, lease=lease, started=f"{folder}/started")
            process = subprocess.Popen(
                [*(kind.command(spec, located_path(chosen.image)) if kind else (sys.executable, "-I", "-c")), code],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=spec.files,
                env=_environment(chosen, spec.files),
                start_new_session=True,
                preexec_fn=lambda: _prepare_child(chosen, bounds),
            )
            try:
                yield process, started if kind else None
            finally:
                _kill_process(process)
                if kind and process.returncode < 0:
                    kind.remove(spec)


@contextmanager
def _start_fifo(folder: str) -> Iterator[int]:
    """The read end of a FIFO, `started` in the folder."""
    os.mkfifo(f"{folder}/started", 0o600)
    number = os.open(f"{folder}/started", os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield number
    finally:
        os.close(number)


def _await_start(process: "subprocess.Popen[bytes]", started: int | None) -> bool:
    """Wait until the code of a sandbox begins; False if the sandbox ends before, or `START_SECONDS` pass."""
    until = time.monotonic() + START_SECONDS
    while started is not None:
        has_ended = process.poll() is not None
        with suppress(BlockingIOError):
            if os.read(started, 1):
                return True
        if has_ended or time.monotonic() > until:
            return False
        select.select([started], [], [], _LOOK_SECONDS)
    return True


@contextmanager
def _lease(folder: str, is_needed: bool) -> Iterator[str]:
    """A FIFO that has a writer until the end of the block, or of this process. The code cannot open it to write."""
    path = f"{folder}/lease" if is_needed else ""
    if not is_needed:
        yield path
        return
    os.mkfifo(path)
    number = os.open(path, os.O_RDWR)
    Path(path).chmod(0o400)
    try:
        yield path
    finally:
        os.close(number)


def _environment(chosen: SandboxConfig, folder: str) -> dict[str, str]:
    """The environment of the command. A container has that of its image instead."""
    if chosen.kind in KINDS and KINDS[chosen.kind].outlives_worker:
        return client_environment(os.environ)
    return {"PATH": os.environ.get("PATH", ""), "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}


def _bounds(seconds: float, memory_bytes: int) -> Bounds:
    """The limits of code with a timeout. The CPU limit is later than the timeout, whose message is more specific."""
    whole = int(seconds)
    return Bounds(whole + START_SECONDS, whole + 2, memory_bytes, MAX_PROCESSES, MAX_FILE, MAX_FILES)


def _prepare_child(chosen: SandboxConfig, bounds: Bounds) -> None:
    """Runs in the child before its command, and has it end with this worker, also if that is killed. A command that
    copies the output of its sandbox is bounded too; without a sandbox, the code itself is."""
    sandbox_guard.end_with_parent()
    resource.setrlimit(resource.RLIMIT_FSIZE, (bounds.file_bytes, bounds.file_bytes))
    if chosen.kind == "none":
        sandbox_guard.limit_process(bounds)


def _kill_process(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and its session. Without a sandbox, processes that left the session end with the worker."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _exit_text(chosen: SandboxConfig, code: int) -> str:
    if chosen.kind != "none":
        if code in _REASONS:
            return _REASONS[code]
        if code - sandbox_guard.SIGNALED in signal.valid_signals():
            code = sandbox_guard.SIGNALED - code
    if code == 0:
        return ""
    return f"error: killed by {signal.Signals(-code).name}" if code < 0 else f"error: exited with code {code}"
