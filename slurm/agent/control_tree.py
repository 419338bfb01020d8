"""The tree of a run's agents, in which hints of new files travel from the lowest rank to all.

Owns which agent follows which, and an agent's record of changes in the attempt's directories. A hint is the number of
documents that exist: events, and revisions of the world. An agent that has read fewer reads the directory; the files
alone decide what happened. Promises that a lost link, an agent that stopped reading, or a wrong number can only change
when the directory is read. One use is more than that: after the hint of an event, an agent that left counts as part of
the end, and not as lost (`agent`). Must not know sockets (`control_link`).

    rank 0 reads the directory ten times a second
      ├── rank 1 … rank 16        ask rank 0: "more than 0 events?"; the answer comes with the next event, or after 5 s
      │     └── rank 17 … 32      ask rank 1
      …

A rank asks the nearest ancestor that answers. Without any it reads the directory as often as `poll_interval` allows,
and its own followers get its hints: a part of the tree that is cut off stays a tree.
"""

import threading
from random import Random
from typing import Literal

import msgspec

from pipeline.run.poll_rates import ROOT_SECONDS, ReadSchedule, linked_poll_interval, poll_interval
from pipeline.utils.waiting import CLOCK, Clock

FANOUT = 16
"""Ranks that follow one rank: three links from rank 0 to any of 4,096."""
STALE_SECONDS = 10.0
"""Seconds after which an agent that has neither read the directory nor a link gives no hints."""

ChangeKind = Literal["events", "revisions"]


class ChangeCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The number of documents of each kind. It never falls."""

    events: int = 0
    revisions: int = 0

    def of(self, kind: ChangeKind) -> int:
        return self.events if kind == "events" else self.revisions

    def exceeds(self, other: "ChangeCounts") -> bool:
        """Whether there are more documents of any kind than in `other`."""
        return self.events > other.events or self.revisions > other.revisions

    def join(self, other: "ChangeCounts") -> "ChangeCounts":
        """The larger number of each kind."""
        events, revisions = max(self.events, other.events), max(self.revisions, other.revisions)
        return ChangeCounts(events=events, revisions=revisions)


def ancestors(rank: int) -> tuple[int, ...]:
    """The ranks that a rank may follow, the nearest first; all are lower, so links have no cycle.

    >>> ancestors(300)
    (18, 1, 0)
    """
    above: list[int] = []
    while rank > 0:
        rank = (rank - 1) // FANOUT
        above.append(rank)
    return tuple(above)


class ChangeBoard:
    """One agent's record of changes: those that it has read, and those that its ancestor reports. Thread-safe."""

    def __init__(self, rank: int, ranks: int, clock: Clock = CLOCK) -> None:
        self.rank, self.ranks = rank, ranks
        self._clock, self._changed = clock, threading.Condition()
        self._read, self._reported = ChangeCounts(), ChangeCounts()
        self._read_at, self._linked, self._links_lost = clock.now(), False, 0
        # All agents read at a hint. By intervals of different lengths they do not read together ever after.
        self._fraction = Random(rank).uniform(0.5, 1.0)

    @property
    def is_linked(self) -> bool:
        """Whether an ancestor gives hints."""
        return self._linked

    @property
    def known(self) -> ChangeCounts:
        """The documents that exist, as far as this agent knows."""
        return self._read.join(self._reported)

    def note_read(self, kind: ChangeKind, count: int) -> None:
        """Record a successful read of this agent, which found `count` documents."""
        with self._changed:
            counts = ChangeCounts(events=count) if kind == "events" else ChangeCounts(revisions=count)
            self._read, self._read_at = self._read.join(counts), self._clock.now()
            self._changed.notify_all()

    def note_report(self, counts: ChangeCounts) -> None:
        """Record the answer of an ancestor, which is linked now."""
        with self._changed:
            self._reported, self._linked = self._reported.join(counts), True
            self._changed.notify_all()

    def note_hint(self, counts: ChangeCounts) -> None:
        """Record the counts of an agent that is not followed: it may see documents which are not visible here yet."""
        with self._changed:
            self._reported = self._reported.join(counts)
            self._changed.notify_all()

    def note_link_lost(self) -> None:
        """Record that no ancestor is linked: a hint may have been lost, so every kind is read now."""
        with self._changed:
            self._links_lost += self._linked
            self._linked = False
            self._changed.notify_all()

    def wait_for_more(self, seen: ChangeCounts, seconds: float) -> ChangeCounts | None:
        """The known counts, once they exceed `seen` or after `seconds`; None if this agent has stopped to learn of
        changes, such as in a read that hangs."""
        with self._changed:
            self._changed.wait_for(lambda: self.known.exceeds(seen), seconds)
            is_current = self._linked or self._clock.now() - self._read_at < STALE_SECONDS
            return self.known if is_current else None

    def signal(self, kind: ChangeKind) -> tuple[int, int]:
        """A value that changes when documents of this kind should be read at once."""
        return self._reported.of(kind), self._links_lost

    def interval(self, kind: ChangeKind) -> float:
        """Seconds between two reads of a kind, as things are."""
        if self.rank == 0:
            return ROOT_SECONDS
        if self._linked and self._read.of(kind) >= self._reported.of(kind):
            return linked_poll_interval(self.ranks) * self._fraction
        # Also with a link, while a reported file is not visible here yet.
        return poll_interval(self.ranks)


class LinkedSchedule(ReadSchedule):
    """The reads of one kind by an agent of the tree: at once after a hint or a lost link, else rarely."""

    def __init__(self, board: ChangeBoard, kind: ChangeKind, clock: Clock = CLOCK, min_seconds: float = 0.0) -> None:
        super().__init__(board.ranks, clock)
        self._board, self._kind, self._min_seconds = board, kind, min_seconds
        self._signal = board.signal(kind)

    def is_due(self) -> bool:
        return self._signal != self._board.signal(self._kind) or super().is_due()

    def begin(self) -> None:
        # Before the read: a hint that arrives during it causes another one.
        self._signal = self._board.signal(self._kind)
        super().begin()

    def finish(self, count: int) -> None:
        self._board.note_read(self._kind, count)

    def _interval(self) -> float:
        return max(self._board.interval(self._kind), self._min_seconds)
