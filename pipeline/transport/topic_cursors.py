"""The progress of a file topic's reader, stored next to the topic.

Owns the cursor documents and the right to write them. Each opening of the reader creates a new document that replaces
the one before: the reader opened last owns the topic, and an earlier one (a zombie) is refused at its next save. The
check and the save are two steps; a zombie between them writes only its old document, which is no longer read.
"""

import re
from pathlib import Path

import msgspec

from pipeline.errors import StreamError
from pipeline.transport.topic_segments import SegmentPosition
from pipeline.utils import shared_files

_ORIGIN = SegmentPosition(0, 0)


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a reader.

    Attributes:
        reader: its name.
        low_watermark: every entry before it is acknowledged; a reopened reader starts here.
        read: every entry before it was delivered to some reader.
        acked_out_of_order: acknowledged entries at or after `low_watermark`, in any order.
    """

    reader: str = ""
    low_watermark: SegmentPosition = _ORIGIN
    read: SegmentPosition = _ORIGIN
    acked_out_of_order: tuple[SegmentPosition, ...] = ()


def newest_cursor(folder: Path) -> Cursor:
    """The state of the topic's reader; an empty one when it was never opened."""
    for number in reversed(_numbers(folder)):
        cursor = shared_files.read_document(_path(folder, number), Cursor)
        if cursor is not None:
            return cursor
    return Cursor()


class CursorFile:
    """The cursor document of one opening of a reader."""

    def __init__(self, folder: Path, name: str) -> None:
        """Take over the topic; `StreamError` when its reader has another name."""
        self._folder = folder
        newest = newest_cursor(folder)
        if newest.reader not in ("", name):
            raise StreamError(f"{folder} is read by {newest.reader!r}; a second reader {name!r} would lose entries")
        self.cursor = msgspec.structs.replace(newest, reader=name)
        self._number = max(_numbers(folder), default=0) + 1
        if not shared_files.create_document(_path(folder, self._number), self.cursor):
            raise StreamError(f"two processes open the reader of {folder} at once")
        for number in _numbers(folder):
            if number < self._number - 1:
                _path(folder, number).unlink(missing_ok=True)

    def save(self, cursor: Cursor) -> None:
        """Replace the state durably; `StreamError` when another process has opened the reader."""
        if cursor == self.cursor:
            return
        if _numbers(self._folder)[-1:] != [self._number]:
            raise StreamError(f"another process reads {self._folder} now; this one belongs to an earlier attempt")
        shared_files.write_document(_path(self._folder, self._number), cursor)
        self.cursor = cursor


def _path(folder: Path, number: int) -> Path:
    return folder / f"cursor.{number:09d}.json"


def _numbers(folder: Path) -> list[int]:
    names = (re.fullmatch(r"cursor\.(\d{9})\.json", path.name) for path in folder.glob("cursor.*.json"))
    return sorted(int(match[1]) for match in names if match)
