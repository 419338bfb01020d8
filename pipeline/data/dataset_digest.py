"""One digest of all rows, by which a resumed run knows its data again.

Owns how content becomes a digest: it depends on every value of the rows that are digested and on their order, and on
nothing else, such as the time of a file, its place, or the version of a library. Pure.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


class DatasetDigest:
    """Adds rows up to a digest."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a row in."""
        body = json.dumps(row, sort_keys=True, ensure_ascii=False, default=repr).encode("utf-8", "surrogatepass")
        self._hash.update(b"%d:" % len(body) + body)

    @property
    def digest(self) -> str:
        """Of the rows so far, as 32 hex digits."""
        return self._hash.hexdigest()[:32]
