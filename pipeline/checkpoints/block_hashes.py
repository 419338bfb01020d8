"""SHA-256 hashes of a checkpoint's files, per block of 4 MiB.

A hash covers the bytes in memory, before the disk can corrupt them. No byte of a file is returned before its hash has
been compared. Reading a part of a file reads and hashes only the blocks that contain it.

    recorder = Recorder(stream)               # wraps the writer's stream
    recorder.write(data)
    record = recorder.record()                # store it in another file
    …
    VerifiedFile(stream, record, name).around(offset, length)
"""

import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import msgspec

from pipeline.errors import DamagedCheckpointError

BLOCK = 4 << 20
"""Bytes of a block; the last one of a file is shorter."""
HASHERS = 4
"""Blocks of a file that are hashed at once."""


class FileRecord(msgspec.Struct, frozen=True):
    """Size in bytes of a file, and the hex SHA-256 of each of its blocks."""

    size: int
    sha256: tuple[str, ...]

    @classmethod
    def of(cls, data: bytes) -> "FileRecord":
        """The record of a file with this content."""
        recorder = Recorder(io.BytesIO())
        recorder.write(data)
        return recorder.record()


class Recorder(io.RawIOBase):
    """Writes to `stream`, and computes the size and the hashes of the written bytes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._size, self._done = 0, list[str]()
        self._block = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write all of `data`, any object with the buffer protocol."""
        rest = memoryview(data).cast("B")
        self._stream.write(rest)
        written = len(rest)
        while rest:
            room = BLOCK - self._size % BLOCK
            self._block.update(rest[:room])
            self._size += len(rest[:room])
            rest = rest[room:]
            if self._size % BLOCK == 0:
                self._done.append(self._block.hexdigest())
                self._block = hashlib.sha256()
        return written

    def record(self) -> FileRecord:
        """Size and hashes of the bytes written so far."""
        last = [self._block.hexdigest()] if self._size % BLOCK else []
        return FileRecord(self._size, (*self._done, *last))

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def close(self) -> None:
        """Flush and close this recorder and `stream`."""
        if not self.closed:
            super().close()
            self._stream.close()


class VerifiedFile:
    """Reads parts of a file and compares them with its record. `name` is for errors."""

    def __init__(self, stream: IO[bytes], record: FileRecord, name: str) -> None:
        self._stream, self._record, self._name = stream, record, name
        self._at, self._data = 0, b""

    def around(self, offset: int, length: int) -> tuple[bytes, int]:
        """The blocks that contain `length` bytes from `offset`, and the offset at which the first one begins.

        `DamagedCheckpointError` if the hash of a block differs from the record.
        """
        end = offset + length
        if not 0 <= offset <= end <= self._record.size:
            size = self._record.size
            raise DamagedCheckpointError(f"{self._name} has {size} bytes; bytes {offset} to {end} were requested")
        if not self._at <= offset <= end <= self._at + len(self._data):
            self._fill(range(offset // BLOCK, -(-end // BLOCK)))
        return self._data, self._at

    def verify(self) -> None:
        """Read the whole file and compare every block. `DamagedCheckpointError` at the first difference."""
        for index in range(len(self._record.sha256)):
            self._fill(range(index, index + 1))

    def _fill(self, blocks: range) -> None:
        """Read and verify these blocks, and replace the buffered ones."""
        start = blocks.start * BLOCK
        self._stream.seek(start)
        data = self._stream.read(min(blocks.stop * BLOCK, self._record.size) - start)
        parts = [memoryview(data)[index * BLOCK - start :][:BLOCK] for index in blocks]
        with ThreadPoolExecutor(HASHERS) as hashers:
            for index, digest in zip(blocks, hashers.map(_sha256, parts), strict=True):
                if digest != self._record.sha256[index]:
                    where = f"between bytes {index * BLOCK} and {min((index + 1) * BLOCK, self._record.size)}"
                    raise DamagedCheckpointError(f"{self._name} is not what was saved (SHA-256 differs {where})")
        self._at, self._data = start, data


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
