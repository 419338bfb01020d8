"""Health checks and the watchdog of a role; which mechanism detects which loss.

A crash needs none of them: the kernel reports an exit to the parent at once, and ends a child whose parent is gone
(`pipeline.utils.subprocesses.exit_with_parent`). The others detect a process that exists and does nothing, or that no
parent on its node can report. T is `cluster.heartbeat_seconds`, V `cluster.fs_visibility_seconds`.

| what is lost | sign, and its observer | timeout | consequence |
|---|---|---|---|
| a role of this project | ticks and beats (`pipeline.utils.heartbeat`): its agent | T, or as declared | ends |
| a trainer's rank in an operation | the same, as `pipeline.train.controller` declares | 0.9 of torch's timeout | ends |
| a role of another project | its `ready` succeeds (`HealthProbe`): its agent | T | ends |
| a stopped role | the kernel's state (`StoppedProcesses`): its agent | 10 s or T / 2 | ends |
| a stopped agent of a local job | the same: `slurm.batch.local_controller` | 10 s | the attempt fails |
| an agent on another node | link, else its file (`neighbor_watch`): the rank before | below | replaced, or fails |
| an agent without an exit marker | `slurm.batch.attempt_summary`, after all agents | V | the attempt failed |
| a leader before the assignment | its lease (`slurm.rendezvous.election`): all ranks | the lease | next epoch |
| a server, for its clients | its answers (`pipeline.rollout.server_pool`) | that of a request | another server |
| a server, for weights | its answers (`pipeline.inference.weight_sync`) | `inference.update_seconds` | evicted |
| Redis, for its clients | its answers (`pipeline.transport.redis_streams`) | 120 s | the client fails |
| the gateway | its answers (`slurm.submission.gateway_supervisor`) | 60 s | restarted |
| a client of the gateway | its requests (`pipeline.tinker.heartbeats`) | `serve.silent_seconds` | its requests wait |

An agent on another node is lost a few seconds after its process ended or its node vanished (`loss_rule`). One that is
stopped, or whose disk is away, is lost after 120 s, or T if that is longer, plus V.

A lost agent's roles are taken over by a spare node where there is one (`node_takeover`); else the attempt fails. A
role that "ends" is killed with its stacks in its log; `slurm.agent.recovery_policy` decides whether it restarts or
the attempt fails. The signs differ since the observers do: an agent reads memory, another node a file, and a client
must act before any agent does. Agents, neighbors and the local controller measure stalls with `StallTimer`.

Owns the probed or observed signs of a role, and the timeouts after which it counts as hung. Promises that a probe which
hangs or raises blocks only its own thread; that a stall is measured by this agent's clock alone, from a counter that
does not change; and that time in which this agent did not run (a suspended job, a stopped machine) is not part of any
stall. Must not know the work of a role, nor the consequence of a hang.

A role of this project has one heartbeat per process (`pipeline.utils.heartbeat`). Two stalls count:

    no tick of the process            longer than `seconds`: it is stopped, gone, or its interpreter is stuck
    no progress of the work           longer than `seconds`, or than its declared duration if that is longer

A role of another project (Redis, vLLM) is probed while it runs, and hangs after `seconds` without a success.

While a process of the role waits inside the kernel for a disk (such as an absent file server), its stall is not a hang
yet: that time counts against `FS_OUTAGE_TIMEOUT` only, the limit for every process that meets a failed disk.

The kernel reports a stopped process (SIGSTOP), so it is detected earlier, before its peers time out. This check covers
the first process of a role, which may be torchrun, the processes with heartbeats, and all of another project's role.
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
"""Most seconds that one poll adds to a stall: a later poll was delayed on this side."""
STOPPED_SECONDS = 10.0
"""Seconds for which a process may be stopped, or half of a role's timeout if that is less."""
STACKS_SECONDS = 2.0
"""Seconds within which all hung processes of a role must write their stacks."""


class HealthProbe:
    """A readiness probe that repeats in its own thread from `start` to `close`.

    Attributes:
        success_count: the number of successful probes.
        last_error: the last error of a probe, in one line; empty if there was none.
    """

    def __init__(self, ask: Callable[[], bool], name: str) -> None:
        self.success_count, self.last_error = 0, ""
        self._ask, self._closed = ask, threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"probe {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop probing. A probe in progress ends by its own deadline."""
        self._closed.set()

    def _run(self) -> None:
        pauses = exponential_pauses(FIRST_PAUSE, LONGEST_PAUSE)
        while not self._closed.wait(LONGEST_PAUSE if self.success_count else next(pauses)):
            try:
                self.success_count += bool(self._ask())
            except Exception as error:  # noqa: BLE001 - the boundary of the thread; the supervisor reports the error
                self.last_error = one_line(error)


class StallTimer:
    """Seconds for which a sign has not changed, measured by this clock between polls."""

    def __init__(self, clock: Clock, longest_look: float = MAX_POLL_SECONDS) -> None:
        self._clock, self._looked, self._seconds = clock, clock.now(), 0.0
        self._longest_look = longest_look
        self._last = self._excused = 0.0
        self._sign: Hashable = None

    @property
    def seconds(self) -> float:
        """Seconds since the last change of the sign, as of the last look."""
        return self._seconds

    def look(self, sign: Hashable) -> float:
        """Record the current sign. Returns the seconds since its last change."""
        now = self._clock.now()
        if sign == self._sign:
            self._last = min(now - self._looked, self._longest_look)
            self._seconds += self._last
        else:
            self._last = self._seconds = self._excused = 0.0
        self._sign, self._looked = sign, now
        return self._seconds

    def lasts(self, allowed: float, waits_for_disk: Callable[[], bool]) -> bool:
        """Whether the stall is longer than `allowed`, without the time spent waiting for a disk.

        `waits_for_disk` is called only in the second half: a role whose disk is back has the first half to progress.
        """
        if self._seconds > allowed / 2 and waits_for_disk():
            self._excused += self._last
        return self._seconds - self._excused > allowed or self._seconds > max(allowed, FS_OUTAGE_TIMEOUT)


class StoppedProcesses:
    """How long processes have been stopped (SIGSTOP), by the kernel's state and this clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timers: dict[int, StallTimer] = {}

    def look(self, pids: Iterable[int]) -> dict[int, float]:
        """The seconds for which each of these processes has been stopped, without those that run."""
        stopped = filter(os_processes.is_stopped, pids)
        self._timers = {pid: self._timers.get(pid) or StallTimer(self._clock) for pid in stopped}
        return {pid: timer.look(True) for pid, timer in self._timers.items()}


@dataclass(frozen=True)
class Stall:
    """A hang of a role.

    Attributes:
        cause: the observation, in one line.
        pid: the process that hangs; 0 if unknown.
    """

    cause: str
    pid: int = 0


class LivenessMonitor:
    """Monitors one role of this rank: call `watch` once it is ready, `close` when it is down."""

    def __init__(self, name: str, launch: RoleCommand, seconds: float, clock: Clock = CLOCK) -> None:
        self.probe, self.board = HealthProbe(launch.ready, name), heartbeat.HeartbeatBoard(launch.has_heartbeat)
        self._beats, self._seconds, self._clock = launch.has_heartbeat, seconds, clock
        self._runs: list[StallTimer] = []
        self._works: list[StallTimer] = []
        self._stopped = StoppedProcesses(clock)
        self._due = 0.0

    def watch(self, pid: int) -> Stall | None:
        """The hang of the ready role whose first process is `pid`; None if it progresses. Call about once a second."""
        if not self._works:
            self._runs = [StallTimer(self._clock) for _ in range(self._beats)]
            self._works = [StallTimer(self._clock) for _ in range(max(1, self._beats))]
            if self._beats:
                self.probe.close()
        if hang := self.find_stopped(pid):
            return hang
        return self._check_heartbeats(pid) if self._beats else self._check_probe(pid)

    def find_stopped(self, pid: int) -> Stall | None:
        """A hang of the process that has been stopped for longest, if that is too long; also of a role that starts.

        Looks once in `MAX_POLL_SECONDS`, however often it is called.
        """
        if self._clock.now() < self._due:
            return None
        self._due = self._clock.now() + MAX_POLL_SECONDS
        stopped = self._stopped.look(self._processes(pid))
        seconds, longest = max(((seconds, process) for process, seconds in stopped.items()), default=(0.0, 0))
        if seconds < min(STOPPED_SECONDS, self._seconds / 2):
            return None
        who = f"{os_processes.name_of(longest)} (pid {longest})"
        return Stall(f"hung: its process {who} has been stopped (SIGSTOP) for {seconds:.0f} s", longest)

    def _processes(self, leader: int) -> list[int]:
        """The role's working processes. Our roles also start processes for user code, which may stop themselves."""
        if not self._beats:
            return [leader, *os_processes.descendants(leader)]
        recorded = (record.pid for record in self.board.read())
        return [leader, *(process for process in recorded if os_processes.is_below(process, leader))]

    def _check_probe(self, pid: int) -> Stall | None:
        stalled = self._works[0].look(self.probe.success_count)
        if not self._works[0].lasts(self._seconds, lambda: _waits_for_disk(pid)):
            return None
        trouble = f"; {self.probe.last_error}" if self.probe.last_error else ""
        return Stall(f"hung: it has not answered for {stalled:.0f} s{_state(pid)}{trouble}", pid)

    def _check_heartbeats(self, leader: int) -> Stall | None:
        """The hang with the likeliest cause: a process without ticks comes first, then the longest stall."""
        stalls: list[tuple[bool, float, Stall]] = []
        for slot, record in enumerate(self.board.read()):
            runs = self._runs[slot].look((record.pid, record.ticks))
            works = self._works[slot].look((record.pid, record.beats))
            who = f"process {slot} (pid {record.pid})" if record.pid else f"process {slot}"
            if self._runs[slot].lasts(self._seconds, lambda: _waits_for_disk(leader)):
                cause = f"hung: its {who} has shown no sign of life for {runs:.0f} s{_state(record.pid)}"
                stalls.append((True, runs, Stall(cause, record.pid)))
            elif self._works[slot].lasts(max(self._seconds, record.seconds), lambda: _waits_for_disk(leader)):
                doing = f" in {record.doing!r}" if record.doing else ""
                cause = f"hung: its {who} makes no progress{doing} for {works:.0f} s{_state(record.pid)}"
                stalls.append((False, works, Stall(cause, record.pid)))
        return max(stalls, key=lambda stall: stall[:2])[2] if stalls else None

    def last_signs(self) -> list[str]:
        """The age of each process's last sign of life, one line each, as of the last `watch`."""
        if not self._works:
            return [f"not watched yet; {self.probe.success_count} successful health checks"]
        if not self._beats:
            return [f"last answered {self._works[0].seconds:.0f} s ago"]
        return [
            f"process {slot} (pid {record.pid}): last tick {runs.seconds:.0f} s ago, last progress {works.seconds:.0f} "
            f"s ago{f', in {record.doing!r}' if record.doing else ''}"
            for slot, (record, runs, works) in enumerate(zip(self.board.read(), self._runs, self._works, strict=True))
        ]

    def worker_pids(self) -> list[int]:
        """The processes of the role with a heartbeat."""
        return [record.pid for record in self.board.read() if record.pid] if self._beats else []

    def stacks(self, pid: int) -> dict[int, str]:
        """The stacks of the role's processes, by process id; `pid` is the first process.

        Python processes with our handler write their stacks. For the others (Redis, torchrun, a library's processes),
        the kernel shows where their threads wait. The kernel's state is read first, since a stopped process must be
        continued to write its stacks.
        """
        deadline = Deadline("the stacks", STACKS_SECONDS)
        candidates = [record.pid for record in self.board.read()] if self._beats else os_processes.descendants(pid)
        processes = list(dict.fromkeys([pid, *_descendants_of(pid, candidates)]))
        waits = {process: os_processes.threads_of(process) for process in processes}
        return {process: self._stacks_of(process, deadline) or waits[process] for process in processes}

    def close(self) -> None:
        """Stop the probe and release the heartbeats."""
        self.probe.close()
        self.board.close()

    def _stacks_of(self, pid: int, deadline: Deadline) -> str:
        """The stacks that one process writes, or empty without our handler. Called for one process at a time."""
        if not os_processes.handles(pid, heartbeat.STACKS):
            return ""
        self.board.drop_stacks()
        with suppress(ProcessLookupError):
            os.kill(pid, heartbeat.STACKS)
            os.kill(pid, signal.SIGCONT)  # a stopped process writes first when continued, and is killed afterwards
        before, text = "", ""
        while not deadline.passed and (not text or text != before):
            CLOCK.sleep(0.05)
            before, text = text, self.board.take_stacks()
        return text


def _descendants_of(leader: int, pids: Iterable[int]) -> list[int]:
    """The pids that are the leader or its descendants: a recorded pid may belong to an unrelated process by now."""
    try:
        below = {child.pid for child in psutil.Process(leader).children(recursive=True)}
    except psutil.NoSuchProcess:
        return []
    return [pid for pid in pids if pid == leader or pid in below]


def _waits_for_disk(leader: int) -> bool:
    """Whether a thread of this process, or of one below it, is in uninterruptible sleep (state D)."""
    return any("D" in os_processes.states_of(pid) for pid in [leader, *os_processes.descendants(leader)])


def _state(pid: int) -> str:
    """The kernel's state of a process if it explains a stall, else an empty text."""
    words = {psutil.STATUS_STOPPED: ", it is stopped (SIGSTOP)", psutil.STATUS_DISK_SLEEP: ", it waits for a disk"}
    try:
        return words.get(psutil.Process(pid).status(), "") if pid else ""
    except psutil.NoSuchProcess:
        return ", it is gone"
