"""Directories and files that only their owner may use.

Owns how such a directory is made and checked, on filesystems that are shared with strangers. Promises that a directory
of another user, or one that a link leads to, is never taken for one of ours. Knows nothing of what is in them.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

OWNER_ONLY = 0o700
_PERMISSIONS = 0o777


def make_directory(path: Path, mode: int = OWNER_ONLY) -> None:
    """Make `path` with these permissions, whatever the umask, or give them to the directory that is there.

    `PermissionError` if that belongs to another user: only its owner may change a directory's permissions.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=mode, exist_ok=True)
    found = stat.S_IMODE(path.stat().st_mode)
    if found & _PERMISSIONS != mode:
        path.chmod(found & ~_PERMISSIONS | mode)  # keeps set-group-ID, which a parent directory may pass on


def is_private(path: Path) -> bool:
    """Whether `path` is a directory of this user that nobody else may enter; a link to one is none."""
    try:
        status = path.lstat()
    except OSError:
        return False
    private = status.st_uid == os.geteuid() and not status.st_mode & (_PERMISSIONS & ~OWNER_ONLY)
    return private and stat.S_ISDIR(status.st_mode)


def make_private(path: Path) -> bool:
    """Make `path` for this user alone if it is not there; whether it is private, and nobody else can replace it.

    Meant for a known name in a directory that everybody may write to, such as /tmp: another user may have made it
    first, and then nothing is changed. There the sticky bit keeps others from renaming it.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=OWNER_ONLY)
    sticky = path.parent.stat().st_mode & stat.S_ISVTX
    return is_private(path) and bool(sticky or is_safe(path.parent))


def is_safe(path: Path) -> bool:
    """Whether `path` is a directory in which only this user, his group and root can make and replace entries.

    Groups are trusted here: many sites give every user a group of his own.
    """
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid in (0, os.geteuid()) and not status.st_mode & stat.S_IWOTH


def open_private(path: str | Path, flags: int) -> int:
    """An `opener` for `open`: the file is readable and writable by its owner only, also if it was made otherwise."""
    descriptor = os.open(path, flags, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
