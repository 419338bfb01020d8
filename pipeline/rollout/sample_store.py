"""Samples that are kept to be looked at.

Owns the Parquet segments of samples below a run's directory: their columns, how they are written, and how many stay.
Promises that whoever hands over samples never waits: a thread writes them, what comes too fast is left out, and a disk
that fails costs samples and a warning; that a segment is whole or has another name; that an attempt which another one
has replaced neither adds nor removes any; and that all of them together stay below a bound: above it the newer half
stays, and the older half is thinned out evenly.

    with SampleStore(folder, attempt, bound, fence.check) as kept:
        kept.add(records_of_group(prepared, "countdown"))

Any reader of Parquet reads them, one row a sample: `pandas.read_parquet("runs/demo/rollouts/train")`. Each column is
explained at `COLUMNS`. A sample that failed has its reason and no tokens; one whose episode has several rows has them
one after the other, and `row_lengths` says where each ends.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from pipeline.transport.group_advantages import REWARDS_ONLY, Baseline
from pipeline.transport.sample_records import PreparedGroup, Sample

log = logging.getLogger(__name__)

COLUMNS = {
    "time": "float64",  # seconds since the epoch when it was handed over
    "attempt": "string",
    "eval_set": "string",  # of a sample of training, null
    "task": "string",
    "position": "int64",  # in the run's order of prompts (the ledger's); of an evaluation the place of the prompt
    "prompt": "int64",  # index in the task's dataset
    "sample": "int32",  # place in its group
    "outcome": "string",  # what the preprocessor made of its group: train, filtered: …, failed: …
    "failure": "string",  # why there is no sample; null if there is one
    "reward": "float64",
    "advantage": "float64",  # as its group alone tells it; null where the trainer makes it
    "metrics": "map",  # each number about it by its name
    "finish": "string",  # stop, or length if it was cut off
    "turns": "int32",
    "seconds": "float64",
    "server": "string",
    "version_min": "int64",  # oldest and newest weights that sampled a token
    "version_max": "int64",
    "length": "int32",  # tokens of the sample, prompt included, in all rows of its episode
    "sampled": "int32",  # of them, those that the policy sampled
    "row_lengths": "list<int32>",  # tokens of each row of the episode, in the order of the rows
    "tokens": "list<int32>",
    "mask": "list<uint8>",  # 1 where the policy sampled the token; what rows share counts in the first of them
    "logprobs": "list<float32>",  # of the sampled tokens, 0 elsewhere
}
UNLOADED_COLUMNS = ("row_lengths", "tokens", "mask", "logprobs")
"""The columns that are read of a few samples only."""
TRAIN, EVAL = "train", "eval"
"""The folders of samples of training and of evaluations."""
DISK_FRACTIONS = {TRAIN: 0.75, EVAL: 0.25}
"""Of the bound, what each may take."""
SUFFIX = ".parquet"
SEGMENT_BYTES, SEGMENT_SECONDS = 1 << 22, 20.0
MAX_WAITING = 256
CLOSE_SECONDS, LEAST_WAIT = 5.0, 0.1
SampleRecord = dict[str, Any]


class SampleStore:
    """Writes segments below `folder`, at most `bound` bytes of them; 0 keeps nothing."""

    def __init__(self, folder: Path, attempt: str, bound: int, check: Callable[[], None] = lambda: None) -> None:
        """`check` raises where this attempt may not write (`pipeline.checkpoints.fencing`)."""
        self._folder, self._attempt, self._bound, self._check = folder, attempt, bound, check
        self._waiting: queue.Queue[list[SampleRecord] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="kept samples", daemon=True)
        self._warned = self._begun = False
        self.left_out = 0

    def add(self, rows: list[SampleRecord]) -> None:
        """Keep these rows, or leave them out if too many wait to be written."""
        if not self._bound:
            return
        for row in rows:
            row["attempt"] = self._attempt
        try:
            self._waiting.put_nowait(rows)
        except queue.Full:
            self.left_out += len(rows)

    def __enter__(self) -> Self:
        if self._bound:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what waits, for at most `CLOSE_SECONDS`."""
        if not self._bound:
            return
        try:
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)
        if self.left_out:
            log.warning("%d samples came too fast to be kept", self.left_out)

    def _write_all(self) -> None:
        """Write a segment whenever there is enough for one, or when its first row has waited long enough."""
        table_of([])  # imports Arrow, and what that imports, before there is work or anybody waits for the end
        rows, size, since = list[SampleRecord](), 0, time.monotonic()
        got: list[SampleRecord] | None = []
        while got is not None:
            got = self._next(since + SEGMENT_SECONDS - time.monotonic())
            for row in got or ():
                since = since if rows else time.monotonic()
                rows.append(row)
                size += record_bytes(row)
                if size >= SEGMENT_BYTES:
                    self._write(rows)
                    rows, size = [], 0
            if rows and (got is None or time.monotonic() - since >= SEGMENT_SECONDS):
                self._write(rows)
                rows, size = [], 0
            since = since if rows else time.monotonic()

    def _next(self, seconds: float) -> list[SampleRecord] | None:
        """What was handed over within so many seconds, maybe nothing; None at the end."""
        try:
            return self._waiting.get(timeout=max(LEAST_WAIT, seconds))
        except queue.Empty:
            return []

    def _write(self, rows: Sequence[SampleRecord]) -> None:
        try:
            self._check()
            if not self._begun:  # what is half written is nobody's who may write
                remove_parts(self._folder)
                self._begun = True
            write_segment(self._folder, self._attempt, rows, self._check)
            delete_oldest(self._folder, self._bound)
        except Exception as error:  # noqa: BLE001 - the samples are lost, and nothing else may be
            self.left_out += len(rows)
            if not self._warned:
                self._warned = True
                log.warning("samples are not kept in %s: %s", self._folder, error)


def write_segment(
    folder: Path, attempt: str, rows: Sequence[SampleRecord], check: Callable[[], None] = lambda: None
) -> Path:
    """Write one segment, named by now, and return its path; nothing is left of it where `check` raises at its end."""
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{time.time_ns():020d}-{attempt}{SUFFIX}"
    part = target.with_name(f".{target.name}.part")
    try:
        parquet.write_table(table_of(rows), part, compression="zstd", use_dictionary=True)
        check()
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)
    return target


def remove_parts(folder: Path) -> None:
    """Remove what attempts left that were killed while they wrote; the bound does not count it."""
    for part in folder.glob(f".*{SUFFIX}.part"):
        with suppress(OSError):
            part.unlink()


def table_of(rows: Sequence[SampleRecord]) -> Any:
    """An Arrow table of rows."""
    import pyarrow as pa

    return pa.Table.from_pylist(list(rows), schema=schema())


def schema() -> Any:
    """The columns as Arrow's types."""
    import pyarrow as pa

    kinds = {
        "map": pa.map_(pa.string(), pa.float64()),
        "list<int32>": pa.list_(pa.int32()),
        "list<uint8>": pa.list_(pa.uint8()),
        "list<float32>": pa.list_(pa.float32()),
    }
    return pa.schema([(name, kinds.get(kind) or getattr(pa, kind)()) for name, kind in COLUMNS.items()])


def segments(folder: Path) -> list[Path]:
    """The segments of a folder, the oldest first; none where there is no folder."""
    return sorted(file for file in folder.glob(f"*{SUFFIX}") if not file.name.startswith("."))


def delete_oldest(folder: Path, bound: int) -> None:
    """Remove what is beyond the bound. Another attempt that still writes here may remove some of it first."""
    sizes = dict[Path, int]()
    for file in segments(folder):
        with suppress(FileNotFoundError):
            sizes[file] = file.stat().st_size
    for file in segments_over(sizes, bound):
        file.unlink(missing_ok=True)


def segments_over(sizes: dict[Path, int], bound: int) -> list[Path]:
    """Which segments, given the oldest first with their bytes, have to go for the rest to stay within `bound`.

    The newest ones that fill half of it stay. Of those before them, the one whose neighbours are nearest to each other
    goes first, again and again, so that what stays covers the whole time evenly; the first of all stays longest.
    """
    left, gone, total = list(sizes), list[Path](), sum(sizes.values())
    places = {file: place for place, file in enumerate(sizes)}
    while total > bound and len(left) > 1:
        old = len(left) - _newest(left, sizes, bound // 2)
        gaps = {index: places[left[index + 1]] - places[left[index - 1]] for index in range(1, min(old, len(left) - 1))}
        chosen = min(gaps, key=gaps.__getitem__) if gaps else 0
        total -= sizes[left[chosen]]
        gone.append(left.pop(chosen))
    return gone


def _newest(left: Sequence[Path], sizes: dict[Path, int], bound: int) -> int:
    """How many of the last stay within a bound; at least one."""
    total = 0
    for count, file in enumerate(reversed(left)):
        total += sizes[file]
        if total > bound:
            return max(1, count)
    return len(left)


def records_of_group(prepared: PreparedGroup, task: str, baseline: Baseline) -> list[SampleRecord]:
    """The rows of a group of training, with the advantages that `baseline` gives."""
    group = prepared.group
    trained: list[float | None] = [*prepared.advantages] if baseline not in REWARDS_ONLY else []
    advantages = trained or [None] * len(group.samples)
    head = {"task": task, "position": group.position, "prompt": group.prompt, "outcome": prepared.outcome}
    rows = [record_of(sample) | {"advantage": each} for sample, each in zip(group.samples, advantages, strict=True)]
    rows += [record_of(failure) for failure in group.failures]
    return [{**head, "sample": place, **row} for place, row in enumerate(rows)]


def records_of_evaluation(outcomes: Sequence[Sequence[Sample | str]], task: str, eval_set: str) -> list[SampleRecord]:
    """The rows of an evaluation: for each prompt of the set its samples, or the reasons why there is none."""
    head = {"task": task, "eval_set": eval_set}
    return [
        {**head, "position": prompt, "prompt": prompt, "sample": place, **record_of(outcome)}
        for prompt, each in enumerate(outcomes)
        for place, outcome in enumerate(each)
    ]


def record_of(outcome: Sample | str) -> SampleRecord:
    """What is kept of a sample, or of the reason why there is none."""
    now = {"time": time.time()}
    if isinstance(outcome, str):
        return {**now, "failure": outcome}
    rows = outcome.rows()
    tokens, sampled, logprobs, _ = (np.concatenate(arrays) for arrays in zip(*rows, strict=True))
    return {
        **now,
        **{name: getattr(outcome, name) for name in ("reward", "finish", "turns", "seconds", "server")},
        "version_min": outcome.version_min,
        "version_max": outcome.version_max,
        "metrics": list(outcome.metrics.items()),
        "length": len(tokens),
        "sampled": int(sampled.sum()),
        "row_lengths": [len(row.tokens) for row in rows],
        "tokens": tokens,
        "mask": sampled,
        "logprobs": logprobs,
    }


def record_bytes(row: SampleRecord) -> int:
    """About what a row takes before it is compressed."""
    return 200 + 9 * int(row.get("length") or 0)
