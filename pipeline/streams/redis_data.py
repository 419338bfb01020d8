"""Which data the Redis of an attempt starts from.

Owns the inheritance of Redis's persistence between the attempts of a run [B5]. Each attempt has its own folder, so a
Redis of an earlier attempt that still lives (a cut-off node) can write only where nobody looks any more. A new attempt
copies the newest earlier data first. Promises that a copy is taken whole or not at all, and that a Redis that restarts
within its attempt finds its own data untouched.

Newest is the highest *generation*: a number that an attempt writes into its folder, one above its predecessor's, when
its copy is complete and before its Redis runs. Not the newest file time: a zombie goes on writing. Not the name: job
ids do not grow everywhere. Knows neither the client nor how the server is started.
"""

import os
import shutil
from pathlib import Path

import msgspec

from pipeline import files
from pipeline.errors import StreamError

SEVERAL_FILES = "appendonlydir"
ONE_FILE = "appendonly.aof"

_TRIES = 5


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """The place of an attempt's data in the run's history, and the attempt it was copied from (empty: none)."""

    number: int
    origin: str = ""


def inherit(folder: Path) -> Generation:
    """Make `folder` (of one attempt) ready for its Redis: with its own data, else with the newest of its siblings."""
    own = _generation(folder)
    if own is not None:
        return own
    _empty(folder)  # of a copy that was cut short
    number, origin = max(_siblings(folder), default=(0, ""))
    if origin:
        _copy(folder.parent / origin, folder)
    made = Generation(number=number + 1, origin=origin)
    files.write_document(folder / "generation.json", made)
    return made


def needs_redis_7(folder: Path) -> bool:
    """Whether the data is in the layout of Redis 7, which an older Redis would silently take for no data."""
    return (folder / SEVERAL_FILES).is_dir()


def _generation(folder: Path) -> Generation | None:
    return files.read_document(folder / "generation.json", Generation)


def _siblings(folder: Path) -> list[tuple[int, str]]:
    found = ((other.name, _generation(other)) for other in folder.parent.iterdir())
    return [(generation.number, name) for name, generation in found if generation is not None]


def _copy(source: Path, target: Path) -> None:
    """Copy the append-only data; its Redis may still write, or even rewrite its files, while we read."""
    for _ in range(_TRIES):
        _empty(target)
        before = _listing(source)
        try:
            for name in before:
                _copy_file(source / name, target / name)
        except FileNotFoundError:
            continue
        if _listing(source) == before:
            return
    raise StreamError(f"the data in {source} changed {_TRIES} times while it was copied; stop the job that writes it")


def _empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, mode=0o700)


def _listing(folder: Path) -> list[str]:
    """The files of the data; the manifest first, so that what it names is copied after it."""
    several = sorted((folder / SEVERAL_FILES).glob("*"), key=lambda path: (path.suffix != ".manifest", path.name))
    found = [path for path in [folder / ONE_FILE, *several] if path.is_file() and not path.name.startswith("temp-")]
    return [str(path.relative_to(folder)) for path in found]


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with source.open("rb") as read, target.open("wb") as written:
        shutil.copyfileobj(read, written, 1 << 20)
        written.flush()
        os.fsync(written.fileno())
