"""Where the numbers of a run go: `metrics.jsonl` always, and any further sinks.

Owns the form of a row and the rule for replays. Promises that `metrics.jsonl` has at most one row for each kind, job
and step, in rising order, over all attempts: a row at or below the last one of its kind (the high-water mark, read from
the file at the start) belongs to a step that was trained again after a resume, and is skipped. A last line torn by a
crash is removed at the start. There is one writer, rank 0 of the trainer, and `check` refuses one that another has
replaced. Must not know torch, nor what a number means.

    row: {"kind": "train", "job": "rl", "step": 25, "time": 1767225600.0, "attempt": "12-0", "reward/mean": 0.4, …}

`kind` is `train` (one row a step) or `eval` (one row a held-out evaluation); `time` is seconds since the
epoch. A number that is not finite becomes null, which readers treat as absent.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import msgspec

Kind = Literal["train", "eval"]
Row = dict[str, Any]
_JOBS = ("sft", "rl")
_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives every new row once; called from the one writer, in order."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class MetricSinks:
    """Writes rows to `metrics.jsonl` and hands them to further sinks."""

    def __init__(
        self,
        path: Path,
        attempt: str,
        sinks: Sequence[Sink] = (),
        clock: Callable[[], float] = time.time,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Open `path` for appending, after repairing its end; every row gets `attempt` and the `clock`'s time.

        `check` is called before anything is written, and raises when this attempt may write no more.
        """
        self._attempt, self._sinks, self._clock, self._check = attempt, tuple(sinks), clock, check
        check()
        path.parent.mkdir(parents=True, exist_ok=True)
        _repair(path)
        self._marks = {(row["kind"], row["job"]): row["step"] for row in read_rows(path)}
        self._file = path.open("ab", buffering=0)

    @property
    def cursor(self) -> int:
        """Bytes of `metrics.jsonl` written so far."""
        return self._file.tell()

    def log(self, kind: Kind, job: str, step: int, values: Mapping[str, float]) -> bool:
        """Write one row; False when this step of this kind is logged already."""
        if step <= self._marks.get((kind, job), -1) or self._later_job_began(job):
            return False
        self._check()
        self._marks[kind, job] = step
        numbers = {name: value if math.isfinite(value) else None for name, value in values.items()}
        head = {"kind": kind, "job": job, "step": step, "time": self._clock(), "attempt": self._attempt}
        row: Row = head | numbers
        self._file.write(msgspec.json.encode(row) + b"\n")
        for sink in self._sinks:
            sink.write(row)
        return True

    def close(self) -> None:
        """Flush and close all sinks."""
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _later_job_began(self, job: str) -> bool:
        return job == "sft" and any(other == "rl" for _, other in self._marks)


class Console:
    """Logs a short line for each row."""

    NAMES = ("loss", "reward/mean", "eval/accuracy", "lag/max", "tokens_per_second")

    def write(self, row: Row) -> None:
        numbers = " ".join(f"{name}={row[name]:.4g}" for name in self.NAMES if row.get(name) is not None)
        _log.info("%s step %d %s", row["job"], row["step"], numbers)

    def close(self) -> None:
        return


class RowReader:
    """Reads a `metrics.jsonl` that grows: `rows` are all whole rows up to the last `read`."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0
        self.rows: list[Row] = []

    def read(self) -> list[Row]:
        """The whole rows that are new since the last call; none when the file does not exist."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._position += len(whole) + len(newline)
        new = [row for line in whole.split(b"\n") if (row := _decode(line)) is not None]
        self.rows += new
        return new


def read_rows(path: Path) -> list[Row]:
    """All whole rows of a `metrics.jsonl`, in order; empty when there is none. Safe while it is being written."""
    return RowReader(path).read()


def series(rows: Iterable[Row], name: str, job: str = "rl") -> list[tuple[int, float]]:
    """The (step, value) pairs of one number of a job, where it has a value."""
    return [(row["step"], row[name]) for row in rows if row["job"] == job and row.get(name) is not None]


def _decode(line: bytes) -> Row | None:
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return row if isinstance(row, dict) and {"kind", "job", "step", "time"} <= row.keys() else None


def _repair(path: Path) -> None:
    """Cut a last line that was not written to its end."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
