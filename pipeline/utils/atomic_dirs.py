"""Directories that are replaced as a whole, such as an exported model.

A reader of the name finds the old or the new directory, complete and on disk, or neither between two renames. If a
crash falls between the renames, `repair` restores the old directory.

Concurrent writers, such as the attempts of a run, have separate unfinished directories:

    repair(path)
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
    """The path at which `writer` prepares the next `path`. An earlier unfinished directory of `writer` is removed."""
    discard(path, writer)
    return path.with_name(f"{_part(path)}-{writer}")


def discard(path: Path, writer: str) -> None:
    """Remove the unfinished directory of `writer`, if there is one."""
    shutil.rmtree(path.with_name(f"{_part(path)}-{writer}"), ignore_errors=True)


def replace(path: Path, part: Path, check: Callable[[], None] = lambda: None) -> None:
    """Rename `part` to `path`, and remove the directory that had this name. `part` is flushed to disk first.

    `check` is called right before the first rename; if it raises, nothing has changed. Unfinished directories of other
    writers are removed too.
    """
    for file in part.rglob("*"):
        flush(file)
    flush(part)
    # Listed before the check: this process may hang after it, and another writer may have begun a new part by then.
    stale = [other for other in path.parent.glob(f"{glob.escape(_part(path))}-*") if other != part]
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
    for other in stale:
        shutil.rmtree(other, ignore_errors=True)


def repair(path: Path) -> None:
    """Undo or complete a `replace` that a crash interrupted."""
    old = _replaced(path)
    if old.exists() and not path.exists():
        old.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def flush(path: Path) -> None:
    """Force a file's bytes, or the names in a directory, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _part(path: Path) -> str:
    return f".{path.name}.part"


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")
