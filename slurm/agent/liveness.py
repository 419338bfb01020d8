"""Whether a role is there, and whether it still lives.

Owns who is asked or listened to, and from when on a silence is a hang. Promises that a question which hangs, or raises,
holds up only its own thread; that a silence is judged by this agent's clock alone, from a counter that does not change;
and that time in which this agent itself did not run (a suspended job, a stopped machine) counts for nobody's silence.
Must not know what a role does, nor what becomes of one that hangs.

A role that is ours tells heartbeats, one process each (`pipeline.utils.heartbeat`); two silences count:

    its process does not tick         longer than `seconds`: it is stopped, gone, or its interpreter is stuck
    its work does not go on           longer than `seconds`, or than it declared where that is more

A role that is not ours (Redis, vLLM) is asked whether it is ready for as long as it lives: `seconds` without a yes.

While a process of the role waits inside the kernel for a disk (a file server that is away), its silence is no hang yet:
such time counts against `FS_OUTAGE_TIMEOUT` alone, as for everybody who meets a disk that fails.

A process that is stopped (SIGSTOP) is found earlier, since the kernel tells it, and before those that wait for it give
up: the first process of a role, which may be torchrun, those that tell heartbeats, and all of a role that is not ours.
"""

import os
import signal
import threading
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from pipeline.errors import one_line
from pipeline.roles import RoleCommand
from pipeline.utils import heartbeat
from pipeline.utils.fs_retry import FS_OUTAGE_TIMEOUT
from pipeline.utils.waiting import CLOCK, Clock, Deadline, exponential_pauses
from slurm.agent import os_processes

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 1.0
MAX_POLL_SECONDS = 1.0
"""Most seconds that one look adds to a silence: a look that comes later was delayed on this side."""
STOPPED_SECONDS = 10.0
"""For which a process may be stopped, or for half of a role's silence where that is less."""
STACKS_SECONDS = 2.0
"""How long all hung processes of a role have to write their stacks."""


class HealthProbe:
    """One question, asked again and again from `start` to `close`.

    Attributes:
        answers: how often the answer was yes.
        trouble: what the question raised last, in words; empty if it never did.
    """

    def __init__(self, ask: Callable[[], bool], name: str) -> None:
        self.success_count, self.last_error = 0, ""
        self._ask, self._closed = ask, threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"probe {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ask no more. A question under way is left to its own deadline."""
        self._closed.set()

    def _run(self) -> None:
        pauses = exponential_pauses(FIRST_PAUSE, LONGEST_PAUSE)
        while not self._closed.wait(LONGEST_PAUSE if self.success_count else next(pauses)):
            try:
                self.success_count += bool(self._ask())
            except Exception as error:  # noqa: BLE001 - the boundary of the thread: whoever waits for an answer tells it
                self.last_error = one_line(error)


class StallTimer:
    """For how long a sign has not changed: seconds of this clock in which somebody looked."""

    def __init__(self, clock: Clock, longest_look: float = MAX_POLL_SECONDS) -> None:
        self._clock, self._looked, self._seconds = clock, clock.now(), 0.0
        self._longest_look = longest_look
        self._last = self._excused = 0.0
        self._sign: Hashable = None

    def look(self, sign: Hashable) -> float:
        """The silence so far, if this is the sign now."""
        now = self._clock.now()
        if sign == self._sign:
            self._last = min(now - self._looked, self._longest_look)
            self._seconds += self._last
        else:
            self._last = self._seconds = self._excused = 0.0
        self._sign, self._looked = sign, now
        return self._seconds

    def lasts(self, allowed: float, waits_for_disk: Callable[[], bool]) -> bool:
        """Whether the silence is longer than `allowed`, apart from what of it was spent waiting for a disk.

        `waits_for_disk` is asked only in the second half: a role whose disk is back has the first half to say so.
        """
        if self._seconds > allowed / 2 and waits_for_disk():
            self._excused += self._last
        return self._seconds - self._excused > allowed or self._seconds > max(allowed, FS_OUTAGE_TIMEOUT)


@dataclass(frozen=True)
class Stall:
    """Who does not live any more.

    Attributes:
        cause: what was seen, in words.
        pid: the process that hangs; 0 if that is not known.
    """

    cause: str
    pid: int = 0


class LivenessMonitor:
    """Of one role on this rank: `start` with its process, `watch` from when it is ready, `close` when it is down."""

    def __init__(self, name: str, launch: RoleCommand, seconds: float, clock: Clock = CLOCK) -> None:
        self.probe, self.board = HealthProbe(launch.ready, name), heartbeat.HeartbeatBoard(launch.has_heartbeat)
        self._beats, self._seconds, self._clock = launch.has_heartbeat, seconds, clock
        self._runs: list[StallTimer] = []
        self._works: list[StallTimer] = []
        self._stopped: dict[int, StallTimer] = {}
        self._due = 0.0

    def watch(self, pid: int) -> Stall | None:
        """Whether the role, whose first process is `pid`, hangs. To be called about as often as once a second."""
        if not self._works:
            self._runs = [StallTimer(self._clock) for _ in range(self._beats)]
            self._works = [StallTimer(self._clock) for _ in range(max(1, self._beats))]
            if self._beats:
                self.probe.close()
        if self._clock.now() >= self._due:
            self._due = self._clock.now() + MAX_POLL_SECONDS
            if hang := self._find_stopped(pid):
                return hang
        return self._listen(pid) if self._beats else self._answered(pid)

    def _find_stopped(self, pid: int) -> Stall | None:
        """The process that has been stopped for longest, if that is too long."""
        stopped = [each for each in self._processes(pid) if os_processes.is_stopped(each)]
        self._stopped = {each: self._stopped.get(each) or StallTimer(self._clock) for each in stopped}
        seconds, longest = max(((self._stopped[each].look(True), each) for each in stopped), default=(0.0, 0))
        if seconds < min(STOPPED_SECONDS, self._seconds / 2):
            return None
        who = f"its process {longest} ({os_processes.name_of(longest)})"
        return Stall(f"hung: {who} has been stopped (SIGSTOP) for {seconds:.0f} s", longest)

    def _processes(self, leader: int) -> list[int]:
        """Those of the role that do its work. What ours start for code of others may stop itself."""
        if not self._beats:
            return [leader, *os_processes.descendants(leader)]
        told = (record.pid for record in self.board.read())
        return [leader, *(each for each in told if os_processes.parent_of(each) == leader)]

    def _answered(self, pid: int) -> Stall | None:
        silence = self._works[0].look(self.probe.success_count)
        if not self._works[0].lasts(self._seconds, lambda: _waits_for_disk(pid)):
            return None
        trouble = f"; {self.probe.last_error}" if self.probe.last_error else ""
        return Stall(f"hung: it has not answered for {silence:.0f} s{_state(pid)}{trouble}", pid)

    def _listen(self, leader: int) -> Stall | None:
        """The process that stands still comes before those that wait for it; then the longest silence counts."""
        found: list[tuple[bool, float, Stall]] = []
        for slot, record in enumerate(self.board.read()):
            runs = self._runs[slot].look((record.pid, record.ticks))
            works = self._works[slot].look((record.pid, record.beats))
            who = f"process {slot} (pid {record.pid})" if record.pid else f"process {slot}"
            if self._runs[slot].lasts(self._seconds, lambda: _waits_for_disk(leader)):
                cause = f"hung: its {who} has shown no sign of life for {runs:.0f} s{_state(record.pid)}"
                found.append((True, runs, Stall(cause, record.pid)))
            elif self._works[slot].lasts(max(self._seconds, record.seconds), lambda: _waits_for_disk(leader)):
                doing = f" in {record.doing!r}" if record.doing else ""
                cause = f"hung: its {who} makes no progress{doing} for {works:.0f} s{_state(record.pid)}"
                found.append((False, works, Stall(cause, record.pid)))
        return max(found, key=lambda one: one[:2])[2] if found else None

    def stacks(self, pid: int) -> dict[int, str]:
        """Where the role's processes are, by id; `pid` is the first one's.

        Those of Python that can write them tell their stacks; of the others (Redis, torchrun, a library's) the kernel
        tells where their threads wait. That is read first: to tell, a stopped process has to be continued.
        """
        deadline = Deadline("the stacks", STACKS_SECONDS)
        told = [record.pid for record in self.board.read()] if self._beats else os_processes.descendants(pid)
        those = list(dict.fromkeys([pid, *_descendants_of(pid, told)]))
        waits = {each: os_processes.threads_of(each) for each in those}
        return {each: self._stacks_of(each, deadline) or waits[each] for each in those}

    def close(self) -> None:
        """Ask and listen no more."""
        self.probe.close()
        self.board.close()

    def _stacks_of(self, pid: int, deadline: Deadline) -> str:
        """One process after the other, so that what they write does not mix; empty for one that cannot write."""
        if not os_processes.handles(pid, heartbeat.STACKS):
            return ""
        self.board.drop_stacks()
        with suppress(ProcessLookupError):
            os.kill(pid, heartbeat.STACKS)
            os.kill(pid, signal.SIGCONT)  # a stopped one writes before it does anything else, and is ended after it
        before, text = "", ""
        while not deadline.passed and (not text or text != before):
            CLOCK.sleep(0.05)
            before, text = text, self.board.take_stacks()
        return text


def _descendants_of(leader: int, pids: Iterable[int]) -> list[int]:
    """Those that are the leader or below it: an id that a process told may be somebody else's by now."""
    try:
        below = {child.pid for child in psutil.Process(leader).children(recursive=True)}
    except psutil.NoSuchProcess:
        return []
    return [pid for pid in pids if pid == leader or pid in below]


def _waits_for_disk(leader: int) -> bool:
    """Whether a thread of this process, or of one below it, is in uninterruptible sleep (state D)."""
    return any("D" in os_processes.states_of(pid) for pid in [leader, *os_processes.descendants(leader)])


def _state(pid: int) -> str:
    """What the kernel says of a process, where that explains a silence."""
    words = {psutil.STATUS_STOPPED: ", it is stopped (SIGSTOP)", psutil.STATUS_DISK_SLEEP: ", it waits for a disk"}
    try:
        return words.get(psutil.Process(pid).status(), "") if pid else ""
    except psutil.NoSuchProcess:
        return ", it is gone"
