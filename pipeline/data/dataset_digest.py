"""One digest of all rows, by which a resumed run recognizes its data.

Owns the computation of the digest: it depends on every value of the digested rows and on their order, and on nothing
else, such as the time or path of a file, or the version of a library. Pure.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


class DatasetDigest:
    """Accumulates rows into a digest."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        body = json.dumps(row, sort_keys=True, ensure_ascii=False, default=repr).encode("utf-8", "surrogatepass")
        self._hash.update(b"%d:" % len(body) + body)

    @property
    def digest(self) -> str:
        """The digest of the rows so far, as 32 hex digits."""
        return self._hash.hexdigest()[:32]
