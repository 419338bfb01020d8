"""What was written lately, in memory.

Owns a few bytes in addition to the store, so that a read soon after a write needs no disk: a read there waits
for the flush that is under way. Promises never to hold more than its room; what does not fit is read from the store.
Pure.
"""

from collections import OrderedDict


class ByteLru:
    """Texts by their names, at most `room` bytes; the oldest leave first."""

    def __init__(self, room: int) -> None:
        self._room, self._held = room, 0
        self._texts: OrderedDict[str, bytes] = OrderedDict()

    def put(self, name: str, text: bytes) -> None:
        self.drop(name)
        self._texts[name] = text
        self._held += len(text)
        while self._held > self._room:
            self._held -= len(self._texts.popitem(last=False)[1])

    def get(self, name: str) -> bytes | None:
        return self._texts.get(name)

    def drop(self, name: str) -> None:
        self._held -= len(self._texts.pop(name, b""))
