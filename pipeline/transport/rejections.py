"""The entries of a topic that are no records of its reader's kind.

Owns what becomes of them. A group whose position can still be read is delivered as a malformed one, so that it is
sampled again. Any other entry is rejected, which is logged. Must not know a backend.
"""

import logging
from typing import Annotated

import msgspec

from pipeline.transport.record_wire import decode_fields
from pipeline.transport.sample_records import MALFORMED, Group, PreparedGroup
from pipeline.utils.waiting import CLOCK, Clock

log = logging.getLogger(__name__)

REJECTED_BYTES = 4096
"""Bytes of a rejected entry that are retained: enough to recognize it."""
REPORT_SECONDS = 60.0
"""Least time between two lines in the log about one topic."""


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A rejected entry: its id, the reason, and its first `REJECTED_BYTES`."""

    id: str
    reason: str
    data: bytes


def lost_group(data: bytes, reason: str) -> PreparedGroup | None:
    """The group in bytes that cannot be decoded, as malformed for `reason`; None if its position cannot be read.

    The `Substitute` of the readers of groups.
    """
    head = decode_fields(data, _Head)
    group = None if head is None else head.group or head
    if group is None or group.position is None or group.prompt is None:
        return None
    return PreparedGroup(group=Group(position=group.position, prompt=group.prompt), outcome=f"{MALFORMED}: {reason}")


class Rejections:
    """The rejections of one reader: logs the first, then at most one line a minute."""

    def __init__(self, topic: str, clock: Clock = CLOCK) -> None:
        self._topic, self._clock = topic, clock
        self._count = 0
        self._reported = float("-inf")

    def note(self, data: bytes, reason: str) -> Rejected:
        """Report the entry `data`; returns what is retained of it, with an empty id."""
        self._count += 1
        if (now := self._clock.now()) - self._reported >= REPORT_SECONDS:
            self._reported = now
            log.warning("topic %r: %d entries rejected, the last: %s", self._topic, self._count, reason)
        return Rejected(id="", reason=reason, data=data[:REJECTED_BYTES])


class _Head(msgspec.Struct):
    """The fields that name a group, of a `Group` or of the one in a `PreparedGroup`; the others are not decoded."""

    position: Annotated[int, msgspec.Meta(ge=0)] | None = None
    prompt: Annotated[int, msgspec.Meta(ge=0)] | None = None
    group: "_Head | None" = None
