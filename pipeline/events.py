"""What happened in an attempt, told once.

Owns the events that end or turn an attempt: `training_finished`, `failed`, `draining`. Each is a file created
exclusively in the attempt's folder, so the first teller wins, every rank can read it when Redis is the thing that died,
and it outlives the job. Promises that an event is never taken back and never inferred from counts. Traffic with a rate
(groups, versions, heartbeats) goes through `pipeline.streams`, not here.
"""

import time
from typing import Literal

import msgspec

from pipeline import files
from pipeline.paths import AttemptPaths

EventName = Literal["training_finished", "draining", "failed"]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened: its name, who told it, when (seconds since the epoch), and one line of detail."""

    name: EventName
    by: str
    time: float
    detail: str = ""


class Events:
    """The events of one attempt."""

    def __init__(self, paths: AttemptPaths) -> None:
        self._folder = paths.events

    def publish(self, name: EventName, by: str, detail: str = "") -> bool:
        """Tell an event; True if this call was the first to tell it."""
        event = Event(name=name, by=by, time=time.time(), detail=detail)
        return files.create_document(self._folder / f"{name}.json", event)

    def seen(self, name: EventName) -> Event | None:
        """The event, once it was told."""
        return files.read_document(self._folder / f"{name}.json", Event)
