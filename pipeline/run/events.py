"""The events of an attempt, each published once.

Owns the events that end or change an attempt: `training_finished`, `failed`, `draining`. They are published into slots,
`events/1.json`, `events/2.json`, …, each created exclusively, so the filesystem's server decides the order without any
machine's clock. Every rank can read them even if Redis has crashed, and they outlive the job. Promises that an event is
never withdrawn and never inferred from counts. Traffic with a rate (groups, versions, heartbeats) uses
`pipeline.transport` instead.
"""

import time
from collections.abc import Mapping
from typing import Literal

import msgspec

from pipeline.run.paths import EVENTS, AttemptPaths
from pipeline.run.poll_rates import ReadSchedule
from pipeline.utils.fs_retry import FS_OUTAGE_TIMEOUT
from pipeline.utils.shared_dir import FileSharedDir, SharedDir
from pipeline.utils.waiting import CLOCK, Clock

EventName = Literal["training_finished", "draining", "failed"]
LAUNCHER = "launcher"
"""The publisher of an event that the launcher of a local run publishes."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event: its name, its publisher, its time (seconds since the epoch), and one line of detail.

    Attributes:
        patient: for `draining`: whether the trainer may take as long as its step and its checkpoint need, instead of
            `cluster.grace_seconds`.
    """

    name: EventName
    by: str
    time: float
    detail: str = ""
    patient: bool = False

    @property
    def why(self) -> str:
        """The detail, with the publisher unless that is the launcher; the publisher alone if there is no detail."""
        if not self.detail:
            return self.by
        return self.detail if self.by == LAUNCHER else f"{self.detail} ({self.by})"


class Events:
    """The events of one attempt. `OSError` where the disk fails; `EventPoller` tolerates that."""

    def __init__(self, paths: AttemptPaths, attempt: SharedDir | None = None) -> None:
        """`attempt` is the directory at `paths.root`, by default as the filesystem shows it."""
        self._attempt = attempt or FileSharedDir(paths.root)
        self._slots: dict[int, Event] = {}

    def publish(self, name: EventName, by: str, detail: str = "", *, patient: bool = False) -> bool:
        """Publish an event; True if this call was the first to publish it.

        A slot that is taken but not yet readable is skipped. So two callers may both get True; readers then use the
        lower slot.
        """
        event = Event(name=name, by=by, time=time.time(), detail=detail, patient=patient)
        self.read_all()
        slot = 1
        while name not in _by_name(self._slots):
            # Exclusive creation: exactly one process gets the slot, and slots are numbered in order of time.
            if slot not in self._slots and self._attempt.create(_slot(slot), event):
                self._slots[slot] = event
                return True
            self._read(slot)
            slot += 1
        return False

    def read_all(self) -> Mapping[EventName, Event]:
        """The events that are visible here, in the order of publication. Lists the folder once."""
        for name in self._attempt.names(EVENTS):
            number = name.removesuffix(".json")
            if number.isdecimal():
                self._read(int(number))
        return _by_name(self._slots)

    def get(self, name: EventName) -> Event | None:
        """The event, or None before its publication."""
        return self.read_all().get(name)

    def _read(self, slot: int) -> None:
        if slot not in self._slots:
            event = self._attempt.read(_slot(slot), Event)
            if event is not None:
                self._slots[slot] = event


class EventPoller:
    """Polls for events that end the attempt, on behalf of one process.

    It reads the disk only when its schedule is due, however often it is called, and tolerates a failing disk. After
    `FS_OUTAGE_TIMEOUT` of failures it reports `draining` itself: while the models are still in memory, the trainer then
    saves a checkpoint to its store, and the next attempt runs on another node or at another time.
    """

    def __init__(self, events: Events, ranks: int, clock: Clock = CLOCK, schedule: ReadSchedule | None = None) -> None:
        """`schedule` is that of an attempt with `ranks` ranks by default."""
        self._events, self._schedule, self._clock = events, schedule or ReadSchedule(ranks, clock), clock
        self._events_read: Mapping[EventName, Event] = {}
        self._answered = clock.now()
        self._outage: Event | None = None

    @property
    def outage(self) -> str:
        """The reason why the disk is considered lost; empty while it is not."""
        return self._outage.detail if self._outage else ""

    def poll(self, at_once: bool = False) -> Mapping[EventName, Event]:
        """The events as of the last read, in order of publication; `at_once` reads now."""
        if at_once or self._schedule.is_due():
            self._schedule.begin()
            self._read()
        return self._events_read

    def _read(self) -> None:
        try:
            self._events_read, self._answered = self._events.read_all(), self._clock.now()
            self._schedule.finish(len(self._events_read))
        except OSError as error:
            silent = self._clock.now() - self._answered
            if silent >= FS_OUTAGE_TIMEOUT and "draining" not in self._events_read:
                why = f"the run directory could not be read for {silent:.0f} s: {error.strerror or error}"
                self._outage = Event(name="draining", by="the disk", time=time.time(), detail=why)
        # A reported outage stays even if the disk recovers, since the trainer may already be ending.
        if self._outage:
            self._events_read = {"draining": self._outage, **self._events_read}


def _by_name(slots: Mapping[int, Event]) -> dict[EventName, Event]:
    """The events in the order of their slots; of each name only the first."""
    events: dict[EventName, Event] = {}
    for slot in sorted(slots):
        events.setdefault(slots[slot].name, slots[slot])
    return events


def _slot(number: int) -> str:
    return f"{EVENTS}/{number}.json"
