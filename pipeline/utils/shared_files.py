"""Files that several machines read and write.

Owns atomic replacement, exclusive creation and checked reading on a shared filesystem. Promises that a reader sees a
whole file or none: every document carries its length and checksum, is written to a temporary name in the same folder,
flushed, and renamed or linked into place. Knows nothing of what the files mean.
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


def seal(body: bytes) -> bytes:
    """JSON `body` with its length and CRC-32 around it, itself JSON, so that a torn copy is recognised."""
    return _HEAD % (len(body), zlib.crc32(body)) + body + _TAIL


def unseal(data: bytes) -> bytes | None:
    """The body of a sealed file, or None when it is empty, torn or still incomplete."""
    mark = data.find(_BODY)
    body = data[mark + len(_BODY) : -len(_TAIL)]
    return body if mark >= 0 and data == seal(body) else None


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the file at `path` by `data`; a reader sees the old content or the new, never a part."""
    with _temporary(path, data) as (temporary, status):
        try:
            os.replace(temporary, path)
        except OSError:
            if not _is_at(path, status):
                raise


def create_exclusive(path: Path, data: bytes) -> bool:
    """Create `path` with `data` if it does not exist; True for the one caller that did.

    Uses link(2), which is atomic on NFS too and makes the file appear with its content. False says that another's file
    is there; where that cannot be known, the error of the link is raised.
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
    """Whether the file of this status is the one at `path`, whatever link(2) or rename(2) said.

    When the reply of an NFS server is lost, its client asks again, and the second answer is of a world in which the
    first has succeeded: the link is there already, or the file to rename is gone.
    """
    try:
        return os.path.samestat(status, os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def _temporary(path: Path, data: bytes) -> Iterator[tuple[Path, os.stat_result]]:
    """A flushed temporary file beside `path`, readable by its owner only; gone afterwards unless it was renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            status = os.fstat(file.fileno())
        yield temporary, status
    finally:
        with suppress(OSError):  # what was done stays done; readers pass over names that begin with a dot
            temporary.unlink(missing_ok=True)


def write_document(path: Path, document: Any) -> None:
    """Replace `path` atomically by a sealed JSON document (a msgspec Struct or plain values)."""
    write_atomic(path, seal(msgspec.json.encode(document)))


def create_document(path: Path, document: Any) -> bool:
    """Create a sealed JSON document if none is there; True for the one caller that did."""
    return create_exclusive(path, seal(msgspec.json.encode(document)))


def read_document(path: Path, kind: type[T]) -> T | None:
    """The document at `path`, or None when it is absent, empty, torn, or of another shape."""
    try:
        body = unseal(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ConnectionError):
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:  # replaced on an NFS server while it was opened
            return None
        raise
    if body is None:
        return None
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError:
        return None
