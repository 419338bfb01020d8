"""Directories that are replaced as a whole.

Owns how a job's model takes its name. Promises that who looks at the name finds the old directory or the new one,
whole; only a crash between two renames leaves neither, and `mend` puts the old one back.

    mend(path)
    part = unfinished(path)
    …write part…
    replace(path, part)
"""

import os
import shutil
from pathlib import Path


def unfinished(path: Path) -> Path:
    """Where what will become `path` is written; whatever an earlier writer left there is removed."""
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    return part


def replace(path: Path, part: Path) -> None:
    """Give `part` the name `path`; what had it is removed. `part` is on disk before it has the name."""
    for file in part.rglob("*"):
        if file.is_file():
            _flush(file)
    old = _replaced(path)
    if path.exists():
        path.rename(old)
    part.rename(path)
    _flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def mend(path: Path) -> None:
    """Undo or end a `replace` that a crash cut short."""
    old = _replaced(path)
    if old.exists() and not path.exists():
        old.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
