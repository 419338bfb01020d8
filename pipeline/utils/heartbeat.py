"""Heartbeats that the processes of a role write for their node's agent.

Agent and processes share memory with one record per process. A record has two counters: ticks of a thread (the process
runs at all) and beats (`beat`, called by the work where it progresses). Work that may take long declares with
`busy_with` what it does and for how many seconds it may lack a beat. Writing takes microseconds, never blocks and
touches no filesystem: the memory is a memfd of the agent, reached through /proc. Without an agent, all calls do
nothing. The agent alone decides when a missing beat is a hang.

    heartbeat.start()                                          # first in the process
    with heartbeat.busy_with("waiting for an order", 1800):       # at most 1800 s without a beat
        ...
    for batch in micro_batches:
        heartbeat.beat()

On the signal `STACKS`, a process also writes the stacks of its Python threads into the agent's memory. The handler is C
code and works while the interpreter is stuck. The signal is ignored by processes without a handler, sent by no
scheduler, and not blocked by the shield of roles (`pipeline.utils.exec_shielded`).
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
EXITS = "ROLLCALL_EXITS"
"""Set in a run with injected faults, in which external programs obey the agent's requests to exit too."""
TICK_SECONDS = 0.5
_RECORD = struct.Struct("<qQQd64s")
_REQUEST = struct.Struct("<q")
"""Behind the records: 0, or one above the code with which the agent wants the processes to exit."""


@dataclass(frozen=True)
class Heartbeat:
    """The last record of one process.

    Attributes:
        pid: the process's id; 0 before its first record.
        ticks, beats: counters. Only a change is meaningful, not the value.
        seconds: the declared time that the work may take without a beat; 0 if it declared none.
        doing: the declared activity; empty if there is none.
    """

    pid: int
    ticks: int
    beats: int
    seconds: float
    doing: str


class HeartbeatBoard:
    """The agent's side: the shared memory of a role's processes, with their records and stacks."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._records, self._stacks = os.memfd_create("heartbeat"), os.memfd_create("stacks")
        os.ftruncate(self._records, max(1, processes) * _RECORD.size + _REQUEST.size)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables by which the role's processes find the memory."""
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._records} /proc/{os.getpid()}/fd/{self._stacks}"}

    def read(self) -> list[Heartbeat]:
        """The last record of each process. A read during a write may mix two records; the next read is consistent."""
        data = os.pread(self._records, self._processes * _RECORD.size, 0)
        return [
            Heartbeat(pid, ticks, beats, seconds, doing.rstrip(b"\0").decode(errors="replace"))
            for pid, ticks, beats, seconds, doing in _RECORD.iter_unpack(data)
        ]

    def request_exit(self, code: int) -> None:
        """Have each process exit with `code` at its next tick, wherever its work is: an injected fault."""
        os.pwrite(self._records, _REQUEST.pack(code + 1), max(1, self._processes) * _RECORD.size)

    def take_stacks(self) -> str:
        """The stacks that processes have written since the last `drop_stacks`."""
        return os.pread(self._stacks, os.fstat(self._stacks).st_size, 0).decode(errors="replace")

    def drop_stacks(self) -> None:
        os.ftruncate(self._stacks, 0)

    def close(self) -> None:
        """Release the memory. Processes that still run write into their own mapping, which is not read any more."""
        os.close(self._records)
        os.close(self._stacks)


class _Heart:
    """A process's side: its record in the shared memory, and a thread that ticks."""

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
            _obey(self._memory)
            time.sleep(TICK_SECONDS)

    def _write(self) -> None:
        _RECORD.pack_into(self._memory, self._offset, self._pid, self._ticks, self._beats, *self.allowed)


_heart: _Heart | None = None
_stacks: list[IO[bytes]] = []
"""Files of the stack handlers, open until the process ends."""


def start(slot: int = 0, variables: Mapping[str, str] = os.environ) -> None:
    """Start this process's heartbeat, as the role's process number `slot` on this node.

    Does nothing without an agent. `RollcallError` if the agent's memory cannot be opened.
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
    """Register the stack handler alone, without heartbeats, in this process and its forks.

    For external programs (vLLM). Does nothing without an agent, or if the agent's memory cannot be opened.
    """
    if VARIABLE in variables:
        with suppress(OSError, ValueError):
            _write_stacks_to(Path(variables[VARIABLE].split()[1]))


def obey_exits(variables: Mapping[str, str] = os.environ) -> None:
    """Have this process exit when the agent requests it: for an external program, in a run with injected faults."""

    def tick() -> None:
        while True:
            exit_if_requested(variables)
            time.sleep(TICK_SECONDS)

    if EXITS in variables:
        threading.Thread(target=tick, name="exits", daemon=True).start()


def exit_if_requested(variables: Mapping[str, str] = os.environ) -> None:
    """Exit if the agent has requested it, in a run with injected faults."""
    if EXITS in variables and VARIABLE in variables:
        with suppress(OSError):
            _obey(Path(variables[VARIABLE].split()[0]).read_bytes())


def _obey(memory: bytes | mmap.mmap) -> None:
    (request,) = _REQUEST.unpack_from(memory, len(memory) - _REQUEST.size)
    if request:
        os._exit(request - 1)


def _write_stacks_to(memory: Path) -> None:
    file = memory.open("ab", buffering=0)
    _stacks.append(file)
    faulthandler.register(STACKS, file, all_threads=True)


def beat() -> None:
    """Report progress of the work. Callable from any thread."""
    if _heart is not None:
        _heart.beat()


@contextmanager
def busy_with(doing: str, seconds: float) -> Iterator[None]:
    """Allow the work `seconds` without a beat in this block. Only for the thread that does the work."""
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
    """Drop the heartbeat in a forked process: the record belongs to its parent."""
    global _heart
    _heart = None
