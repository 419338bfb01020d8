"""The metrics of a run: always in `metrics.jsonl`, and in any further sinks.

Owns the format of a row, and which rows are deleted when a run returns to a checkpoint. Promises that `metrics.jsonl`
has one row per kind, job, step and evaluation set, over all attempts: for the step that the current model went through.
When a crash rolls steps back, `roll_back` removes their rows before the steps are trained again. There is one writer,
rank 0 of the trainer, and `check` refuses a superseded one. A row that cannot be written costs no step (see
`pipeline.utils.append_log`). Must not know torch, nor the meaning of a number.

    row: {"kind": "train", "job": "rl", "step": 25, "time": 1767225600.0, "attempt": "12-0", "reward/mean": 0.4, …}

`kind` is `train` (one row per step), `eval` (one row per evaluation) or `goodput` (one row at the end of each trainer
process that ends in order; of the whole run so far); `time` is seconds since the epoch. A row of an evaluation set has
the set's name as `set`. A number that is not finite becomes null, which readers treat as absent.

The file may have been damaged or edited. `decode_row` is the one place where a line becomes a row: readers rely on the
types that it promises.

A run that executes job files counts the steps of all files together, and names the file and its step in each row:

    row: {"kind": "train", "job": "sft", "step": 9, …, "file": "007-sft", "written": 17672…, "done": 1, "of": 4, …}
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import msgspec

from pipeline.utils.append_log import AppendLog, rewrite_lines

Kind = Literal["train", "eval", "goodput"]
MetricRecord = dict[str, Any]
_JOBS = ("sft", "preference", "rl")
_REQUIRED = {"kind", "job", "step", "time"}
_FILE_STEP = {"file", "written", "done", "of"}
_NUMBER = (int, float)
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("kind", "job", "attempt", "set", "file"), (str,)),
    **dict.fromkeys(("step", "written", "done", "of"), (int,)),
    "time": _NUMBER,
}
"""The types of the fields that are no metrics."""
_METRIC = (*_NUMBER, type(None))
_MAX_NUMBER = 3.4e38
"""About the largest float32. Sums and axis limits of larger numbers overflow, and no metric is as large."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileStep:
    """A step of a job file: the file's name, its modification time `written` (ns; a file that is written again is
    another job), and how many of its `of` steps are `done`, including this one."""

    file: str
    written: int
    done: int
    of: int


class Sink(Protocol):
    """Receives every new row once; called by the one writer, in order."""

    def write(self, row: MetricRecord) -> None: ...

    def close(self) -> None: ...


class MetricSinks:
    """Writes rows to `metrics.jsonl` and passes them to further sinks."""

    def __init__(
        self,
        path: Path,
        attempt: str,
        sinks: Sequence[Sink] = (),
        clock: Callable[[], float] = time.time,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Every row gets `attempt` and the `clock`'s time.

        `check` is called before each write, and raises `SupersededError` when this attempt may write no more.
        """
        self._attempt, self._sinks, self._clock = attempt, tuple(sinks), clock
        self._journal = AppendLog(path, check)

    def log(
        self,
        kind: Kind,
        job: str,
        step: int,
        values: Mapping[str, float],
        file_step: FileStep | None = None,
        eval_set: str = "",
    ) -> None:
        """Write one row, to the file at once or, if that fails, together with a later row."""
        numbers: MetricRecord = {name: value if math.isfinite(value) else None for name, value in values.items()}
        head = {"kind": kind, "job": job, "step": step, "time": self._clock(), "attempt": self._attempt}
        named = {"set": eval_set} if eval_set else {}
        fields = head | named | (asdict(file_step) if file_step else {})
        row = fields | numbers | fields  # the fields come first, and no number replaces one
        self._journal.add(msgspec.json.encode(row))
        for sink in self._sinks:
            sink.write(row)

    def flush(self) -> None:
        """Try to have all rows on disk, since a checkpoint covers their steps."""
        self._journal.flush()

    def close(self) -> None:
        """Close all sinks."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def roll_back(
    path: Path, job: str, done: int, check: Callable[[], None] = lambda: None, aside: Path | None = None
) -> int:
    """Drop the rows of steps after step `done` of `job`, from which the run continues. The file is then a new file.

    An evaluation of a policy version that remains keeps its row, however late it arrived. `check`, `aside` and the
    result are as in `rewrite_lines`.
    """
    newest = _JOBS.index(job), done

    def stays(line: bytes, _end: int) -> bool:
        row = decode_row(line)
        return row is not None and (_JOBS.index(row["job"]), row["step"]) <= newest

    return rewrite_lines(path, stays, check, aside=aside)


def roll_back_file(
    path: Path, begun: FileStep, check: Callable[[], None] = lambda: None, aside: Path | None = None
) -> int:
    """Drop the rows of a job file after its step `begun`; returns the last step that still has a row.

    `check` and `aside` are as in `rewrite_lines`.
    """

    def stays(line: bytes, _end: int) -> bool:
        row = decode_row(line)
        same = row is not None and (row.get("file"), row.get("written")) == (begun.file, begun.written)
        return row is not None and not (same and row["done"] > begun.done)

    rewrite_lines(path, stays, check, aside=aside)
    return max((row["step"] for row in read_rows(path)), default=0)


class Console:
    """Logs a short line per row."""

    NAMES = ("loss", "eval/loss", "reward/mean", "eval/accuracy", "staleness/max", "tokens_per_second", "goodput/ratio")

    def write(self, row: MetricRecord) -> None:
        numbers = " ".join(f"{name}={row[name]:.4g}" for name in self.NAMES if row.get(name) is not None)
        _log.info("%s step %d %s", row["job"], row["step"], numbers)

    def close(self) -> None:
        return


class RowReader:
    """Reads a growing `metrics.jsonl`, and keeps no rows. After a later attempt has rolled rows back, it starts again.

    Attributes:
        is_first: whether the last `read` began with the first row of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._position = path, 0, 0
        self.is_first = True

    def read(self) -> list[MetricRecord]:
        """The complete rows since the last call, all rows after a restart; empty when there is no file."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                # A rollback replaces the file, so its inode changes or its size shrinks.
                if status.st_ino != self._file or status.st_size < self._position:
                    self._file, self._position = status.st_ino, 0
                self.is_first = self._position == 0
                file.seek(self._position)
                # A partial last line is left for the next call.
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._position += len(whole) + len(newline)
        return [row for line in whole.split(b"\n") if (row := decode_row(line)) is not None]


def read_rows(path: Path) -> list[MetricRecord]:
    """All complete rows of a `metrics.jsonl`, in order; empty without a file. Safe while it is being written."""
    return RowReader(path).read()


def series(rows: Iterable[MetricRecord], name: str, job: str = "rl") -> list[tuple[int, float]]:
    """The (step, value) pairs of one metric of a job, where it has a value."""
    return [(row["step"], row[name]) for row in rows if row["job"] == job and row.get(name) is not None]


def decode_row(line: bytes) -> MetricRecord | None:
    """The row of a line; None for a line that is no row.

    `kind`, `job`, `step` and `time` have the types of the module's docstring. `attempt` and `set` are texts or absent,
    and the fields of a job file are present together or not at all. Every other value is a number or null: all else is
    left out, also numbers beyond those of float32.
    """
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    row = {name: value for name, value in fields.items() if _is_valid(name, value)}
    if not row.keys() >= _REQUIRED or row["job"] not in _JOBS:
        return None
    if not row.keys() >= _FILE_STEP:
        for name in row.keys() & _FILE_STEP:
            del row[name]
    return row


def _is_valid(name: str, value: object) -> bool:
    # By exact type: a bool is an int to `isinstance`.
    if type(value) not in _TYPES.get(name, _METRIC):
        return False
    return not isinstance(value, _NUMBER) or abs(value) <= _MAX_NUMBER
