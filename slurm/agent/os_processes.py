"""What the kernel tells of a process, whosever program it is.

Owns reading /proc: whether a process is stopped, what is below it, and where its threads wait. Promises that a process
which is gone, or whose files this user may not read, raises nothing. Must not know roles.
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


def parent_of(pid: int) -> int:
    """The id of its parent; 0 if it is gone."""
    fields = _fields(PROC / str(pid) / "stat")
    return int(fields[1]) if fields else 0


def is_stopped(pid: int) -> bool:
    """Whether it was stopped by a signal, and does nothing until it is continued."""
    return _fields(PROC / str(pid) / "stat")[:1] == ["T"]


def states_of(pid: int) -> set[str]:
    """The letters by which the kernel calls the states of its threads; empty if it is gone."""
    return {fields[0] for task in _tasks(pid) if (fields := _fields(task / "stat"))}


def name_of(pid: int) -> str:
    """The kernel's name of its program; empty if it is gone."""
    return _text(PROC / str(pid) / "comm")


def descendants(pid: int) -> list[int]:
    """The processes that it and its descendants have started, and that are still there."""
    found: list[int] = []
    for task in _tasks(pid):
        for child in map(int, _text(task / "children").split()):
            found += [child, *descendants(child)]
    return found


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether it has a handler for a signal."""
    lines = (line.partition(":") for line in _text(PROC / str(pid) / "status").splitlines())
    caught = next((int(mask, 16) for name, _, mask in lines if name == "SigCgt"), 0)
    return bool(caught >> (number - 1) & 1)


def threads_of(pid: int) -> str:
    """Where its threads are: state, the function of the kernel that each waits in, and its stack there, which only a
    privileged user may read. One line for those that are alike."""
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
    """What follows the program's name, which may itself have blanks: state, parent, …"""
    return _text(stat).rpartition(")")[2].split()


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
