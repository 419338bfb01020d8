"""Directories and files that only their owner may use, on filesystems that are shared with other users.

A directory of another user, or a symbolic link to a directory, never counts as private.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

OWNER_ONLY = 0o700
_PERMISSIONS = 0o777


def make_directory(path: Path, mode: int = OWNER_ONLY) -> None:
    """Create `path` with these permissions, independent of the umask, or set them on an existing directory.

    `PermissionError` if the directory belongs to another user, since only its owner may change its permissions.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=mode, exist_ok=True)
    current = stat.S_IMODE(path.stat().st_mode)
    if current & _PERMISSIONS != mode:
        path.chmod(current & ~_PERMISSIONS | mode)  # preserves set-group-ID, inherited from the parent directory


def is_private(path: Path) -> bool:
    """Whether `path` is a directory of this user that no other user may enter. False for a symbolic link."""
    try:
        status = path.lstat()
    except OSError:
        return False
    private = status.st_uid == os.geteuid() and not status.st_mode & (_PERMISSIONS & ~OWNER_ONLY)
    return private and stat.S_ISDIR(status.st_mode)


def make_private(path: Path) -> bool:
    """Create `path` for this user alone if it is absent. Returns whether it is private and safe from replacement.

    Intended for a predictable name in a world-writable directory such as /tmp, whose sticky bit prevents others from
    renaming the entry. A directory that another user created first is left unchanged.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=OWNER_ONLY)
    sticky = path.parent.stat().st_mode & stat.S_ISVTX
    return is_private(path) and bool(sticky or is_safe(path.parent))


def is_safe(path: Path) -> bool:
    """Whether `path` is a directory in which only this user, the user's group and root can create and replace entries.

    Groups are trusted here, because many sites give every user a private group.
    """
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid in (0, os.geteuid()) and not status.st_mode & stat.S_IWOTH


def open_private(path: str | Path, flags: int) -> int:
    """An `opener` for `open`: sets mode 0600 (owner only), also on a file that exists already."""
    descriptor = os.open(path, flags, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
