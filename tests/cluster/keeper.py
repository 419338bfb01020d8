"""Holds everything that runs on one machine of the test cluster.

Run as a script with the parent's pid and a daemon's command. Whatever the daemon starts, in whatever session, stays
below this process. Promises that SIGTERM, and the death of the parent, end all of it like a loss of power: everything
stands still before anything dies, so that no process sees another one end. A daemon that crashes is started again, as
systemd does on a real node. Ends by itself when nothing runs any more, with the daemon's exit code. Imports nothing of
the project.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CRASHES = (-signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV)
MAX_CRASHES = 3


def descendants(root: int) -> list[int]:
    """The pids of all processes below `root`, parents before their children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            children.setdefault(_parent(entry), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found[1:]


def power_off() -> None:
    """Freeze all descendants, then kill them, and reap them."""
    frozen: list[int] = []
    while (found := descendants(os.getpid())) != frozen:
        for pid in found:
            _signal(pid, signal.SIGSTOP)
        frozen = found
    for pid in frozen:
        _signal(pid, signal.SIGKILL)
    _reap()


def main() -> int:
    parent, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _on_term)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        return 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crashed daemon leaves no file in the working directory
    daemon, crashes = _start(command), 0
    while (code := _reap(daemon)) in CRASHES and crashes < MAX_CRASHES:
        print(f"keeper: {command[0]} crashed ({signal.Signals(-code).name}) and is started again", flush=True)
        daemon, crashes = _start(command), crashes + 1
    _reap()
    return code


def _on_term(*_: object) -> None:
    power_off()
    os._exit(0)


def _start(command: Sequence[str]) -> int:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL).pid


def _reap(daemon: int = 0) -> int:
    """Reap until the daemon has ended, and return its exit code; without a daemon until there are no children."""
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return 0
        if pid == daemon:
            return os.waitstatus_to_exitcode(status)


def _parent(entry: Path) -> int:
    """The parent's pid; 0 of a process that has gone."""
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # its parent reaped it before it stood still


if __name__ == "__main__":
    sys.exit(abs(main()))
