"""What happened in an attempt, told once.

Owns the events that end or turn an attempt: `training_finished`, `failed`, `draining`. They are told into slots,
`events/1.json`, `events/2.json`, …, each created exclusively: so the filesystem's server says which came first, and no
machine's clock is asked. Every rank can read them when Redis is the thing that died, and they outlive the job. Promises
that an event is never taken back and never inferred from counts. Traffic with a rate (groups, versions, heartbeats)
goes through `pipeline.transport`, not here.
"""

import time
from collections.abc import Mapping
from typing import Literal

import msgspec

from pipeline.run.paths import EVENTS, AttemptPaths
from pipeline.utils.fs_retry import FS_OUTAGE_TIMEOUT
from pipeline.utils.shared_dir import FileSharedDir, SharedDir
from pipeline.utils.waiting import CLOCK, Clock

EventName = Literal["training_finished", "draining", "failed"]
LAUNCHER = "launcher"
"""Who tells an event that the launcher of a local run tells."""

MAX_POLLS_PER_SECOND = 500
"""Of all ranks together, on one file server, while nothing happens."""
_LEAST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened: its name, who told it, when (seconds since the epoch), and one line of detail.

    Attributes:
        patient: of `draining`: whether the trainer may take as long as its step and its checkpoint need, instead of
            `cluster.grace_seconds`.
    """

    name: EventName
    by: str
    time: float
    detail: str = ""
    patient: bool = False

    @property
    def why(self) -> str:
        """The detail, and who told it where the detail does not say so."""
        if not self.detail:
            return self.by
        return self.detail if self.by == LAUNCHER else f"{self.detail} ({self.by})"


class Events:
    """The events of one attempt. `OSError` where the disk fails; `EventPoller` bears that."""

    def __init__(self, paths: AttemptPaths, attempt: SharedDir | None = None) -> None:
        """`attempt` is the directory at `paths.root`, by default as the filesystem shows it."""
        self._attempt = attempt or FileSharedDir(paths.root)
        self._slots: dict[int, Event] = {}

    def publish(self, name: EventName, by: str, detail: str = "", *, patient: bool = False) -> bool:
        """Tell an event; True if this call was the first to tell it.

        A slot that is taken and cannot be read yet is passed over. So two may both take themselves for the first; then
        readers hold to the lower slot.
        """
        event = Event(name=name, by=by, time=time.time(), detail=detail, patient=patient)
        self.read_all()
        slot = 1
        while name not in _by_name(self._slots):
            if slot not in self._slots and self._attempt.create(_slot(slot), event):
                self._slots[slot] = event
                return True
            self._read(slot)
            slot += 1
        return False

    def read_all(self) -> Mapping[EventName, Event]:
        """What was told so far and is to be seen here, in the order in which it was told. Lists the folder once."""
        for name in self._attempt.names(EVENTS):
            number = name.removesuffix(".json")
            if number.isdecimal():
                self._read(int(number))
        return _by_name(self._slots)

    def get(self, name: EventName) -> Event | None:
        """The event, once it was told."""
        return self.read_all().get(name)

    def _read(self, slot: int) -> None:
        if slot not in self._slots:
            event = self._attempt.read(_slot(slot), Event)
            if event is not None:
                self._slots[slot] = event


class EventPoller:
    """Hears what ends the attempt, for a process that lives in it.

    It looks at the disk at most every `poll_interval`, whoever asks how often; and it bears a disk that fails. One that
    fails for `FS_OUTAGE_TIMEOUT` is itself heard, as `draining`: while memory still holds the models, the trainer
    commits to whatever store it has, and what comes after it finds another node, or another day.
    """

    def __init__(self, events: Events, ranks: int, clock: Clock = CLOCK) -> None:
        self._events, self._pause, self._clock = events, poll_interval(ranks), clock
        self._heard: Mapping[EventName, Event] = {}
        self._due = self._answered = clock.now()
        self._outage: Event | None = None

    @property
    def outage(self) -> str:
        """Why the disk is taken for one that does not come back; empty while it is not."""
        return self._outage.detail if self._outage else ""

    def poll(self, at_once: bool = False) -> Mapping[EventName, Event]:
        """What was told, in that order, as of the last look; `at_once` looks now."""
        now = self._clock.now()
        if at_once or now >= self._due:
            self._due = now + self._pause
            self._look()
        return self._heard

    def _look(self) -> None:
        try:
            self._heard, self._answered = self._events.read_all(), self._clock.now()
        except OSError as error:
            silent = self._clock.now() - self._answered
            if silent >= FS_OUTAGE_TIMEOUT and "draining" not in self._heard:
                why = f"the run directory could not be read for {silent:.0f} s: {error.strerror or error}"
                self._outage = Event(name="draining", by="the disk", time=time.time(), detail=why)
        if self._outage:
            self._heard = {"draining": self._outage, **self._heard}


def poll_interval(ranks: int) -> float:
    """Seconds between two looks of a process that lives in an attempt of so many ranks: of each agent, and of the
    trainer's controller. All together they never exceed what a file server bears besides its other work."""
    return min(max(_LEAST_PAUSE, (ranks + 1) / MAX_POLLS_PER_SECOND), _LONGEST_PAUSE)


def _by_name(slots: Mapping[int, Event]) -> dict[EventName, Event]:
    """The events in the order of their slots, each as it was told first."""
    found: dict[EventName, Event] = {}
    for slot in sorted(slots):
        found.setdefault(slots[slot].name, slots[slot])
    return found


def _slot(number: int) -> str:
    return f"{EVENTS}/{number}.json"
