"""Streams in files of the run directory, for runs without a Redis node.

Owns the contents of a topic's folder and the exchanges with it:

    streams/<topic>/000000001.log          entries, see `topic_segments`
    streams/<topic>/cursor.000000001.json  the reader's progress, see `topic_cursors`
    streams/<topic>/rejected/<id>.json     a rejected entry
    streams/state/<attempt>/<key>          a value

A topic has one writer and one reader, on any machines that share the filesystem. The last to open a topic owns it, and
its predecessor is refused. Promises that an entry is on disk when `publish` returns; that segments whose entries are
all acknowledged are deleted; and that reads, values and a reader's state tolerate a filesystem that fails for a while.
A waiting reader polls with growing pauses, so an entry arrives some milliseconds late (on NFS up to the seconds of its
attribute cache). Errors of the filesystem are raised as `StreamError`.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import quote, unquote

from msgspec import structs

from pipeline.errors import DeadlineError, RecordError, StreamError
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.transport import topic_cursors, topic_segments
from pipeline.transport.record_wire import R, Substitute, decode_or_substitute, no_substitute
from pipeline.transport.rejections import Rejected, Rejections
from pipeline.transport.streams import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    Acknowledging,
    Depth,
    Entry,
    Reader,
    Streams,
)
from pipeline.transport.topic_cursors import Cursor, CursorFile
from pipeline.transport.topic_segments import Frame, SegmentPosition, SegmentWriter, frame_bytes
from pipeline.utils import shared_files
from pipeline.utils.fs_retry import FINAL_WRITE_TIMEOUT, retry_transient
from pipeline.utils.waiting import wait_for

T = TypeVar("T")

_SEGMENTS_PER_BUDGET = 8
_MIN_SEGMENT = 1 << 16


class FileStreams(Streams):
    """The streams of an attempt below its run directory. `budget` counts entries with their 8 bytes of framing."""

    def __init__(self, paths: AttemptPaths, budget: int) -> None:
        self._root = RunPaths(paths.run).streams
        self._values = self._root / "state" / paths.attempt
        self._budget = budget
        self._lock, self._putting = threading.Lock(), threading.Lock()
        self._writers: dict[str, SegmentWriter] = {}
        self._room: dict[str, int] = {}

    @property
    def budget(self) -> int:
        return self._budget

    def try_append(self, topic: str, payloads: Sequence[bytes], acknowledging: Acknowledging | None) -> int:
        with self._lock, translated(topic):
            writer = self._writer(topic)
            fitting = _patiently(topic, lambda: self._fitting(topic, payloads))
            if fitting:
                writer.append(fitting)
                self._room[topic] -= sum(map(frame_bytes, fitting))
        # The records are safe first: a crash in between only delivers their input again.
        if acknowledging and len(fitting) == len(payloads):
            reader, ids = acknowledging
            reader.acknowledge(ids)
        return len(fitting)

    def reader(
        self, topic: str, kind: type[R], name: str, substitute: Substitute[R] = no_substitute
    ) -> "FileReader[R]":
        with translated(topic):
            return FileReader(self._folder(topic), topic, kind, name, substitute)

    def scan(self, topic: str, kind: type[R]) -> Iterator[Entry[R]]:
        with translated(topic):
            for frame in self._held(topic):
                try:
                    yield _entry(frame, kind)
                except RecordError:
                    continue

    def rejected(self, topic: str) -> list[Rejected]:
        with translated(topic):
            rejections = (shared_files.read_document(path, Rejected) for path in _rejections(self._folder(topic)))
            return [rejected for rejected in rejections if rejected is not None]

    def depth(self, topic: str) -> Depth:
        with translated(topic):
            return _patiently(topic, lambda: self._depth(topic))

    def put(self, key: str, value: bytes) -> None:
        path, sealed = self._values / quote(key, safe=""), shared_files.seal(value)
        with self._putting, translated(key):  # one at a time, so that an earlier value never overwrites a later one
            _patiently(key, lambda: shared_files.write_atomic(path, sealed))

    def remove(self, key: str) -> None:
        path = self._values / quote(key, safe="")
        with self._putting, translated(key):
            _patiently(key, lambda: path.unlink(missing_ok=True))

    def get(self, key: str) -> bytes | None:
        with translated(key):
            return _patiently(key, lambda: _value(self._values / quote(key, safe="")))

    def get_all(self, prefix: str) -> Mapping[str, bytes]:
        with translated(prefix):
            return _patiently(prefix, lambda: self._get_all(prefix))

    def close(self) -> None:
        with self._lock:
            for writer in self._writers.values():
                writer.close()
            self._writers.clear()

    def _depth(self, topic: str) -> Depth:
        folder = self._folder(topic)
        read = topic_cursors.newest_cursor(folder).read
        held = [(frame.start, len(frame.data)) for frame in self._held(topic)]
        unread = sum(size for start, size in held if start >= read)
        return Depth(len(held), sum(size for _, size in held), unread, len(_rejections(folder)))

    def _get_all(self, prefix: str) -> Mapping[str, bytes]:
        names = (path for path in sorted(self._values.glob("[!.]*")) if unquote(path.name).startswith(prefix))
        values = {unquote(path.name): _value(path) for path in names}
        return {key: value for key, value in values.items() if value is not None}

    def _folder(self, topic: str) -> Path:
        return self._root / topic

    def _writer(self, topic: str) -> SegmentWriter:
        if topic not in self._writers:
            size = max(self._budget // _SEGMENTS_PER_BUDGET, _MIN_SEGMENT)
            self._writers[topic] = SegmentWriter(self._folder(topic), size)
            self._room[topic] = 0
        return self._writers[topic]

    def _fitting(self, topic: str, payloads: Sequence[bytes]) -> Sequence[bytes]:
        """The longest prefix of `payloads` that fits; a topic without unread bytes accepts at least one payload."""
        ends = list(accumulate(map(frame_bytes, payloads)))
        # The cached room is a lower bound, since readers only free space: measure again only when it is used up.
        if not ends or ends[-1] <= self._room[topic]:
            return payloads
        folder = self._folder(topic)
        cursor = topic_cursors.newest_cursor(folder)
        # File sizes suffice unless acknowledged entries lie between unacknowledged ones.
        if cursor.acked_out_of_order:
            held = sum(frame_bytes(frame.data) for frame in self._held(topic))
        else:
            held = topic_segments.size_after(folder, cursor.low_watermark)
        self._room[topic] = room = self._budget - held
        fitting = payloads[: sum(1 for _ in takewhile(lambda end: end <= room, ends))]
        return fitting or payloads[: int(topic_segments.size_after(folder, cursor.read) == 0)]

    def _held(self, topic: str) -> Iterator[Frame]:
        cursor = topic_cursors.newest_cursor(self._folder(topic))
        acknowledged = set(cursor.acked_out_of_order)
        return (
            frame
            for frame in topic_segments.walk(self._folder(topic), cursor.low_watermark)
            if frame.start not in acknowledged
        )


class FileReader(Reader[R], Generic[R]):
    """The reader of one topic; made by `FileStreams.reader`."""

    def __init__(self, folder: Path, topic: str, kind: type[R], name: str, substitute: Substitute[R]) -> None:
        self.topic, self._rejections = topic, Rejections(topic)
        self._folder, self._kind, self._substitute = folder, kind, substitute
        self._file = CursorFile(folder, name)
        self._at = self._low_watermark = self._file.cursor.low_watermark
        self._acknowledged = set(self._file.cursor.acked_out_of_order)
        self._delivered: dict[SegmentPosition, SegmentPosition] = {}
        self._state = threading.Lock()

    def read(self, limit: int, seconds: float) -> list[Entry[R]]:
        awaited = f"an entry in {self.topic!r}"
        try:
            return wait_for(
                awaited, lambda: self._take(limit) or None, seconds, pause=FIRST_PAUSE, longest_pause=LONGEST_PAUSE
            )
        except DeadlineError:
            return []

    def acknowledge(self, ids: Iterable[str]) -> None:
        positions = [_position(id) for id in ids]
        with self._state, translated(self.topic):
            self._acknowledged.update(position for position in positions if position >= self._low_watermark)
            _patiently(self.topic, self._save)

    def _take(self, limit: int) -> list[Entry[R]]:
        with self._state, translated(self.topic):
            while True:
                take = partial(topic_segments.take_entries, self._folder, self._at, limit)
                taken, self._at = _patiently(self.topic, take)
                entries = [entry for frame in taken for entry in self._accept(frame)]
                _patiently(self.topic, self._save)
                if entries or not taken:
                    return entries

    def _accept(self, frame: Frame) -> list[Entry[R]]:
        """The frame's entry, as a list. The list is empty if the entry is acknowledged already, or is no record of
        this topic and was therefore rejected."""
        self._delivered[frame.start] = frame.end
        if frame.start in self._acknowledged:
            return []
        try:
            return [_entry(frame, self._kind, self._substitute)]
        except RecordError as error:
            rejected = structs.replace(self._rejections.note(frame.data, str(error)), id=_id(frame))
            path = self._folder / "rejected" / f"{rejected.id}.json"
            _patiently(self.topic, lambda: shared_files.write_document(path, rejected))
            self._acknowledged.add(frame.start)
            return []

    def _save(self) -> None:
        """Advance the low watermark over consecutive acknowledged entries, save the cursor, delete segments behind it.

        Safe to repeat after a failure half way.
        """
        while self._delivered and (first := next(iter(self._delivered))) in self._acknowledged:
            self._acknowledged.discard(first)
            self._low_watermark = self._delivered.pop(first)
        # All delivered entries are acknowledged: skip to the read position, perhaps in a newer segment.
        if not self._delivered:
            self._low_watermark = self._at
        old = self._file.cursor
        beyond = tuple(sorted(self._acknowledged))
        read = max(old.read, self._at)
        self._file.save(
            Cursor(reader=old.reader, low_watermark=self._low_watermark, read=read, acked_out_of_order=beyond)
        )
        for number in topic_segments.segments(self._folder)[:-1]:
            if number < self._low_watermark.segment:
                topic_segments.segment_path(self._folder, number).unlink(missing_ok=True)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn an error of the filesystem into a `StreamError` that names the topic or key."""
    try:
        yield
    except OSError as error:
        raise StreamError(f"stream files of {what!r}: {error}") from error


def _patiently(what: str, act: Callable[[], T]) -> T:
    """The result of `act`, which is retried while the filesystem fails."""
    return retry_transient(f"the stream files of {what!r}", act, FINAL_WRITE_TIMEOUT)


def _value(path: Path) -> bytes | None:
    try:
        return shared_files.unseal(path.read_bytes())
    except FileNotFoundError:
        return None


def _rejections(folder: Path) -> list[Path]:
    return sorted((folder / "rejected").glob("[!.]*"), key=lambda path: _position(path.stem))


def _id(frame: Frame) -> str:
    return f"{frame.start.segment}-{frame.start.offset}"


def _position(id: str) -> SegmentPosition:
    try:
        segment, offset = map(int, id.split("-"))
    except ValueError:
        raise StreamError(f"{id!r} is no entry id of a file stream") from None
    return SegmentPosition(segment, offset)


def _entry(frame: Frame, kind: type[R], substitute: Substitute[R] = no_substitute) -> Entry[R]:
    return Entry(_id(frame), decode_or_substitute(frame.data, kind, substitute), len(frame.data))
