"""Lock files, which show every machine that shares the disk which process works on a directory.

Owns flock, and the text of a lock file, which names its holder. Promises that a lock ends with its process, that a
process id alone never identifies the holder, and that a file system without flock is one `ConfigError`. Must not know
the meaning of a lock.

    with open_lock(path) as lock:
        if take_lock(lock.fileno(), path):
            ...                                  # `lock_holder(path)` is this process until the file is closed
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
"""Attempts to take a lock, and their pause: `is_held` takes a lock for a moment, so one failure is not final."""


def open_lock(path: Path) -> TextIO:
    """Open the file of a lock, which is created if absent. Only its owner may open it, since any opener can lock it."""
    return open(path, "a+", opener=open_private)


def take_lock(descriptor: int, path: Path) -> bool:
    """Lock the open file at `path` until it is closed, and write the holder to it. False if another process has it."""
    for left in reversed(range(_LOOKS)):
        if try_lock(descriptor, path):
            sign_lock(descriptor, f"pid {os.getpid()} on {os.uname().nodename}")
            return True
        if left:
            time.sleep(_PAUSE)
    return False


def try_lock(descriptor: int, path: Path) -> bool:
    """Lock the open file at `path` until it is closed, with one attempt and without a signature.

    Returns False if another process has the lock. For locks that are not checked with `is_held`.
    """
    return _locked(descriptor, fcntl.LOCK_EX, path)


def sign_lock(descriptor: int, text: str) -> None:
    """Write the holder into the file of a lock, in place of its old text."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{text}\n".encode(), 0)


def is_held(path: Path) -> bool:
    """Whether a process holds this lock, on any machine that shares the file system."""
    try:
        lock = path.open()
    except FileNotFoundError:
        return False
    with lock:
        return not _locked(lock.fileno(), fcntl.LOCK_SH, path)


def signature(path: Path) -> str:
    """The last holder in the lock's file, such as `pid 12 on node3`; `unknown` if there is none."""
    try:
        return path.read_text(errors="replace").strip() or "unknown"
    except FileNotFoundError:
        return "unknown"


def lock_holder(path: Path) -> psutil.Process | None:
    """The process that holds this lock; None if no process does.

    The lock's text names the process, which must also have the file open, since its process id may have been reused.
    Raises `ConfigError` if the process is on another machine or cannot be identified.
    """
    if not is_held(path):
        return None
    text = signature(path)
    match = re.fullmatch(r"pid (\d+) on (\S+)", text)
    if match is None or match[2] != os.uname().nodename:
        host = match[2] if match else f"an unknown machine ({text})"
        raise ConfigError("name", path.parent.name, "a launcher on this machine", f"it runs on {host}: cancel it there")
    process = _opener(int(match[1]), path)
    if process is None and is_held(path):
        hint = f"{path} is held, but not by {text}, or not by a process of yours: end it by hand"
        raise ConfigError("name", path.parent.name, "a launcher that can be signalled", hint)
    return process


def _opener(pid: int, path: Path) -> psutil.Process | None:
    """The process with this id if it has the file open, else None."""
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
