"""An agent's heartbeat file and the exit markers on disk.

Owns `attempts/<attempt>/alive/<rank>`, which the agent touches every few seconds while its process runs, and the folder
`down/`, which has a marker for each role that is down and `agent.<rank>` for each agent that has exited. Promises that
a temporary failure of the file system ends neither the agent nor the touches, and that one listing of the folder serves
all waits for markers. A rank without an agent and without its marker is lost: a signal or its node's crash ended the
agent. The agent of the rank before observes it (`neighbor_watch`).
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from types import TracebackType

from pipeline.run.paths import ALL_EXITED, DOWN, AttemptPaths, down_mark
from pipeline.run.poll_rates import TOUCH_SECONDS, listing_interval
from pipeline.topology.plan import Placement
from pipeline.utils.fs_retry import FINAL_WRITE_TIMEOUT, retry_transient
from pipeline.utils.shared_dir import SharedDir
from pipeline.utils.waiting import CLOCK, Clock
from slurm.agent.loss_rule import LATE_SECONDS, LATE_TOUCHES

FRESH_TOUCHES = 3
"""Touches that may fail before an agent does not count as alive for those that ask it."""
_WAKE_SECONDS = 0.5


class HeartbeatFile:
    """Touches the heartbeat file of a rank every `seconds` while the block runs, and when questions of its monitor stay
    away: its link may be lost, and then the file alone shows that this agent runs."""

    def __init__(self, paths: AttemptPaths, rank: int, seconds: float = TOUCH_SECONDS, clock: Clock = CLOCK) -> None:
        self._file, self._seconds, self._clock = paths.sign_of_life(rank), seconds, clock
        self._touched = self._tried = self._asked = float("-inf")
        self._late_touches = LATE_TOUCHES
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="alive", daemon=True)

    def __enter__(self) -> "HeartbeatFile":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(timeout=1.0)  # a touch may hang on a dead file system

    def is_fresh(self) -> bool:
        """Whether the file was touched lately: the agent runs, and reaches the shared file system."""
        return self._clock.now() - self._touched < FRESH_TOUCHES * self._seconds

    def vouch(self) -> bool:
        """Answer a question of this rank's monitor: `is_fresh`. Its next question is expected within `LATE_SECONDS`."""
        self._asked, self._late_touches = self._clock.now(), 0
        return self.is_fresh()

    def touch(self) -> None:
        """Touch the file now. If the disk fails, the neighbor observes a late heartbeat."""
        self._tried = self._clock.now()
        try:
            self._touch()
        except OSError:
            return
        self._touched = self._clock.now()

    def touch_if_due(self) -> None:
        """Touch the file if `seconds` have passed, or if a question is late."""
        now = self._clock.now()
        late = self._late_touches < LATE_TOUCHES and now - self._asked >= LATE_SECONDS * (1 + self._late_touches)
        self._late_touches += late
        if late or now - self._tried >= self._seconds:
            self.touch()

    def _live(self) -> None:
        while True:
            self.touch_if_due()
            if self._over.wait(min(self._seconds, _WAKE_SECONDS)):
                return

    def _touch(self) -> None:
        try:
            self._file.touch()
        except FileNotFoundError:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()


class ExitMarkers:
    """The roles and agents that are down, from the last listing of the markers' folder."""

    def __init__(self, attempt: SharedDir, pause: float, clock: Clock = CLOCK) -> None:
        """Lists the folder at most every `pause` seconds, and only within a query."""
        self._attempt, self._pause, self._clock = attempt, pause, clock
        self._names: frozenset[str] = frozenset()
        self._due = float("-inf")

    def is_down(self, placement: Placement) -> bool:
        """Whether a role is down, or its agent has exited, which implies the same. False while the disk fails."""
        if self._is_due():
            self._list()
        return self._has_marker(placement)

    def are_down(self, placements: Sequence[Placement]) -> bool:
        """Whether all of these roles are down, as `is_down`.

        While one is not, this asks for its marker only: in a large run the folder has thousands of names, and every
        agent waits for some of them.
        """
        missing = next((placement for placement in placements if not self._has_marker(placement)), None)
        if missing is None or not self._is_due() or not self._appeared(missing):
            return missing is None
        self._list()
        return all(map(self._has_marker, placements))

    def _has_marker(self, placement: Placement) -> bool:
        return not self._names.isdisjoint(_markers(placement))

    def _is_due(self) -> bool:
        if self._clock.now() < self._due:
            return False
        self._due = self._clock.now() + self._pause
        return True

    def _appeared(self, placement: Placement) -> bool:
        try:
            return any(self._attempt.has(down_mark(name)) for name in _markers(placement))
        except OSError:
            return False  # a late marker only delays the shutdown

    def _list(self) -> None:
        try:
            self._names = frozenset(self._attempt.names(DOWN))
        except OSError:
            return  # as above


class OtherAgents:
    """The agents of an attempt that have not exited, as one agent observes them that waits for the last one.

    Listing thousands of markers by thousands of agents would be quadratic. So each agent lists them rarely, at another
    time than the others, and the first that finds all of them creates one file, for which the others look.
    """

    def __init__(self, attempt: SharedDir, ranks: int, clock: Clock = CLOCK) -> None:
        self._attempt, self._ranks, self._clock = attempt, ranks, clock
        self._pause = listing_interval(ranks)
        self._due = clock.now() + Random().uniform(0.0, self._pause)

    def have_exited(self) -> bool:
        """Whether the markers of all agents are visible to an agent; False while the disk fails."""
        with suppress(OSError):
            if self._attempt.has(ALL_EXITED):
                return True
            if self._clock.now() >= self._due:
                self._due = self._clock.now() + self._pause
                return self._list()
        return False

    def _list(self) -> bool:
        if unexited_ranks(self._attempt, self._ranks):
            return False
        with suppress(OSError):  # the others then list the markers themselves
            self._attempt.create(ALL_EXITED, True)
        return True


def _markers(placement: Placement) -> tuple[str, str]:
    """The markers that say that a role is down: its own, and that of its agent."""
    return placement.name, agent_name(placement.rank)


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
    marks = frozenset(attempt.names(DOWN))
    return tuple(rank for rank in range(ranks) if agent_name(rank) not in marks)
