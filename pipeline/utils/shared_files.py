"""Atomic replacement, exclusive creation and checked reading of files on a shared filesystem.

A reader sees a complete file or none. Every document carries its length and checksum, is written to a temporary name in
the same folder, flushed, and then renamed or linked to its name.
"""

import errno
import os
import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_BODY = b', "body": '
_HEAD = b'{"length": %d, "crc32": "%08x"' + _BODY
_TAIL = b"}\n"
_READS = 3
"""Reads of a file that is replaced while it is opened, until this counts as a failure of the disk."""


def seal(body: bytes) -> bytes:
    """A JSON document that wraps the JSON `body` with its length and CRC-32, so that a torn copy is recognized."""
    return _HEAD % (len(body), zlib.crc32(body)) + body + _TAIL


def unseal(data: bytes) -> bytes | None:
    """The body of a sealed file, or None when it is empty, torn or still incomplete."""
    mark = data.find(_BODY)
    body = data[mark + len(_BODY) : -len(_TAIL)]
    return body if mark >= 0 and data == seal(body) else None


def exists(path: Path) -> bool:
    """Whether there is a file or folder at `path`; False for a path that names none, such as one that is too long.

    `OSError` if that is unknown, as for a folder that this user may not open.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null byte
        return False
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return False
        raise
    return True


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the file at `path` by `data`. A reader sees the complete old or the complete new content."""
    with _temporary(path, data) as (temporary, status):
        try:
            os.replace(temporary, path)
        except OSError:
            if not _is_at(path, status):
                raise


def create_exclusive(path: Path, data: bytes) -> bool:
    """Create `path` with `data` if it does not exist; True for the one caller that did.

    Uses link(2), which is atomic on NFS too, and makes the file appear with its content. False means that another
    writer's file exists. If this cannot be determined, the error of link(2) is raised.
    """
    with _temporary(path, data) as (temporary, status):
        try:
            os.link(temporary, path)
        except OSError as error:
            if os.stat(temporary).st_nlink > 1 or _is_at(path, status):
                return True
            if isinstance(error, FileExistsError):
                return False
            raise
        return True


def _is_at(path: Path, status: os.stat_result) -> bool:
    """Whether `path` is the file with this status, regardless of the error of link(2) or rename(2).

    If the reply of an NFS server is lost, its client repeats the call. The repeated call fails although the first one
    succeeded: the link exists already, or the file to rename is gone.
    """
    try:
        return os.path.samestat(status, os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def _temporary(path: Path, data: bytes) -> Iterator[tuple[Path, os.stat_result]]:
    """A flushed temporary file in the folder of `path`, readable by its owner only. Removed after the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        yield temporary, _fill(descriptor, data, path)
    finally:
        with suppress(OSError):  # the caller's rename or link stands; readers skip names that begin with a dot
            temporary.unlink(missing_ok=True)


def _fill(descriptor: int, data: bytes, path: Path) -> os.stat_result:
    """Write and fsync the data, and close the file. `OSError` names `path`."""
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return os.fstat(file.fileno())
    except OSError as error:
        error.filename = str(path)  # these calls get a descriptor, so their errors name no file
        raise


def write_document(path: Path, document: Any) -> None:
    """Replace `path` atomically by a sealed JSON document (a msgspec Struct or plain values)."""
    write_atomic(path, seal(msgspec.json.encode(document)))


def create_document(path: Path, document: Any) -> bool:
    """Create a sealed JSON document if the path is free; True for the one caller that did."""
    return create_exclusive(path, seal(msgspec.json.encode(document)))


def read_document(path: Path, kind: type[T]) -> T | None:
    """The document at `path`, or None when it is absent, empty, torn, or of another shape.

    `OSError` if the disk fails: a file whose server is unreachable, or has lost it for a while, is not absent.
    """
    body = unseal(_content(path))
    if body is None:
        return None
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError:
        return None


def _content(path: Path) -> bytes:
    """The bytes of a file; none if it is absent."""
    for reads_left in reversed(range(_READS)):
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except OSError as error:
            # ESTALE: the file was replaced on an NFS server while it was opened, and its name leads to the new one.
            if error.errno != errno.ESTALE or not reads_left:
                raise
    raise AssertionError("the last read returns or raises")


def append(path: Path, data: bytes) -> None:
    """Append to a file of this process, in a folder that is created if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)
