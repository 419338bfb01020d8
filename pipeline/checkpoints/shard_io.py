"""Hashing of shard files while `torch.distributed.checkpoint` (DCP) writes and reads them.

`RecordingWriter` hashes the bytes that a rank writes. `VerifyingReader` compares the blocks of each tensor before DCP
sees them, in the order of the file, so that each block is read once.
"""

import dataclasses
import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from torch.distributed.checkpoint._fsspec_filesystem import (  # exported nowhere else
    FileSystem,
    FsspecReader,
    FsspecWriter,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pipeline.checkpoints.block_hashes import FileRecord, Recorder, VerifiedFile
from pipeline.checkpoints.checkpoint_store import Checkpoint

METADATA = ".metadata"
"""DCP's index file: the file and offset of each tensor."""
PathLike = str | os.PathLike[str]


class RecordingWriter(FsspecWriter):
    """Writes one rank's files below `folder`.

    Attributes:
        records: size and hashes of each closed file.
        named: on the rank that wrote the metadata, the files that the metadata names, and the metadata file.
    """

    def __init__(self, folder: str, *, flush: bool) -> None:
        """With `flush`, closing a file forces it to disk; DCP calls sync(2) for a file that cannot be flushed."""
        super().__init__(folder, sync_files=flush, overwrite=True)
        self.records: dict[str, FileRecord] = {}
        self.named: set[str] = set()
        self.fs = cast(Any, _Recording(self.records))
        self.path = self.fs.init_path(folder)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self.named = {written.storage_data.relative_path for rank in results for written in rank} | {METADATA}


class VerifyingReader(FsspecReader):
    """Reads the files of a checkpoint that has this metadata."""

    def __init__(self, checkpoint: Checkpoint, metadata: Metadata) -> None:
        super().__init__(checkpoint.location)
        self._checkpoint, self._metadata = checkpoint, metadata
        self._file: tuple[IO[bytes], VerifiedFile] | None = None

    def read_metadata(self) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        # In file order, consecutive items share blocks, and `VerifiedFile` buffers only the last ones.
        items = sorted(plan.items, key=self._file_and_offset)
        return super().read_data(dataclasses.replace(plan, items=items), planner)

    def _file_and_offset(self, item: ReadItem) -> tuple[str, int]:
        info = self.storage_data[item.storage_index]
        return info.relative_path, info.offset

    def _slice_file(self, file: IO[bytes], info: Any) -> IO[bytes]:
        if self._file is None or self._file[0] is not file:
            record = self._checkpoint.record(info.relative_path)
            self._file = file, VerifiedFile(file, record, f"{self._checkpoint.location}/{info.relative_path}")
        data, start = self._file[1].around(info.offset, info.length)
        return super()._slice_file(io.BytesIO(data), dataclasses.replace(info, offset=info.offset - start))


class _Recording(FileSystem):
    """Writes the files of one folder through a `Recorder`, and stores their records by file name."""

    def __init__(self, records: dict[str, FileRecord]) -> None:
        super().__init__()
        self._records = records

    @contextmanager
    def create_stream(self, path: PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as stream, Recorder(stream) as recorder:
            yield recorder
        self._records[Path(path).name] = recorder.record()

    def rename(self, path: PathLike, new_path: PathLike) -> None:
        super().rename(path, new_path)
        self._records[Path(new_path).name] = self._records.pop(Path(path).name)
