"""The entries of a topic that its reader rejected, since they are no records of its kind.

Owns what is reported of them: a line in the log, and the position whose group is lost with an entry, so that the
reader's role can have it sampled again. Must not know a backend.
"""

import logging
from collections import deque
from typing import Annotated

import msgspec

from pipeline.transport.record_wire import decode_fields
from pipeline.utils.waiting import CLOCK, Clock

log = logging.getLogger(__name__)

REJECTED_BYTES = 4096
"""Bytes of a rejected entry that are retained: enough to recognize it."""
REPORT_SECONDS = 60.0
"""Least time between two lines in the log about one topic."""
MAX_LOST = 1024
"""Lost groups that wait to be taken; roles whose topics have no groups never take any."""


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A rejected entry: its id, the reason, and its first `REJECTED_BYTES`."""

    id: str
    reason: str
    data: bytes


class LostGroup(msgspec.Struct, frozen=True):
    """A group in a rejected entry whose position could still be read."""

    position: int
    prompt: int
    reason: str


class Rejections:
    """The rejections of one reader: logs the first, then at most one line a minute."""

    def __init__(self, topic: str, clock: Clock = CLOCK) -> None:
        self._topic, self._clock = topic, clock
        self._count = 0
        self._reported = float("-inf")
        self._lost: deque[LostGroup] = deque(maxlen=MAX_LOST)

    def note(self, data: bytes, reason: str) -> Rejected:
        """Report the entry `data`; returns what is retained of it, with an empty id."""
        self._count += 1
        if (now := self._clock.now()) - self._reported >= REPORT_SECONDS:
            self._reported = now
            log.warning("topic %r: %d entries rejected, the last: %s", self._topic, self._count, reason)
        head = decode_fields(data, _Head)
        group = None if head is None else head.group or head
        if group is not None and group.position is not None and group.prompt is not None:
            self._lost.append(LostGroup(group.position, group.prompt, reason))
        return Rejected(id="", reason=reason, data=data[:REJECTED_BYTES])

    def take(self) -> list[LostGroup]:
        """The groups that were lost since the last call."""
        return [self._lost.popleft() for _ in range(len(self._lost))]


class _Head(msgspec.Struct):
    """The fields that name a group, of a `Group` or of the one in a `PreparedGroup`; the others are not decoded."""

    position: Annotated[int, msgspec.Meta(ge=0)] | None = None
    prompt: Annotated[int, msgspec.Meta(ge=0)] | None = None
    group: "_Head | None" = None
