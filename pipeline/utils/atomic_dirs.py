"""Directories that are replaced as a whole.

Owns how a model takes its name. Promises that who looks at the name finds the old directory or the new one, whole and
on disk, or for the moment between two renames neither; if a crash makes that moment longer, `repair` puts the old one
back. Knows nothing of what is in a directory.

Writers that may be there at the same time, such as the attempts of a run, have a part each:

    mend(path)
    part = unfinished(path, "12-1")
    …write part…
    replace(path, part, fence.check)
"""

import glob
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def unfinished(path: Path, writer: str) -> Path:
    """Where `writer` writes what will become `path`; what it left there earlier is removed."""
    discard(path, writer)
    return path.with_name(f"{_part(path)}-{writer}")


def discard(path: Path, writer: str) -> None:
    """Remove what `writer` left unfinished, if anything."""
    shutil.rmtree(path.with_name(f"{_part(path)}-{writer}"), ignore_errors=True)


def replace(path: Path, part: Path, check: Callable[[], None] = lambda: None) -> None:
    """Give `part` the name `path`; what had it is removed. `part` is on disk before it has the name.

    `check` is called right before anything gets another name; what it raises leaves everything as it is. The parts that
    other writers had left before that are removed too, and no later ones: this may hang for long after its check, and
    somebody else be writing by then.
    """
    for file in part.rglob("*"):
        flush(file)
    flush(part)
    left = [other for other in path.parent.glob(f"{glob.escape(_part(path))}-*") if other != part]
    check()
    try:
        if path.exists():
            path.rename(_replaced(path))
        part.rename(path)
    except OSError:
        repair(path)
        raise
    flush(path.parent)
    repair(path)
    for other in left:
        shutil.rmtree(other, ignore_errors=True)


def repair(path: Path) -> None:
    """Undo or end a `replace` that a crash cut short."""
    old = _replaced(path)
    if old.exists() and not path.exists():
        old.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def flush(path: Path) -> None:
    """Have a file's bytes, or the names in a directory, on disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _part(path: Path) -> str:
    return f".{path.name}.part"


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")
