"""Locks as files: who is at work on a directory, as every machine that sees it can tell.

Owns flock, and what a lock's text says of its holder. Promises that a lock ends with its process, that a process is
never taken for the holder by its number alone, and that a filesystem without flock is one `ConfigError`. Must not know
what is locked.

    with open_lock(path) as lock:
        if take_lock(lock.fileno(), path):       # from here on `lock_holder(path)` is this process, until the file is
        closed
"""

import errno
import fcntl
import os
import re
import time
from pathlib import Path
from typing import TextIO

import psutil

from pipeline.errors import ConfigError
from pipeline.utils.private_files import open_private

_WITHOUT = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)
_LOOKS, _PAUSE = 5, 0.02
"""To see whether a lock is held, one takes it for a moment. So a lock that cannot be taken is tried again."""


def open_lock(path: Path) -> TextIO:
    """The file of a lock, made if it is not there. Only its owner may open it: whoever can open a file can lock it."""
    return open(path, "a+", opener=open_private)


def take_lock(descriptor: int, path: Path) -> bool:
    """Lock the open file at `path` until it is closed, and sign it; False if another process has it."""
    for left in reversed(range(_LOOKS)):
        if try_lock(descriptor, path):
            sign_lock(descriptor, f"pid {os.getpid()} on {os.uname().nodename}")
            return True
        if left:
            time.sleep(_PAUSE)
    return False


def try_lock(descriptor: int, path: Path) -> bool:
    """Lock the open file at `path` until it is closed, unsigned, for those whom nobody looks at meanwhile; False if
    another process has it."""
    return _locked(descriptor, fcntl.LOCK_EX, path)


def sign_lock(descriptor: int, text: str) -> None:
    """Say in the file of a lock who has it; what stood there is gone."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{text}\n".encode(), 0)


def is_held(path: Path) -> bool:
    """Whether a process holds this lock, on whatever machine the filesystem tells of."""
    try:
        lock = path.open()
    except FileNotFoundError:
        return False
    with lock:
        return not _locked(lock.fileno(), fcntl.LOCK_SH, path)


def signature(path: Path) -> str:
    """Who signed the lock last: `pid 12 on node3`; `unknown` if nobody did."""
    try:
        return path.read_text(errors="replace").strip() or "unknown"
    except FileNotFoundError:
        return "unknown"


def lock_holder(path: Path) -> psutil.Process | None:
    """The process that holds this lock; None when nobody does.

    The lock's text names it, and it must have the lock's file open: a number that another process got since is nobody.
    Raises `ConfigError` when it is on another machine or cannot be told.
    """
    if not is_held(path):
        return None
    text = signature(path)
    found = re.fullmatch(r"pid (\d+) on (\S+)", text)
    if found is None or found[2] != os.uname().nodename:
        place = found[2] if found else f"an unknown machine ({text})"
        raise ConfigError(
            "name", path.parent.name, "a launcher on this machine", f"it runs on {place}: cancel it there"
        )
    process = _opener(int(found[1]), path)
    if process is None and is_held(path):
        hint = f"{path} is held, but not by {text}, or not by a process of yours: end it by hand"
        raise ConfigError("name", path.parent.name, "a launcher that can be told", hint)
    return process


def _opener(pid: int, path: Path) -> psutil.Process | None:
    """This process, if it has the file open."""
    try:
        process = psutil.Process(pid)
        opened = {file.path for file in process.open_files()}
    except psutil.Error:
        return None
    return process if str(path.resolve()) in opened else None


def _locked(descriptor: int, kind: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT:
            raise
        expected = "a directory on a filesystem with flock (on Lustre: mount -o flock)"
        raise ConfigError("output", str(path.parent), expected, error.strerror or "") from None
    return True
