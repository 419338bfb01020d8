"""The journal of episodes in flight: what a lost actor had of them, for the next one.

Owns the files of the journal, `episodes/` of the run directory, and their size. Promises that samples never wait for
the disk: a background thread writes entries, and an entry that the disk refuses costs a warning and, if the actor is
lost, repeated work. The entries of a group are gone once it is dropped, which the actor does after its publication. All
entries together stay within `bound` bytes, the files within twice that and `SLACK_BYTES`; an entry beyond the bound is
not recorded. Must not know what an entry says (`pipeline.rollout.episode_record`).

Live entries are also in memory, encoded. When dropped entries take more than half of the files, the live ones are
written to a new segment, and earlier segments are removed. The actor that opened the journal last is its writer
(`pipeline.transport.topic_segments`), so a replaced actor that still runs adds nothing.

    with EpisodeJournal(run.episodes, bound) as journal:
        journal.retain(lambda position: position in missing)    # once, of the entries of earlier actors
        journal.entries(112)                                    # {(sample, number): event}
        journal.add(112, sample=3, number=0, event=b"…")
        journal.drop(112)
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from pipeline.errors import StreamError
from pipeline.transport.topic_segments import SegmentPosition, SegmentWriter, frames, segment_path, segments

log = logging.getLogger(__name__)

SLACK_BYTES = 1 << 22
"""Bytes of dropped entries that are not worth a new segment."""
CLOSE_SECONDS = 5.0
"""Timeout of the last write."""
GROUP, DROPPED = -1, -1
"""Sample of an entry that is of its whole group; number of an entry that drops all earlier ones of its sample."""


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One entry: the `number`th `event` of a sample of the group at `position`."""

    position: int
    sample: int
    number: int
    event: bytes = b""


_Key = tuple[int, int]
"""Sample and number."""
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Entry).decode


class EpisodeJournal:
    """The journal of a run; without `bound` it records nothing. Its methods are for the thread of the event loop."""

    def __init__(self, folder: Path, bound: int) -> None:
        self._folder, self._bound = folder, bound
        self._live: dict[int, dict[_Key, bytes]] = defaultdict(dict)
        self._live_bytes = self._file_bytes = 0
        self._unwritten: dict[tuple[int, int, int], bytes] = {}
        self._changed = threading.Condition()
        self._records, self._closing, self._is_incomplete = False, False, False
        self._warned = set[str]()
        self._thread = threading.Thread(target=self._write_all, name="episode journal", daemon=True)

    def __enter__(self) -> Self:
        """Become the journal's writer, and read what earlier ones left. A disk that fails disables the journal."""
        if not self._bound:
            return self
        try:
            self._writer = SegmentWriter(self._folder, segment_bytes=1 << 62)
            self._read()
            self._compact()
        except (OSError, StreamError) as error:
            log.warning("episodes in flight are not recorded in %s: %s", self._folder, error)
            return self
        self._records = True
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the remaining entries, for at most `CLOSE_SECONDS`."""
        if not self._records:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)

    @property
    def is_open(self) -> bool:
        """Whether entries are recorded."""
        return self._records

    @property
    def live_bytes(self) -> int:
        """The size of the entries of groups in flight."""
        return self._live_bytes

    def retain(self, is_in_flight: Callable[[int], bool]) -> None:
        """Drop all groups but those in flight."""
        for position in [position for position in self._live if not is_in_flight(position)]:
            self.drop(position)

    def entries(self, position: int) -> Mapping[_Key, bytes]:
        """The events of a group by sample and number, in the order of both."""
        live = self._live.get(position, {})
        return {key: _decode(live[key]).event for key in sorted(live)}

    def add(self, position: int, sample: int, number: int, event: bytes) -> None:
        """Record an event."""
        entry = _encode(Entry(position, sample, number, event))
        if not self._records:
            return
        if self._live_bytes + len(entry) > self._bound:
            self._warn("episodes in flight are recorded no further: their entries exceed rollout.journal_bytes")
            return
        with self._changed:
            self._put(position, sample, number, entry)
            self._unwritten[position, sample, number] = entry
            self._changed.notify()

    def drop(self, position: int, sample: int = GROUP) -> None:
        """Remove the entries of a group, or of one of its samples."""
        with self._changed:
            dropped = {
                (position, *key): entry
                for key, entry in self._live.get(position, {}).items()
                if sample in (GROUP, key[0])
            }
            if not dropped:
                return
            self._forget(position, sample)
            unwritten = [key for key in self._unwritten if key[0] == position and sample in (GROUP, key[1])]
            is_on_disk = dropped.keys() - unwritten or any(number == DROPPED for _, _, number in unwritten)
            for key in unwritten:
                del self._unwritten[key]
            if is_on_disk:
                self._unwritten[position, sample, DROPPED] = _encode(Entry(position, sample, DROPPED))
                self._changed.notify()

    def _put(self, position: int, sample: int, number: int, entry: bytes) -> None:
        # An entry may be read twice: a crash between the two steps of `_compact` leaves both segments.
        self._live_bytes += len(entry) - len(self._live[position].get((sample, number), b""))
        self._live[position][sample, number] = entry

    def _forget(self, position: int, sample: int) -> None:
        live = self._live.pop(position, {})
        others = {key: entry for key, entry in live.items() if sample not in (GROUP, key[0])}
        self._live_bytes -= sum(map(len, live.values())) - sum(map(len, others.values()))
        if others:
            self._live[position] = others

    def _read(self) -> None:
        for number in segments(self._folder):
            for frame in frames(self._folder, SegmentPosition(number, 0)):
                try:
                    entry = _decode(frame.data)
                except msgspec.DecodeError:
                    continue  # of another version of this code
                if entry.number == DROPPED:
                    self._forget(entry.position, entry.sample)
                else:
                    self._put(entry.position, entry.sample, entry.number, frame.data)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                # Ends with the actor: without entries there is nothing to write, however long.
                self._changed.wait_for(lambda: bool(self._unwritten) or self._closing)
                if not self._unwritten:
                    return
                entries = list(self._unwritten.values())
                self._unwritten.clear()
            try:
                self._write(entries)
            except StreamError as error:
                self._records = False
                log.warning("episodes in flight are no longer recorded: %s", error)
                return
            except OSError as error:
                self._is_incomplete = True
                self._warn(f"episodes in flight are not recorded while the disk fails: {error}")

    def _write(self, entries: list[bytes]) -> None:
        if not self._is_incomplete:
            self._writer.append(entries)
            self._file_bytes += sum(map(len, entries))
        if self._is_incomplete or self._file_bytes > 2 * self._live_bytes + SLACK_BYTES:
            self._compact()
            self._is_incomplete = False

    def _compact(self) -> None:
        """Write the live entries to a new segment, and remove earlier segments."""
        with self._changed:
            live = [entry for of_group in self._live.values() for entry in of_group.values()]
        self._writer.close()  # the next append opens a segment
        self._writer.append(live)
        self._file_bytes = sum(map(len, live))
        for number in segments(self._folder):
            if number < self._writer.number:
                segment_path(self._folder, number).unlink(missing_ok=True)

    def _warn(self, text: str) -> None:
        """Log a warning once."""
        kind = text.partition(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s", text)
