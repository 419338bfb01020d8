"""Names of documents that appear late on other nodes, as on a file system whose clients cache directories.

Owns the injection of this fault into the file operations of a process (`pipeline.utils.disk_faults`). A process marks
each document that it creates with its node and the time, in an extended attribute, before the document gets its name. A
process of another node finds no such name until the document is old enough: it cannot open it, and a listing of a
`SharedDir` omits it. Creation stays exclusive at once, since that is decided by the file server. A document that
replaces a visible one is visible; a file that is not created by `pipeline.utils.shared_files` is not marked.
"""

import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.utils.disk_faults import FileOperation, Rule

MARK = "user.rollcall.created"
"""The extended attribute of a new document: its node and the time of its creation, in Unix seconds."""
_hiders: list[Callable[[Path], bool]] = []


def is_visible(path: Path) -> bool:
    """Whether this process may find the name already; True without an injected fault."""
    return not any(is_hidden(path) for is_hidden in _hiders)


def hide(is_hidden: Callable[[Path], bool]) -> None:
    """Omit hidden names from all further listings of this process."""
    _hiders.append(is_hidden)


class LateNames:
    """The names below some folders, as the processes of one node find them."""

    def __init__(self, folders: Sequence[Path], node: int, seconds: float) -> None:
        self._folders, self._node, self._seconds = tuple(folders), node, seconds

    @property
    def rule(self) -> Rule:
        """For `disk_faults.inject`: marks new documents, and refuses to open hidden ones."""
        return self._meet

    def is_hidden(self, path: Path) -> bool:
        """Whether another node created the document less than `seconds` ago."""
        if not self._is_below(path):
            return False
        try:
            node, _, created = os.getxattr(path, MARK).decode().partition(" ")
        except OSError:  # no mark, no file, or a file system without attributes
            return False
        return int(node) != self._node and time.time() - float(created) < self._seconds

    def _meet(self, operation: FileOperation) -> None:
        if operation.name == "open" and not operation.takes_room and self.is_hidden(operation.path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(operation.path))
        if operation.other is None:
            return
        if operation.name == "os.link" and self._is_below(operation.path):
            self._mark(operation.other)
        elif operation.name == "os.rename" and self._is_below(operation.other):
            self._mark_renamed(operation.path, operation.other)

    def _is_below(self, path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in self._folders)

    def _mark(self, document: Path) -> None:
        os.setxattr(document, MARK, f"{self._node} {time.time()}".encode())

    def _mark_renamed(self, document: Path, name: Path) -> None:
        """Mark a document before it gets a new name; one that replaces another has the mark of that."""
        if not os.path.lexists(name):
            self._mark(document)
            return
        try:
            os.setxattr(document, MARK, os.getxattr(name, MARK))
        except OSError:
            return  # the name was there before the fault, or has gone meanwhile
