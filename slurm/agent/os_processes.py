"""The kernel's state of a process of any program.

Owns reading /proc: whether a process is stopped, its descendants, and where its threads wait. Promises that an exited
process, or one whose files this user may not read, raises no error. Must not know roles.
"""

import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
_STATES = {
    "R": "running",
    "S": "asleep",
    "D": "waiting for a device or a disk",
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "ended",
}
_MAX_THREADS = 256


def is_below(pid: int, ancestor: int) -> bool:
    """Whether a running process is a descendant of another one."""
    while pid > 1:
        fields = _fields(PROC / str(pid) / "stat")
        pid = int(fields[1]) if fields else 0
        if pid == ancestor:
            return True
    return False


def is_stopped(pid: int) -> bool:
    """Whether a signal stopped the process, which then does nothing until it is continued."""
    return _fields(PROC / str(pid) / "stat")[:1] == ["T"]


def states_of(pid: int) -> set[str]:
    """The kernel's state letters of the process's threads; empty if the process has exited."""
    return {fields[0] for task in _tasks(pid) if (fields := _fields(task / "stat"))}


def name_of(pid: int) -> str:
    """The kernel's name of the process's program; empty if the process has exited."""
    return _text(PROC / str(pid) / "comm")


def descendants(pid: int) -> list[int]:
    """The ids of the process's running descendants, depth first."""
    below: list[int] = []
    for task in _tasks(pid):
        for child in map(int, _text(task / "children").split()):
            below += [child, *descendants(child)]
    return below


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for a signal."""
    lines = (line.partition(":") for line in _text(PROC / str(pid) / "status").splitlines())
    caught = next((int(mask, 16) for name, _, mask in lines if name == "SigCgt"), 0)
    return bool(caught >> (number - 1) & 1)


def threads_of(pid: int) -> str:
    """The process's threads: state, kernel function in which each waits, and kernel stack if this user may read it.

    Equal threads share one line.
    """
    seen = Counter(_where(task) for task in _tasks(pid)[:_MAX_THREADS])
    lines = [f"  {count} × {where}" if count > 1 else f"  {where}" for where, count in seen.items()]
    return "\n".join((f"{name_of(pid) or 'a process that is gone'} (pid {pid})", *lines)) + "\n"


def _where(task: Path) -> str:
    fields, waits = _fields(task / "stat"), _text(task / "wchan")
    state = _STATES.get(fields[0], fields[0]) if fields else "gone"
    waiting = f", in {waits}" if waits not in ("", "0") else ""
    frames = [line.partition(" ")[2] for line in _text(task / "stack").splitlines()]
    stack = f", kernel stack: {' < '.join(frames)}" if frames else ""
    return f"thread {_text(task / 'comm')}: {state}{waiting}{stack}"


def _tasks(pid: int) -> list[Path]:
    with suppress(OSError):
        return list((PROC / str(pid) / "task").iterdir())
    return []


def _fields(stat: Path) -> list[str]:
    """The fields after the program's name, which may contain blanks: state, parent, …"""
    return _text(stat).rpartition(")")[2].split()


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
