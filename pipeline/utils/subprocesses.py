"""Processes that are stopped by their id, and ports that are held until used.

Owns starting a child in its own session, shielded from the scheduler's signals, ending its whole group with a deadline,
ending whatever a process left below itself, and holding ports. Promises that `Child.stop` returns with no process of
the group alive, unless the kernel itself cannot end it, and that no process is ever found or ended by its name. Knows
nothing of roles.
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
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NoReturn

import psutil

from pipeline.utils import exec_shielded
from pipeline.utils.waiting import Deadline

PR_SET_CHILD_SUBREAPER = 36
KILL_SECONDS = 10.0
"""For the kernel to end what was killed."""
_PAUSE = 0.02


def exit_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(exec_shielded.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that `end_descendants` finds it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> list[int]:
    """Kill what still runs below this process; the pids that were found alive."""
    left = [child for child in psutil.Process().children(recursive=True) if child.is_running()]
    for child in left:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=5)
    return [child.pid for child in left]


def exit_after(work: Callable[[], object]) -> NoReturn:
    """Do the work, then end this process without the interpreter's own ending: with 0, or with 1 after the traceback.

    For a role whose work closes what it wrote, however it ends. A thread that is still inside a library's C++ (a gloo
    group whose peer has left, memory that is being made) would meet a half-ended interpreter and abort the process,
    which then looks killed.
    """
    code = 0
    try:
        work()
    except Exception:  # noqa: BLE001 (the process's own boundary: told as the interpreter would)
        traceback.print_exc()
        code = 1
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def hold_port() -> socket.socket:
    """A port that is free on every address of this machine, held without listening.

    The bind is exclusive, so no other holder and no outgoing connection gets the same port. Afterwards SO_REUSEPORT is
    allowed, and SO_REUSEADDR is not: then the kernel lets a socket bind and listen there if it allows SO_REUSEPORT too
    and belongs to the same user (`pipeline.utils.listeners.listen_on_held`), and refuses everybody else, whatever they
    set. There is no moment at which the port is free. Close the socket to give it back.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.bind(("", 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return holder


def start_resource_tracker() -> None:
    """Start multiprocessing's resource tracker, unless it runs, and let no signal through meanwhile.

    Python 3.11 unblocks TERM in whoever starts it (python/cpython#127586, mended in later ones), which everybody does
    who spawns a process: that would end the shield of the role and of what it spawns, and the role itself, if TERM came
    at any time before. So it is told that it has no masks. One that runs is left alone.
    """
    masks = vars(resource_tracker)
    had = masks["_HAVE_SIGMASK"]
    with _blocked({signal.SIGINT, signal.SIGTERM}):  # the tracker ignores both, once it can
        masks["_HAVE_SIGMASK"] = False
        try:
            resource_tracker.ensure_running()
        finally:
            masks["_HAVE_SIGMASK"] = had


@contextmanager
def _blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Children forked in the block have these signals blocked from their first instruction on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Leader:
    """A started process, the leader of its own session.

    Neither it nor what it starts hears TERM, USR1, USR2 or HUP (`pipeline.utils.exec_shielded`): it is asked to end
    with INT. Must be started and stopped from a thread that outlives it: the parent-death signal follows the thread.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], *, stdin: int, output: int) -> None:
        """Start `argv` with exactly the environment `env`, and with these descriptors; `output` is error output too."""
        wrapper = [sys.executable, "-I", "-S", exec_shielded.__file__, str(os.getpid())]
        with _blocked(exec_shielded.SHIELDED):
            self._process = subprocess.Popen(
                [*wrapper, *argv],
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code (negative: the signal that ended it), or None while it runs.

        When the leader has ended, the rest of its group is ended too. That happens before the leader is reaped: until
        then the kernel gives its id to nobody else.
        """
        if self._process.returncode is None and _has_ended(self.pid):
            self._signal(signal.SIGKILL)
            self._process.wait()
        return self._process.returncode

    def group_is_gone(self) -> bool:
        """Whether no process of its group is left, also none that was killed and that the kernel still ends: until then
        that one holds its memory, also that of a GPU."""
        return self.poll() is not None and not any(_is_of_group(pid, self.pid) for pid in psutil.pids())

    def terminate(self) -> None:
        """Ask the whole group to end, with INT."""
        if self.poll() is None:
            self._signal(signal.SIGINT)

    def kill(self, seconds: float = KILL_SECONDS) -> int:
        """End the whole group and wait until its leader is gone; its exit code.

        The kernel keeps a process that waits for a device or a dead file system: one that is not gone within `seconds`
        counts as killed, ends as soon as that answers, and `poll` says None until then.
        """
        if self.poll() is None:
            self._signal(signal.SIGKILL)
        try:
            return self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    def kill_all(self) -> int:
        """End it and all that it started, in sessions of their own too, if whoever adopts those is still below it."""
        below: list[psutil.Process] = []
        with suppress(psutil.Error):
            below = psutil.Process(self.pid).children(recursive=True)
        code = self.kill()
        for process in below:
            with suppress(psutil.Error):
                process.kill()
        return code

    def stop(self, seconds: float) -> int:
        """Ask the group to end, end it after `seconds`; the exit code of its leader."""
        self.terminate()
        deadline = Deadline(f"process {self.pid} to end", seconds)
        while self.poll() is None and not deadline.passed:
            time.sleep(_PAUSE)
        return self.kill()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return  # the whole group is gone already


class Child(Leader):
    """A leader whose output goes to one log file."""

    def __init__(self, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        """Start `argv` with exactly the environment `env`; standard output and error are appended to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            super().__init__(argv, env, stdin=subprocess.DEVNULL, output=output.fileno())
        self.log = log


def _has_ended(pid: int) -> bool:
    """Whether a child has ended, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _is_of_group(pid: int, group: int) -> bool:
    """Whether this process is of that group and has a thread left: one that has none waits for its parent alone."""
    try:
        if os.getpgid(pid) != group:
            return False
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return len(threads) > 1 or psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, FileNotFoundError, psutil.NoSuchProcess):
        return False


def describe_exit(code: int) -> str:
    """`killed by SIGKILL` or `exited with code 1`."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def tail(log: Path, lines: int = 20, limit: int = 1 << 16) -> list[str]:
    """The last lines of a log that is still being written."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
        return file.read().decode(errors="replace").splitlines()[-lines:]
