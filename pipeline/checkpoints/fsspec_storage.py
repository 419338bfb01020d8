"""A folder of files behind an fsspec URL, with the few operations that checkpoints need.

On a local disk, `put` is atomic and flushed. Listings never come from a cache. Any failure of the filesystem becomes a
`CheckpointError` that names the folder.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import CheckpointError, one_line
from pipeline.utils import shared_files
from pipeline.utils.fs_retry import FINAL_WRITE_TIMEOUT, retry_transient


class Storage:
    """Files below one URL; names are relative to it and use `/`."""

    def __init__(self, url: str) -> None:
        try:
            self._fs, self._root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise CheckpointError(f"{url} is no folder that can hold checkpoints: {error}") from error
        self.local = isinstance(self._fs, LocalFileSystem)

    def url(self, name: str = "") -> str:
        """The full address of a file or folder: a plain path on a local disk."""
        path = self._path(name)
        return path if self.local else str(self._fs.unstrip_protocol(path))

    def put(self, name: str, data: bytes) -> None:
        """Replace a file atomically. A local disk's transient errors are retried for `FINAL_WRITE_TIMEOUT` seconds."""
        with self._translated("write", name):
            if self.local:
                path = Path(self._path(name))
                retry_transient(
                    f"{name} to be written", lambda: shared_files.write_atomic(path, data), FINAL_WRITE_TIMEOUT
                )
            else:
                self._fs.pipe_file(self._path(name), data)

    def get(self, name: str) -> bytes | None:
        """The content of a file, or None if it is absent. Transient errors are retried, as in `put`."""
        with self._translated("read", name):
            try:
                return retry_transient(
                    f"{name} to be read", lambda: bytes(self._fs.cat_file(self._path(name))), FINAL_WRITE_TIMEOUT
                )
            except (FileNotFoundError, NotADirectoryError):
                return None

    def folders(self, name: str = "") -> list[str]:
        """Names of the folders in a folder; empty if the folder is absent."""
        with self._translated("list", name):
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(self._path(name), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted(_last(entry["name"]) for entry in entries if entry["type"] == "directory")

    def sizes(self, name: str) -> dict[str, int]:
        """Size in bytes of each file directly in a folder; empty if the folder is absent."""
        with self._translated("list", name):
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(self._path(name), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            return {_last(entry["name"]): entry["size"] for entry in entries if entry["type"] == "file"}

    def size(self, name: str) -> int | None:
        """Size in bytes of a file by its name, or None if it is absent. Some stores list a new file only later."""
        with self._translated("read", name):
            self._fs.invalidate_cache()
            try:
                entry = self._fs.info(self._path(name))
            except (FileNotFoundError, NotADirectoryError):
                return None
            return int(entry["size"]) if entry["type"] == "file" else None

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file for random-access reading."""
        with self._translated("read", name):
            self._fs.invalidate_cache()
            with self._fs.open(self._path(name), "rb") as file:
                yield file

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content. Does nothing if it is absent."""
        with self._translated("remove", name):
            self._fs.invalidate_cache()
            try:
                self._fs.rm(self._path(name), recursive=True)
            except FileNotFoundError:
                return

    def remove_empty(self, name: str) -> None:
        """Remove a folder if it is empty. Does nothing on an object store, which has no empty folders."""
        if self.local:
            with suppress(OSError):
                Path(self._path(name)).rmdir()

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")

    @contextmanager
    def _translated(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"cannot {doing} {self.url(name)}: {error.strerror or error}") from error
        except Exception as error:  # each driver of fsspec defines other error classes
            reason = one_line(error)
            raise CheckpointError(f"cannot {doing} {self.url(name)}: {reason}") from error


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
