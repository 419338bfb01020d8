"""The shared directory of one attempt, as those who meet and watch each other in it see it.

Owns the small interface between them and their filesystem, so that the same code runs on NFS and, in tests, in memory
with every fault a filesystem can show. Promises of a `SharedDir`: a document appears whole or not at all under its
name, one of several creators wins, and a reader that is told "not there" may be told otherwise up to
`ClusterConfig.lateness` seconds later. Knows no documents.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pipeline.utils import shared_files
from pipeline.utils.fs_retry import retry_transient
from pipeline.utils.waiting import CLOCK, Clock

T = TypeVar("T")


class SharedDir(Protocol):
    """Sealed documents (msgspec Structs) under names relative to a directory. `OSError` where the disk fails."""

    def create(self, name: str, document: Any) -> bool:
        """Create a document with its content, atomically; False if the name is taken."""
        ...

    def replace(self, name: str, document: Any) -> None:
        """Write a document over the old one, atomically."""
        ...

    def read(self, name: str, kind: type[T]) -> T | None:
        """A document, or None where there is none (yet), it is torn, or of another kind."""
        ...

    def names(self, folder: str = "") -> tuple[str, ...]:
        """Names in a folder, in any order; empty where there is no folder (yet)."""
        ...


class FileSharedDir:
    """A `SharedDir` on a shared filesystem; a disk that fails for a transient reason is asked again for `patience`
    seconds."""

    def __init__(self, root: Path, patience: float = 0.0, clock: Clock = CLOCK) -> None:
        self._root, self._patience, self._clock = root, patience, clock

    def create(self, name: str, document: Any) -> bool:
        return self._retry(name, lambda: shared_files.create_document(self._root / name, document))

    def replace(self, name: str, document: Any) -> None:
        self._retry(name, lambda: shared_files.write_document(self._root / name, document))

    def read(self, name: str, kind: type[T]) -> T | None:
        return self._retry(name, lambda: shared_files.read_document(self._root / name, kind))

    def names(self, folder: str = "") -> tuple[str, ...]:
        return self._retry(folder, lambda: self._list(folder))

    def _list(self, folder: str) -> tuple[str, ...]:
        # Opening a folder also makes an NFS client forget that a name was absent from it.
        try:
            with os.scandir(self._root / folder) as entries:
                return tuple(entry.name for entry in entries)
        except FileNotFoundError:
            return ()

    def _retry(self, name: str, act: Callable[[], T]) -> T:
        return retry_transient(str(self._root / name), act, self._patience, self._clock)
