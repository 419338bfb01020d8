"""Signs of life: what the processes of a role tell the agent beside them.

Owns the memory that both share, one record for each process, and how a process fills its own. It tells two things: that
it runs at all (a thread ticks), and that its work goes on (`beat`, called by the work itself where it progresses). What
may take long says so, and how long, with `busy_with`. Promises that telling takes microseconds, never waits and touches
no file system: the memory is the agent's (memfd), reached through /proc and gone with it. In a process that no agent
listens to, nothing is told. Must not know from when on a silence is a hang: the agent judges that.

    heartbeat.start()                                          # the first thing in the process
    with heartbeat.busy_with("waiting for an order", 1800):       # at most so long without a beat
        ...
    for batch in micro_batches:
        heartbeat.beat()

A process also writes the stacks of its Python threads into the agent's memory whenever it gets `STACKS`, from C and
without the interpreter, so also while that is stuck. The signal was chosen because a process that does not know it
ignores it, no scheduler sends it, and the shield of roles (`pipeline.utils.exec_shielded`) lets it through.
"""

import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pipeline.errors import RollcallError

STACKS = signal.SIGURG
VARIABLE = "ROLLCALL_HEARTBEAT"
TICK_SECONDS = 0.5
_RECORD = struct.Struct("<qQQd64s")


@dataclass(frozen=True)
class Heartbeat:
    """What one process told last.

    Attributes:
        pid: its id; 0 until it has told anything.
        ticks, beats: counters; only that they change means something.
        seconds: how long the work may go on without a beat, where it declared that; else 0.
        doing: what it declared; else empty.
    """

    pid: int
    ticks: int
    beats: int
    seconds: float
    doing: str


class HeartbeatBoard:
    """The agent's side: the records of a role's processes, and the stacks that they write."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._records, self._stacks = os.memfd_create("heartbeat"), os.memfd_create("stacks")
        os.ftruncate(self._records, max(1, processes) * _RECORD.size)

    @property
    def environment(self) -> dict[str, str]:
        """What the role's processes need in their environment to find it."""
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._records} /proc/{os.getpid()}/fd/{self._stacks}"}

    def read(self) -> list[Heartbeat]:
        """What each process told last. A record that is read while it is written may mix two: it changes again."""
        data = os.pread(self._records, self._processes * _RECORD.size, 0)
        return [
            Heartbeat(pid, ticks, beats, seconds, doing.rstrip(b"\0").decode(errors="replace"))
            for pid, ticks, beats, seconds, doing in _RECORD.iter_unpack(data)
        ]

    def take_stacks(self) -> str:
        """What processes wrote since the last `drop_stacks`."""
        return os.pread(self._stacks, os.fstat(self._stacks).st_size, 0).decode(errors="replace")

    def drop_stacks(self) -> None:
        os.ftruncate(self._stacks, 0)

    def close(self) -> None:
        """Give the memory back; processes that are still there tell nobody."""
        os.close(self._records)
        os.close(self._stacks)


class _Heart:
    """A process's side: its own record, and a thread that ticks."""

    def __init__(self, board: Path, stacks: Path, slot: int) -> None:
        with board.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._offset, self._pid = slot * _RECORD.size, os.getpid()
        self._ticks, self._beats = 0, 0
        self.allowed: tuple[float, bytes] = 0.0, b""
        _write_stacks_to(stacks)
        threading.Thread(target=self._tick, name="heartbeat", daemon=True).start()

    def beat(self) -> None:
        self._beats += 1
        self._write()

    def _tick(self) -> None:
        while True:
            self._ticks += 1
            self._write()
            time.sleep(TICK_SECONDS)

    def _write(self) -> None:
        _RECORD.pack_into(self._memory, self._offset, self._pid, self._ticks, self._beats, *self.allowed)


_heart: _Heart | None = None
_stacks: list[IO[bytes]] = []
"""Open as long as the process lives."""


def start(slot: int = 0, variables: Mapping[str, str] = os.environ) -> None:
    """From now on this process tells its agent that it lives, as the role's process number `slot` on this node.

    Does nothing without an agent; `RollcallError` for one that cannot be reached.
    """
    global _heart
    if VARIABLE not in variables:
        return
    try:
        board, stacks = map(Path, variables[VARIABLE].split())
        _heart = _Heart(board, stacks, slot)
    except (OSError, ValueError) as error:
        raise RollcallError(f"{VARIABLE}={variables[VARIABLE]}: expected my agent's memory; {error}") from error
    os.register_at_fork(after_in_child=_forget)


def show_stacks(variables: Mapping[str, str] = os.environ) -> None:
    """From now on this process, and what it forks, writes its stacks when its agent asks, and tells nothing else.

    For a program that is not ours (vLLM). Does nothing without an agent, or where its memory cannot be reached.
    """
    if VARIABLE in variables:
        with suppress(OSError, ValueError):
            _write_stacks_to(Path(variables[VARIABLE].split()[1]))


def _write_stacks_to(memory: Path) -> None:
    file = memory.open("ab", buffering=0)
    _stacks.append(file)
    faulthandler.register(STACKS, file, all_threads=True)


def beat() -> None:
    """The work goes on. From any thread."""
    if _heart is not None:
        _heart.beat()


@contextmanager
def busy_with(doing: str, seconds: float) -> Iterator[None]:
    """In this block the work may go on for `seconds` without a beat. Only in the thread that does the work."""
    heart = _heart
    if heart is None:
        yield
        return
    before, heart.allowed = heart.allowed, (seconds, doing.encode())
    heart.beat()
    try:
        yield
    finally:
        heart.allowed = before
        heart.beat()


def _forget() -> None:
    """A fork is not the process that the agent listens to."""
    global _heart
    _heart = None
