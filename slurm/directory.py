"""The shared directory of one attempt, as the rendezvous sees it.

Owns the small interface between the rendezvous and its filesystem, so that the same code meets on NFS and, in tests,
in memory with every fault a filesystem can show. Promises of a `Directory`: a document appears whole or not at all
under its name, one of several creators wins, and a reader that is told "not there" may be told otherwise later. Knows
no documents.
"""

import os
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pipeline import files
from pipeline.errors import RendezvousError

T = TypeVar("T")


class Directory(Protocol):
    """Sealed documents (msgspec Structs) under names relative to the attempt's directory."""

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


class FileDirectory:
    """A `Directory` on a shared filesystem; `RendezvousError` when it cannot be written."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, name: str, document: Any) -> bool:
        try:
            return files.create_document(self._root / name, document)
        except OSError as error:
            raise self._unwritable(name, error) from error

    def replace(self, name: str, document: Any) -> None:
        try:
            files.write_document(self._root / name, document)
        except OSError as error:
            raise self._unwritable(name, error) from error

    def read(self, name: str, kind: type[T]) -> T | None:
        return files.read_document(self._root / name, kind)

    def names(self, folder: str = "") -> tuple[str, ...]:
        # Listing also makes an NFS client forget that a name was absent.
        try:
            with os.scandir(self._root / folder) as entries:
                return tuple(entry.name for entry in entries)
        except FileNotFoundError:
            return ()

    def _unwritable(self, name: str, error: OSError) -> RendezvousError:
        return RendezvousError(f"cannot write {self._root / name}: {error.strerror}; every rank must be able to")
