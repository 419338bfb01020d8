"""The data that the Redis of an attempt starts from.

Owns the inheritance of Redis's persistence between the attempts of a run. Each attempt has a separate folder, so a
Redis of an earlier attempt that still runs (on a cut-off node) writes only to a folder that is no longer read. A new
attempt first copies the newest earlier data. Promises that a copy is complete or discarded; that a Redis that restarts
within its attempt finds its data unchanged, even if the folder's document is damaged; that a Redis which was never
served may start without data; and that the data of an attempt
is kept until the attempt after its successor has a complete copy.

The newest data has the highest *generation*: a number that an attempt writes into its folder, one above its
predecessor's, when its copy is complete and before its Redis runs. File times are no substitute, because a zombie still
writes; nor are names, because job ids do not grow everywhere. Knows neither the client nor how the server is started.
"""

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

import msgspec

from pipeline.errors import StreamError
from pipeline.utils import shared_files

SEVERAL_FILES = "appendonlydir"
ONE_FILE = "appendonly.aof"

_MARK, _SERVED = "generation.json", "served"
_TRIES = 5

log = logging.getLogger(__name__)


class DataGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """The rank of an attempt's data in the run's history, and the attempt from which it was copied (empty: none)."""

    number: int
    origin: str = ""


def inherit(folder: Path) -> DataGeneration:
    """Prepare the `folder` of one attempt for its Redis: with its existing data, else with the newest sibling's data.

    Removes siblings older than the copied one. Raises `StreamError` if the attempt's own data is gone although its
    Redis was ready: an empty Redis would take the place of streams that other roles still use.
    """
    if (folder / _MARK).exists() and (_listing(folder) or (folder / _SERVED).exists()):
        if not _listing(folder):
            raise StreamError(
                f"the data of this attempt's Redis is gone from {folder}; the next attempt starts without"
            )
        existing = _generations(folder.parent)[folder.name]
        shared_files.write_document(folder / _MARK, existing)
        return existing
    own = shared_files.read_document(folder / _MARK, DataGeneration)  # of a process that never was ready
    _empty(folder)  # may hold a copy that was interrupted
    earlier = _generations(folder.parent)
    origin = own.origin if own else max(earlier, key=lambda name: earlier[name].number, default="")
    number = own.number - 1 if own else earlier[origin].number if origin else 0
    if origin:
        _copy(folder.parent / origin, folder)
    # The document comes last: its existence means that the copy is complete.
    made = DataGeneration(number=number + 1, origin=origin)
    shared_files.write_document(folder / _MARK, made)
    for name, generation in earlier.items():
        if generation.number < number:
            shutil.rmtree(folder.parent / name, ignore_errors=True)
    return made


def mark_served(folder: Path) -> None:
    """Record that the attempt's Redis has answered, so that other roles may have data in it."""
    with suppress(OSError):  # a Redis whose disk fails still serves; the next check tries again
        if not (folder / _SERVED).exists():
            (folder / _SERVED).touch(mode=0o600)


def needs_redis_7(folder: Path) -> bool:
    """Whether the data has the layout of Redis 7, which an older Redis would silently ignore."""
    return (folder / SEVERAL_FILES).is_dir()


def data_bytes(folder: Path) -> int:
    """Size of the data on disk in bytes. The size in memory is similar or smaller, as the log also has deleted keys."""
    return sum((folder / name).stat().st_size for name in _listing(folder))


def _generations(root: Path) -> dict[str, DataGeneration]:
    """The generation of every attempt with complete data.

    If a document cannot be read, its number is inferred: one below the attempt that was copied from it, or else one
    above all others.
    """
    read = {mark.parent.name: shared_files.read_document(mark, DataGeneration) for mark in root.glob(f"*/{_MARK}")}
    known = {name: generation for name, generation in read.items() if generation is not None}
    newest = max((generation.number for generation in known.values()), default=0)
    before = {generation.origin: generation.number - 1 for generation in known.values()}
    for name in read.keys() - known.keys():
        log.error("%s cannot be read; the data next to it is used nevertheless", root / name / _MARK)
        known[name] = DataGeneration(number=before.get(name, newest + 1))
    return known


def _copy(source: Path, target: Path) -> None:
    """Copy the append-only data, while the source's Redis may still write or rewrite its files."""
    for _ in range(_TRIES):
        _empty(target)
        before = _listing(source)
        try:
            for name in before:
                _copy_file(source / name, target / name)
        except FileNotFoundError:
            continue
        # The same files before and after: Redis did not rewrite its log during the copy.
        if _listing(source) == before:
            return
    raise StreamError(f"the data in {source} changed {_TRIES} times while it was copied; stop the job that writes it")


def _empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, mode=0o700)


def _listing(folder: Path) -> list[str]:
    """The files of the data; the manifest comes first, so that the files it names are copied after it."""
    several = sorted((folder / SEVERAL_FILES).glob("*"), key=lambda path: (path.suffix != ".manifest", path.name))
    files = [path for path in [folder / ONE_FILE, *several] if path.is_file() and not path.name.startswith("temp-")]
    return [str(path.relative_to(folder)) for path in files]


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with source.open("rb") as read, target.open("wb") as written:
        shutil.copyfileobj(read, written, 1 << 20)
        written.flush()
        os.fsync(written.fileno())
