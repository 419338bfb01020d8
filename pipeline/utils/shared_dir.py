"""The shared directory of one attempt, in which its agents meet and observe each other.

The interface separates the agents from their filesystem: the same code runs on NFS and, in tests, in memory with every
fault of a filesystem. Contract of a `SharedDir`: a document appears complete or not at all, exactly one of several
creators wins, and a new document may be invisible to other machines for up to `ClusterConfig.lateness` seconds.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pipeline.utils import shared_files
from pipeline.utils.fs_retry import retry_transient
from pipeline.utils.late_names import is_visible
from pipeline.utils.waiting import CLOCK, Clock

T = TypeVar("T")


class SharedDir(Protocol):
    """Sealed documents (msgspec Structs) under names relative to a directory. `OSError` if the disk fails."""

    def create(self, name: str, document: Any) -> bool:
        """Create a document with its content, atomically; False if the name is taken."""
        ...

    def replace(self, name: str, document: Any) -> None:
        """Write a document over the old one, atomically."""
        ...

    def read(self, name: str, kind: type[T]) -> T | None:
        """A document, or None if it is absent (yet), torn, or of another kind."""
        ...

    def names(self, folder: str = "") -> tuple[str, ...]:
        """Names in a folder, in any order; empty if there is no folder (yet)."""
        ...

    def has(self, name: str) -> bool:
        """Whether `names` of its folder would have this name, at the cost of one name."""
        ...


class FileSharedDir:
    """A `SharedDir` on a shared filesystem. Transient errors of the disk are retried for `patience` seconds."""

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

    def has(self, name: str) -> bool:
        return self._retry(name, lambda: self._contains(self._root / name))

    def _contains(self, path: Path) -> bool:
        try:
            # As a listing does: opening the folder drops an NFS client's cached absence of its names.
            os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
            os.stat(path)
        except FileNotFoundError:
            return False
        return is_visible(path)

    def _list(self, folder: str) -> tuple[str, ...]:
        # Opening a folder also drops an NFS client's cached absence of its names.
        try:
            with os.scandir(self._root / folder) as entries:
                return tuple(entry.name for entry in entries if is_visible(Path(entry.path)))
        except FileNotFoundError:
            return ()

    def _retry(self, name: str, act: Callable[[], T]) -> T:
        return retry_transient(str(self._root / name), act, self._patience, self._clock)
