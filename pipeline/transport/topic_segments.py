"""Append-only files of entries: a topic on a shared filesystem.

Owns the framing (length, CRC-32, bytes), the numbering of segments, and the rules that make reading safe during
writing:

- A segment is written only by the process that created it, exclusively, and never after a failed write. A process that
  opens a topic for writing starts a new segment, so nothing is ever appended after a torn entry.
- A segment ends for good when its successor exists: readers then skip a torn tail, and anything that a writer of an
  earlier attempt still appends.
- A reader looks for a successor before it reads the segment to its end, so that it misses no entry.

Knows nothing of records, readers or budgets.
"""

import logging
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import StreamError
from pipeline.utils import atomic_dirs

HEADER = struct.Struct("<II")

log = logging.getLogger(__name__)


class SegmentPosition(NamedTuple):
    """A position in a topic: segment number and byte offset. Ordered as the entries are."""

    segment: int
    offset: int


class Frame(NamedTuple):
    """An entry in its segment; `end` is the position of the next entry."""

    start: SegmentPosition
    data: bytes

    @property
    def end(self) -> SegmentPosition:
        return SegmentPosition(self.start.segment, self.start.offset + HEADER.size + len(self.data))


def frame_bytes(payload: bytes) -> int:
    """The size of an entry of `payload` in its segment, in bytes."""
    return HEADER.size + len(payload)


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:09d}.log"


def segments(folder: Path) -> list[int]:
    """Numbers of the existing segments, oldest first."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"(\d{9})\.log", name)))


def frames(folder: Path, start: SegmentPosition) -> Iterator[Frame]:
    """The complete entries of one segment from `start` on; stops at its end or at an incomplete entry.

    Opens the file for each call, because NFS shows the growth of a file only to processes that open it.
    """
    try:
        file = segment_path(folder, start.segment).open("rb", buffering=1 << 18)
    except FileNotFoundError:
        return
    with file:
        file.seek(start.offset)
        while len(header := file.read(HEADER.size)) == HEADER.size:
            length, checksum = HEADER.unpack(header)
            data = file.read(length)
            if len(data) < length or zlib.crc32(data) != checksum:
                return
            frame = Frame(start, data)
            yield frame
            start = frame.end


def walk(folder: Path, start: SegmentPosition) -> Iterator[Frame]:
    """The complete entries of all current segments from `start` on."""
    for number in segments(folder):
        if number >= start.segment:
            yield from frames(folder, start if number == start.segment else SegmentPosition(number, 0))


def take_entries(folder: Path, start: SegmentPosition, limit: int) -> tuple[list[Frame], SegmentPosition]:
    """Up to `limit` entries from `start` on, and the position after them; continues into later segments."""
    taken: list[Frame] = []
    while len(taken) < limit:
        # Look for the successor first: if there is one, this segment no longer grows and can be read to its end.
        successor = next((number for number in segments(folder) if number > start.segment), None)
        for frame in frames(folder, start):
            taken.append(frame)
            start = frame.end
            if len(taken) == limit:
                return taken, start
        if successor is None:
            break
        # The segment has a successor, so its rest is final: skip a torn tail.
        _log_torn_tail(folder, start)
        start = SegmentPosition(successor, 0)
    return taken, start


def size_after(folder: Path, start: SegmentPosition) -> int:
    """Bytes in the segments from `start` on, torn tails included."""
    total = 0
    for number in segments(folder):
        if number >= start.segment:
            size = _size(segment_path(folder, number))
            total += max(0, size - start.offset) if number == start.segment else size
    return total


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _log_torn_tail(folder: Path, end: SegmentPosition) -> None:
    path = segment_path(folder, end.segment)
    if (torn := _size(path) - end.offset) > 0:
        log.warning("%s: its last %d bytes are no complete entry; its writer was stopped there", path, torn)


class SegmentWriter:
    """Appends entries to a topic; creates a segment when it is opened, when one is full, and after a failed write.

    The last process to open the topic is its writer: an earlier one gets a `StreamError` at its next append.
    """

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self._folder, self._segment_bytes = folder, segment_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._number, self._written = 0, 0
        self._file = -1
        self._open_next()

    @property
    def number(self) -> int:
        """The number of the current segment."""
        return self._number

    def append(self, payloads: Sequence[bytes]) -> None:
        """Write the entries; on return they are on disk. After an `OSError` none or some of them are written."""
        if segments(self._folder)[-1:] != [self._number]:
            raise StreamError(f"another process writes {self._folder} now; this one belongs to an earlier attempt")
        if self._file < 0 or self._written >= self._segment_bytes:
            self._open_next()
        try:
            self._write(b"".join(HEADER.pack(len(data), zlib.crc32(data)) + data for data in payloads))
            os.fdatasync(self._file)
        except OSError:
            self.close()  # never write after an entry that may be torn

            raise

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            written = os.write(self._file, left)
            self._written += written
            left = left[written:]

    def _open_next(self) -> None:
        self.close()
        number = max(segments(self._folder), default=0) + 1
        while True:
            try:
                # O_EXCL: two processes that open the topic at once get different segments.
                self._file = os.open(segment_path(self._folder, number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                break
            except FileExistsError:
                number += 1
        self._number, self._written = number, 0
        # The name of the file must be durable before its entries count as safe.
        atomic_dirs.flush(self._folder)
