"""An agent's heartbeat file and the exit markers on disk.

Owns `attempts/<attempt>/alive/<rank>`, which the agent touches every few seconds while its process runs, and the folder
`down/`, which has a marker for each role that is down and `agent.<rank>` for each agent that has exited. Promises that
a temporary failure of the file system ends neither the agent nor the touches, and that one listing of the folder serves
all waits for markers. A rank without an agent and without its marker is lost: a signal or its node's crash ended the
agent. A stopped agent (SIGSTOP) does not exit, so each agent monitors the heartbeat of the next rank (`NeighborWatch`).
"""

import os
import threading
from collections.abc import Callable
from types import TracebackType

from pipeline.run.paths import DOWN, AttemptPaths, down_mark
from pipeline.topology.plan import Placement
from pipeline.utils.fs_retry import FINAL_WRITE_TIMEOUT, retry_transient
from pipeline.utils.shared_dir import SharedDir
from pipeline.utils.waiting import CLOCK, Clock
from slurm.agent.liveness import StallTimer

TOUCH_SECONDS = 5.0


class HeartbeatFile:
    """Touches the heartbeat file of a rank while the block runs."""

    def __init__(self, paths: AttemptPaths, rank: int, seconds: float = TOUCH_SECONDS) -> None:
        self._file, self._seconds = paths.sign_of_life(rank), seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="alive", daemon=True)

    def __enter__(self) -> "HeartbeatFile":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(timeout=1.0)  # a touch may hang on a dead file system

    def _live(self) -> None:
        while True:
            self._touch()
            if self._over.wait(self._seconds):
                return

    def _touch(self) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()
        except OSError:
            return  # the neighbor then observes a late heartbeat


class NeighborWatch:
    """Monitors the agent of the next rank while the block runs; the last rank monitors the first.

    In this ring each agent has one monitor, for any number of ranks. If several agents are stopped, at least one of
    them has a monitor that runs. `seconds` must include the visibility delay of NFS.
    """

    def __init__(
        self, paths: AttemptPaths, rank: int, ranks: int, seconds: float, report: Callable[[int, str], bool]
    ) -> None:
        """`report` is called with the rank and the cause when its heartbeat has not changed for `seconds`. It returns
        whether the attempt continues without that rank; then its next rank is monitored."""
        self._paths, self._rank, self._ranks, self._seconds = paths, rank, ranks, seconds
        self.neighbor = NeighborCheck(paths, (rank + 1) % ranks, seconds)
        self._report, self._over = report, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="neighbor", daemon=True) if ranks > 1 else None

    def __enter__(self) -> "NeighborWatch":
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if self._thread:
            self._thread.join(timeout=1.0)  # a poll may hang on a dead file system

    def _watch(self) -> None:
        while not self._over.wait(TOUCH_SECONDS):
            if lost := self.neighbor.look():
                following = (self.neighbor.rank + 1) % self._ranks
                if not self._report(self.neighbor.rank, lost) or following == self._rank:
                    return
                self.neighbor = NeighborCheck(self._paths, following, self._seconds)


class NeighborCheck:
    """The heartbeat of one rank, observed by another rank."""

    def __init__(self, paths: AttemptPaths, rank: int, seconds: float, clock: Clock = CLOCK) -> None:
        self.rank = rank
        self._file, self._seconds = paths.sign_of_life(rank), seconds
        self._silence = StallTimer(clock, 2 * TOUCH_SECONDS)

    def look(self) -> str:
        """Why the rank counts as lost; empty while its heartbeat changes, and if the disk fails on this rank."""
        try:
            with self._file.open("rb") as file:  # opening makes an NFS client fetch the time from its server
                sign = os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            sign = 0
        except OSError:
            return ""
        silent = self._silence.look(sign)
        cause = f"no sign of life for {silent:.0f} s: its agent is stopped (SIGSTOP), or its node or its disk is away"
        return cause if silent > self._seconds else ""


class ExitMarkers:
    """The roles and agents that are down, from the last listing of the markers' folder."""

    def __init__(self, attempt: SharedDir, pause: float, clock: Clock = CLOCK) -> None:
        """Lists the folder at most every `pause` seconds, and only within a query."""
        self._attempt, self._pause, self._clock = attempt, pause, clock
        self._names: frozenset[str] = frozenset()
        self._due = float("-inf")

    def is_down(self, placement: Placement) -> bool:
        """Whether a role is down, or its agent has exited, which implies the same. False while the disk fails."""
        self._look()
        return not self._names.isdisjoint((placement.name, agent_name(placement.rank)))

    def _look(self) -> None:
        if self._clock.now() < self._due:
            return
        self._due = self._clock.now() + self._pause
        try:
            self._names = frozenset(self._attempt.names(DOWN))
        except OSError:
            return  # a late marker only delays the shutdown


def agent_name(rank: int) -> str:
    """The name of a rank's agent in events and markers, as `trainer.0` is that of a role."""
    return f"agent.{rank}"


def mark_down(attempt: SharedDir, rank: int, clock: Clock = CLOCK) -> None:
    """Write the marker that this rank's agent and all its processes are down. A disk failure is only printed."""
    try:
        retry_transient(
            "the exit marker", lambda: attempt.replace(down_mark(agent_name(rank)), "left"), FINAL_WRITE_TIMEOUT, clock
        )
    except OSError as error:
        print(f"rollcall: agent {rank} could not write its exit marker: {error}", flush=True)


def unexited_ranks(attempt: SharedDir, ranks: int) -> tuple[int, ...]:
    """The ranks below `ranks` without an exit marker, in order. They include the ranks of running agents."""
    attempt.names()  # this machine may have cached the absence of the markers' folder
    marks = attempt.names(DOWN)
    return tuple(rank for rank in range(ranks) if agent_name(rank) not in marks)
