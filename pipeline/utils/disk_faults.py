"""Faults of a file system, injected into the file operations of this process.

Owns the interception of Python's file operations. Python reports each one to an audit hook (PEP 578) before it makes
it: `open` of any library, and calls of `os` that create, rename or list. A rule may delay the operation or raise the
`OSError` of a full disk in its place. So no code that reads or writes files handles injected faults, and no file
system is touched. Not reached: programs that are not Python (Redis), libraries that open files in C, and writes to
files that are open already. Without a rule there is no hook.

    with injected(full_disk(folder)):
        save()                      # OSError: [Errno 28] No space left on device
"""

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_READS = frozenset({"os.listdir", "os.scandir"})
_CREATES = frozenset({"os.mkdir", "os.link", "os.symlink"})
_CHANGES = frozenset({"os.rename", "os.remove", "os.rmdir", "os.truncate"})
_OF_TWO_PATHS = frozenset({"os.link", "os.symlink", "os.rename"})
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class FileOperation:
    """An operation that this process is about to make on a path.

    Attributes:
        takes_room: whether it creates or writes a file or folder.
        other: the file that gets the name `path` as a link, or the new name of `path`; None for other operations.
    """

    name: str
    path: Path
    takes_room: bool
    other: Path | None = None


Rule = Callable[[FileOperation], None]
"""Called before each operation: returns to permit it, perhaps after a pause, or raises its `OSError`."""

_rules: list[Rule] = []
_hooked = threading.Event()
_busy = threading.local()


def inject(rule: Rule) -> None:
    """Apply a rule to all further file operations of this process, in every thread."""
    _rules.append(rule)
    if not _hooked.is_set():
        _hooked.set()
        sys.addaudithook(_intercept)


@contextmanager
def injected(rule: Rule) -> Iterator[None]:
    """Apply a rule within the block."""
    inject(rule)
    try:
        yield
    finally:
        _rules.remove(rule)


def full_disk(folder: Path, is_full: Callable[[], bool] = lambda: True) -> Rule:
    """A rule by which nothing below `folder` can be created or written while `is_full()`."""

    def refuse(operation: FileOperation) -> None:
        if operation.takes_room and operation.path.is_relative_to(folder) and is_full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(operation.path))

    return refuse


def slow_disk(folder: Path, seconds: float, is_slow: Callable[[], bool] = lambda: True) -> Rule:
    """A rule by which each operation below `folder` takes `seconds` longer while `is_slow()`."""

    def delay(operation: FileOperation) -> None:
        if operation.path.is_relative_to(folder) and is_slow():
            time.sleep(seconds)

    return delay


def _intercept(event: str, arguments: tuple[Any, ...]) -> None:
    if not _rules or getattr(_busy, "is_in_rule", False):
        return
    operation = _operation_of(event, arguments)
    if operation is None:
        return
    _busy.is_in_rule = True  # a rule may use files itself
    try:
        for rule in tuple(_rules):
            rule(operation)
    finally:
        _busy.is_in_rule = False


def _operation_of(event: str, arguments: tuple[Any, ...]) -> FileOperation | None:
    """The operation of an audit event; None for other events, and for a path that is a descriptor."""
    if event == "open":
        takes_room = bool((arguments[2] or 0) & _WRITE_FLAGS)
    elif event in _READS or event in _CHANGES:
        takes_room = False
    elif event in _CREATES:
        takes_room = True
    else:
        return None
    names = arguments[:2] if event in _OF_TWO_PATHS else arguments[:1]
    try:
        path, *others = (Path(os.fsdecode(name)).absolute() for name in names)
    except TypeError:
        return None
    if event in ("os.link", "os.symlink"):
        path, others = others[0], [path]
    # An existing name needs no room: the call itself fails, with another error.
    takes_room = takes_room and (event == "open" or not os.path.lexists(path))
    return FileOperation(event, path, takes_room, others[0] if others else None)
