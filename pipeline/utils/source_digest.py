"""A digest of a part of this project's code, for results that are remembered until that code changes."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder that contains the packages, in a checkout, a run's snapshot, or an installation."""


def source_digest(folders: Iterable[str]) -> str:
    """SHA-256, in hex, of the paths and contents of all Python files below `folders`, which are relative to `ROOT`."""
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
