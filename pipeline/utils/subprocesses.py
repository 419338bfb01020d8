"""Child processes that are stopped by their id, and ports that are held until used.

A child starts in its own session, shielded from the scheduler's signals. `Child.stop` ends its whole process group
within a deadline: afterwards no process of the group is alive, unless the kernel itself cannot end it. No process is
ever looked up or killed by name.
"""

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NoReturn

import psutil

from pipeline.utils import exec_shielded
from pipeline.utils.connection_limits import inherited_open_files
from pipeline.utils.forked_process import ForkedProcess, ForkRequest
from pipeline.utils.waiting import Deadline

log = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER = 36
KILL_SECONDS = 10.0
"""Time for the kernel to end a killed process."""
STARTER = "ROLLCALL_STARTER_PID"
"""The environment variable of a program that a process other than its parent stops."""
_PAUSE = 0.02


def starting_process() -> int:
    """The pid of the process that has started this one and stops it: as `STARTER` in the environment names it, else the
    parent. The parent of a forked program is its keeper (`fork_server`)."""
    return int(os.environ.get(STARTER) or os.getppid())


def exit_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(exec_shielded.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans(adopt: bool = True) -> None:
    """Become the parent of every orphaned descendant, so that `end_descendants` can see it, or no longer."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def end_descendants() -> list[int]:
    """Kill all running descendants of this process. Returns their pids."""
    left = [child for child in psutil.Process().children(recursive=True) if child.is_running()]
    for child in left:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=5)
    return [child.pid for child in left]


def exit_after(work: Callable[[], object]) -> NoReturn:
    """Do the work, then exit without the interpreter's finalization: with 0, or with 1 after printing the traceback.

    For a role whose work closes its own files, also when it raises. A thread that is still inside a library's C++ (a
    gloo group whose peer has left, an allocation in progress) would run into a half-finalized interpreter and abort the
    process, which would then look killed.
    """
    code = 0
    try:
        work()
    except Exception:  # noqa: BLE001 (the process boundary: print the traceback as the interpreter would)
        traceback.print_exc()
        code = 1
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def hold_port() -> socket.socket:
    """Bind a port that is free on every address of this machine, without listening on it.

    The bind is exclusive, so no other holder and no outgoing connection gets the same port. Afterwards SO_REUSEPORT is
    set, and SO_REUSEADDR is not. The kernel then admits a second socket only if it sets SO_REUSEPORT too and belongs to
    the same user (`pipeline.utils.listeners.listen_on_held`). The port is free at no moment. Close the returned socket
    to release it.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.bind(("", 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return holder


def start_resource_tracker() -> None:
    """Start multiprocessing's resource tracker unless it runs, without unblocking a signal of this process.

    Starting a process with the spawn method also starts the tracker, and Python 3.11 then unblocks TERM in the starting
    process (python/cpython#127586, fixed in later versions). This would remove the signal shield from the role and
    its children; a pending TERM would end the role at once. Here the tracker is started with `_HAVE_SIGMASK` off, so
    that it leaves the mask unchanged.
    """
    masks = vars(resource_tracker)
    had = masks["_HAVE_SIGMASK"]
    with _blocked({signal.SIGINT, signal.SIGTERM}):  # until the tracker has set its own handlers, which ignore both
        masks["_HAVE_SIGMASK"] = False
        try:
            resource_tracker.ensure_running()
        finally:
            masks["_HAVE_SIGMASK"] = had


@contextmanager
def _blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Block these signals in the block, and in children forked there from their first instruction on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Leader:
    """A started process, the leader of its session and process group.

    TERM, USR1, USR2 and HUP are blocked in the process and its descendants (`pipeline.utils.exec_shielded`); INT asks
    it to end. Start it from a thread that outlives the process, since the parent-death signal follows the thread.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], *, stdin: int, output: int, forks: ForkRequest | None = None
    ) -> None:
        """Start `argv` with exactly the environment `env`; `output` is the descriptor of standard output and error.

        With `forks`, a fork server starts it; exec does if that server refuses or ends before it has done so. Until
        then `pid` is 0.
        """
        self._execute = partial(_execute, tuple(argv), dict(env), stdin)
        self._output = output
        self._process = self._request(forks, argv, env, stdin) if forks else self._execute(output)

    def _request(
        self, forks: ForkRequest, argv: Sequence[str], env: Mapping[str, str], stdin: int
    ) -> "ForkedProcess | subprocess.Popen[bytes]":
        with Path(os.devnull).open("rb") as devnull:
            streams = (devnull.fileno() if stdin == subprocess.DEVNULL else stdin, self._output, self._output)
            try:
                process = forks.send(argv, env, streams)
            except OSError:
                return self._execute(self._output)
        self._output = os.dup(self._output)  # for exec, if the server refuses
        return process

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code (negative: the signal that ended it), or None while it runs.

        When the leader has ended, the rest of its group is killed too.
        """
        if isinstance(self._process, ForkedProcess):
            return self._poll_forked(self._process)
        if self._process.returncode is None and _has_ended(self.pid):
            # Before the leader is reaped: until then the kernel cannot reuse its id for another group.
            self._signal(signal.SIGKILL)
            self._process.wait()
        return self._process.returncode

    def _poll_forked(self, process: ForkedProcess) -> int | None:
        """As `poll`; starts the program with exec if the fork server did not."""
        was_requested = not process.pid and process.returncode is None
        code = process.poll()
        if was_requested and (process.pid or code is not None):
            if process.refusal:
                log.info("a program starts with exec, not by a fork: %s", process.refusal)
                self._process, code = self._execute(self._output), None
            os.close(self._output)
        return code

    def group_is_gone(self) -> bool:
        """Whether no process of the group is left.

        A killed process counts until the kernel has ended it, because it holds its memory, including GPU memory.
        """
        if self.poll() is None:
            return False
        return not self.pid or not any(_is_of_group(pid, self.pid) for pid in psutil.pids())

    def terminate(self) -> None:
        """Ask the whole group to end, with INT."""
        if self.poll() is None:
            self._signal(signal.SIGINT)

    def kill(self, seconds: float = KILL_SECONDS) -> int:
        """Kill the whole group and wait for its leader to end. Returns the leader's exit code.

        A process that waits in the kernel for a device or an unreachable filesystem may outlast `seconds`. Then the
        result is that of SIGKILL; `poll` returns None until the process has ended.
        """
        if self.poll() is None:
            self._signal(signal.SIGKILL)
        try:
            return self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    def kill_all(self) -> int:
        """Kill the group and all descendants, also those in other sessions. Returns the leader's exit code.

        Orphans are included only if a process below the leader has adopted them (`adopt_orphans`).
        """
        descendants: list[psutil.Process] = []
        with suppress(psutil.Error):
            descendants = psutil.Process(self.pid).children(recursive=True) if self.pid else []
        code = self.kill()
        for process in descendants:
            with suppress(psutil.Error):
                process.kill()
        return code

    def stop(self, seconds: float) -> int:
        """Ask the group to end, and kill it after `seconds`. Returns the leader's exit code."""
        self.terminate()
        deadline = Deadline(f"process {self.pid} to end", seconds)
        while self.poll() is None and not deadline.passed:
            time.sleep(_PAUSE)
        return self.kill()

    def _signal(self, number: signal.Signals) -> None:
        if isinstance(self._process, ForkedProcess) and not self.pid:  # requested, and not to start any more
            self._process.close(number)
            os.close(self._output)
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return  # the whole group is gone already


def start_connected(argv: Sequence[str], env: Mapping[str, str], output: int) -> tuple[Leader, socket.socket]:
    """A started leader, and one end of a pair of sockets. The other end is the leader's standard input."""
    ours, its = socket.socketpair()
    try:
        return Leader(argv, env, stdin=its.fileno(), output=output), ours
    except OSError:
        ours.close()
        raise
    finally:
        its.close()


class Child(Leader):
    """A leader whose output goes to one log file."""

    def __init__(
        self, argv: Sequence[str], log: Path, env: Mapping[str, str], forks: ForkRequest | None = None
    ) -> None:
        """Start `argv` with exactly the environment `env`; standard output and error are appended to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            super().__init__(argv, env, stdin=subprocess.DEVNULL, output=output.fileno(), forks=forks)
        self.log = log


def _execute(
    argv: tuple[str, ...], env: dict[str, str], stdin: int, output: int
) -> "ForkedProcess | subprocess.Popen[bytes]":
    """Start a program with exec, shielded (`pipeline.utils.exec_shielded`), in its own session."""
    wrapper = [sys.executable, "-I", "-S", exec_shielded.__file__, str(os.getpid()), str(inherited_open_files())]
    with _blocked(exec_shielded.SHIELDED):
        return subprocess.Popen(
            [*wrapper, *argv],
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )


def _has_ended(pid: int) -> bool:
    """Whether a child has ended, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _is_of_group(pid: int, group: int) -> bool:
    """Whether the process belongs to the group and still has a running thread, so is not just waiting to be reaped."""
    try:
        if os.getpgid(pid) != group:
            return False
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return len(threads) > 1 or psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, FileNotFoundError, psutil.NoSuchProcess):
        return False


def describe_exit(code: int) -> str:
    """An exit code in words: `killed by SIGKILL` or `exited with code 1`."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {-code}"


def tail(log: Path, lines: int = 20, limit: int = 1 << 16) -> list[str]:
    """The last `lines` lines of a log, of at most its last `limit` bytes. The log may still be growing."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
        return file.read().decode(errors="replace").splitlines()[-lines:]
