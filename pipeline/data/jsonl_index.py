"""Rows of JSON files by number, as they are written.

Owns reading rows from JSONL, or from a JSON list. Promises each row exactly as written: the library `datasets` converts
JSON to columns, so that a text such as "2" becomes the number 2 if another row has a list there, and every object gets
the keys of all others. Only the offset of each line is kept in memory, so a file may be larger than memory. A line that
is no object is reported when it is read.

In a folder, the part of a file's name before the first `-` or `.` is its split: `train.jsonl`,
`train-00000-of-00002.jsonl`. If no file is named `train`, all files belong to it, unless one is named like held-out
rows.
"""

import json
import re
from array import array
from bisect import bisect_right
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from pipeline.errors import RecordError

SUFFIXES = (".jsonl", ".json")
EVAL_SPLITS = ("test", "validation", "valid", "val", "dev", "eval")
"""Names of files, alone or before a `_`, whose rows are not meant for training."""
PEEK_ROWS = 1000
"""Number of rows from which the column names are collected; a row may lack some."""
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_SURROGATE = re.compile(rf"{_HIGH}(?!{_LOW})|(?<!{_HIGH}){_LOW}")
"""Half of a surrogate pair, as JSON escapes it; or the same letters behind another backslash."""


class JsonRows:
    """The rows of several files, one after the other."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._parts = [_List(path) if _is_list(path) else _Lines(path) for path in paths]
        self._ends = list(accumulate(len(part) for part in self._parts))
        self.columns = self._columns()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Row `index`; `RecordError` when its line is no object, `IndexError` when it does not exist."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        # `_ends[i]` is the number of rows in files 0 … i.
        number = bisect_right(self._ends, index)
        part = self._parts[number]
        return part.row(index - self._ends[number] + len(part))

    def location(self, index: int) -> str:
        """The file of row `index` and its line there, counted from 1 as in editors."""
        number = bisect_right(self._ends, index)
        part = self._parts[number]
        return part.location(index - self._ends[number] + len(part))

    def _columns(self) -> tuple[str, ...]:
        """The columns of the first readable rows; raises the error of the first row when none is readable."""
        seen = list[Mapping[str, Any]]()
        for index in range(min(len(self), PEEK_ROWS)):
            with suppress(RecordError):
                seen.append(self[index])
        if len(self) and not seen:
            self[0]
        return tuple(dict.fromkeys(name for row in seen for name in row))


class _Lines:
    """A file with one object per line; empty lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("q")
        self._blanks = array("q")  # for each empty line, the number of rows before it
        self._index(path)
        with path.open("rb") as file:
            self._map = mmap(file.fileno(), 0, access=ACCESS_READ) if len(self._starts) else None

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Mapping[str, Any]:
        start = self._starts[index]
        assert self._map is not None, "there are rows"
        end = self._map.find(b"\n", start)
        return _object(self._map[start : end if end >= 0 else None], self.location(index))

    def location(self, index: int) -> str:
        return f"{self._path.name}, line {index + 1 + bisect_right(self._blanks, index)}"

    def _index(self, path: Path) -> None:
        position = 0
        with path.open("rb") as file:
            for line in file:
                if line.isspace():
                    self._blanks.append(len(self._starts))
                else:
                    self._starts.append(position)
                position += len(line)


class _List:
    """A file with one JSON list of objects, which must fit into memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            text = path.read_text("utf-8-sig")
            self._rows = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{path} is no JSON: {error}") from None
        self._escapes = bool(_SURROGATE.search(text))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Mapping[str, Any]:
        return _checked(self._rows[index], self.location(index), self._escapes)

    def location(self, index: int) -> str:
        return f"{self._path.name}, entry {index + 1}"


def files_of(folder: Path, split: str) -> list[Path]:
    """The JSON files of a split, by name; empty if there are none."""
    return _by_split(folder).get(split, [])


def splits_of(folder: Path) -> list[str]:
    """The splits that `files_of` accepts for a folder."""
    return sorted(_by_split(folder))


def _by_split(folder: Path) -> dict[str, list[Path]]:
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    named: dict[str, list[Path]] = {}
    for path in files:
        named.setdefault(_split_of(path), []).append(path)
    held_out = any(name.partition("_")[0] in EVAL_SPLITS for name in named)
    return named if "train" in named or held_out else named | {"train": files}


def _split_of(path: Path) -> str:
    return re.split(r"[-.]", path.stem, maxsplit=1)[0]


def _is_list(path: Path) -> bool:
    if path.suffix != ".json":
        return False
    with path.open("rb") as file:
        head = file.read(64).removeprefix(BOM_UTF8).lstrip()
        while not head and (more := file.read(4096)):
            head = more.lstrip()
    return head.startswith(b"[")


def _object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        text = line.decode("utf-8-sig")
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(f"{where}: no JSON: {error.msg}, column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # RecursionError: nested deeper than Python can read
        raise RecordError(f"{where}: no JSON: {error}") from None
    return _checked(row, where, bool(_SURROGATE.search(text)))


def _checked(row: Any, where: str, escapes: bool) -> Mapping[str, Any]:
    """The row; `RecordError` unless it is an object, or if it has half of a surrogate pair, which no tokenizer takes.
    Only JSON's escapes can contain one."""
    if not isinstance(row, dict):
        raise RecordError(f"{where}: expected an object, found {type(row).__name__}")
    if escapes:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            raise RecordError(f"{where}: no text: {half} is half of a surrogate pair") from None
    return row
