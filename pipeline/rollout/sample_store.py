"""Samples that are saved for inspection.

Owns the Parquet segments of samples below a run's directory: their columns, writing and retention. Promises that
producers never block: a thread writes the samples, drops them when its queue is full, and logs one warning if the disk
fails or a sample does not fit its columns; that a segment under its final name is complete; that a superseded attempt
neither adds nor removes segments; and that the total size stays below a bound: above it the newer half is retained, and
the older half is thinned evenly.

    with SampleStore(folder, attempt, bound, fence.check) as store:
        store.add(records_of_group(prepared, "countdown"))

Any Parquet reader can read them, one row per sample: `pandas.read_parquet("runs/demo/rollouts/train")`. `COLUMNS`
explains each column. A failed sample has its reason and no tokens. An episode of several rows has their tokens one
after the other, with the lengths in `row_lengths`.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from pipeline.algorithms.advantage_estimators import ADVANTAGE_ESTIMATORS
from pipeline.transport.sample_records import PreparedGroup, Sample
from pipeline.transport.turn_times import TurnTimes

log = logging.getLogger(__name__)

COLUMNS = {
    "time": "float64",  # seconds since the epoch when the sample was added
    "attempt": "string",
    "eval_set": "string",  # null for a training sample
    "task": "string",
    "position": "int64",  # in the run's order of prompts (the ledger's); in an evaluation the prompt's index
    "prompt": "int64",  # index in the task's dataset
    "fingerprint": "string",  # of its group's samples, as in the ledger: distinguishes two samplings of a position
    "sample": "int32",  # index in its group
    "outcome": "string",  # the preprocessor's verdict on its group: train, filtered: …, failed: …
    "failure": "string",  # reason of a failed sample; else null
    "reward": "float64",
    "advantage": "float64",  # as computed from its group; null where the trainer computes it
    "metrics": "map",  # the sample's metrics by name
    "finish": "string",  # stop, or length if it was truncated
    "turns": "int32",
    "seconds": "float64",
    "server": "string",
    "version_min": "int64",  # oldest and newest policy version that sampled a token
    "version_max": "int64",
    "length": "int32",  # tokens of the sample, prompt included, in all rows of its episode
    "sampled": "int32",  # number of sampled tokens
    "row_lengths": "list<int32>",  # tokens of each row of the episode, in the order of the rows
    "tokens": "list<int32>",
    "mask": "list<uint8>",  # 1 where the policy sampled the token; a shared prefix counts in the first of its rows
    "logprobs": "list<float32>",  # of the sampled tokens, 0 elsewhere
    "versions": "list<int32>",  # the policy version that sampled each token, 0 where mask is 0
    "turn_times": "list<turn>",  # server and seconds of each turn, see `pipeline.transport.turn_times.TurnTimes`
}
UNLOADED_COLUMNS = ("row_lengths", "tokens", "mask", "logprobs", "versions", "turn_times")
"""Columns that readers load for a few samples only."""
TRAIN, EVAL = "train", "eval"
"""Folders of training samples and of evaluation samples."""
DISK_FRACTIONS = {TRAIN: 0.75, EVAL: 0.25}
"""Fraction of the bound per folder."""
SUFFIX = ".parquet"
SEGMENT_BYTES, SEGMENT_SECONDS = 1 << 22, 20.0
MAX_WAITING = 256
CLOSE_SECONDS, MIN_WAIT = 5.0, 0.1
SampleRecord = dict[str, Any]


class SampleStore:
    """Writes segments below `folder`, at most `bound` bytes of them; with 0 it stores nothing."""

    def __init__(self, folder: Path, attempt: str, bound: int, check: Callable[[], None] = lambda: None) -> None:
        """`check` raises if this attempt may no longer write (`pipeline.checkpoints.fencing`)."""
        self._folder, self._attempt, self._bound, self._check = folder, attempt, bound, check
        self._waiting: queue.Queue[list[SampleRecord] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="kept samples", daemon=True)
        self._warned = self._begun = False
        self.dropped = 0

    def add(self, rows: list[SampleRecord]) -> None:
        """Store these rows, or drop them if the queue is full."""
        if not self._bound:
            return
        for row in rows:
            row["attempt"] = self._attempt
        try:
            self._waiting.put_nowait(rows)
        except queue.Full:
            self.dropped += len(rows)

    def __enter__(self) -> Self:
        if self._bound:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the queued rows, for at most `CLOSE_SECONDS`."""
        if not self._bound:
            return
        try:
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)
        if self.dropped:
            log.warning("%d samples came too fast to be stored", self.dropped)

    def _write_all(self) -> None:
        """Write a segment whenever its rows are large enough, or its first row has waited long enough."""
        table_of([])  # imports Arrow ahead of the first segment, and ahead of the bounded wait at the end
        rows, size, since = list[SampleRecord](), 0, time.monotonic()
        batch: list[SampleRecord] | None = []
        while batch is not None:
            batch = self._next(since + SEGMENT_SECONDS - time.monotonic())
            for row in batch or ():
                # Between two groups only: readers find all samples of a group in one segment.
                if size >= SEGMENT_BYTES and row["position"] != rows[-1]["position"]:
                    self._write(rows)
                    rows, size = [], 0
                since = since if rows else time.monotonic()
                rows.append(row)
                size += record_bytes(row)
            if rows and (batch is None or time.monotonic() - since >= SEGMENT_SECONDS):
                self._write(rows)
                rows, size = [], 0
            since = since if rows else time.monotonic()

    def _next(self, seconds: float) -> list[SampleRecord] | None:
        """Rows added within `seconds`, possibly none; None at the end."""
        try:
            return self._waiting.get(timeout=max(MIN_WAIT, seconds))
        except queue.Empty:
            return []

    def _write(self, rows: Sequence[SampleRecord]) -> None:
        try:
            self._check()
            if not self._begun:  # once: parts of killed attempts belong to no writer
                remove_parts(self._folder)
                self._begun = True
            try:
                write_segment(self._folder, self._attempt, rows, self._check)
            except (ValueError, TypeError, OverflowError) as error:  # what Arrow raises for a value
                storable = [row for row in rows if _is_storable(row)]
                if not 0 < len(storable) < len(rows):
                    raise
                self._drop(len(rows) - len(storable), error)
                write_segment(self._folder, self._attempt, storable, self._check)
            delete_oldest(self._folder, self._bound)
        except Exception as error:  # noqa: BLE001 a failing disk may cost samples, and nothing else
            self._drop(len(rows), error)

    def _drop(self, count: int, error: Exception) -> None:
        self.dropped += count
        if not self._warned:
            self._warned = True
            log.warning("samples are not stored in %s: %s", self._folder, error)


def write_segment(
    folder: Path, attempt: str, rows: Sequence[SampleRecord], check: Callable[[], None] = lambda: None
) -> Path:
    """Write one segment, named by the current time, and return its path. If `check` raises after writing, the file is
    removed."""
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
    """Remove partial files of attempts that were killed while writing; the bound does not count them."""
    for part in folder.glob(f".*{SUFFIX}.part"):
        with suppress(OSError):
            part.unlink()


def _is_storable(row: SampleRecord) -> bool:
    """Whether the columns can hold a row's values. A task may report numbers beyond an int32, such as of turns."""
    try:
        table_of([row])
    except (ValueError, TypeError, OverflowError):
        return False
    return True


def table_of(rows: Sequence[SampleRecord]) -> Any:
    """An Arrow table of rows."""
    import pyarrow as pa

    return pa.Table.from_pylist(list(rows), schema=schema())


def schema() -> Any:
    """The columns with Arrow's types."""
    import pyarrow as pa

    kinds = {
        "map": pa.map_(pa.string(), pa.float64()),
        "list<int32>": pa.list_(pa.int32()),
        "list<uint8>": pa.list_(pa.uint8()),
        "list<float32>": pa.list_(pa.float32()),
        "list<turn>": pa.list_(pa.struct(_turn_fields())),
    }
    return pa.schema([(name, kinds.get(kind) or getattr(pa, kind)()) for name, kind in COLUMNS.items()])


def _turn_fields() -> list[Any]:
    """The fields of `TurnTimes` with Arrow's types."""
    import pyarrow as pa

    kinds = {int: pa.int32(), str: pa.string()}
    return [(field.name, kinds.get(field.type, pa.float32())) for field in msgspec.structs.fields(TurnTimes)]


def segments(folder: Path) -> list[Path]:
    """The segments of a folder, oldest first; empty if the folder does not exist."""
    return sorted(file for file in folder.glob(f"*{SUFFIX}") if not file.name.startswith("."))


def delete_oldest(folder: Path, bound: int) -> None:
    """Remove segments beyond the bound. Another attempt that still writes here may remove some of them first."""
    sizes = dict[Path, int]()
    for file in segments(folder):
        with suppress(FileNotFoundError):
            sizes[file] = file.stat().st_size
    for file in segments_over(sizes, bound):
        file.unlink(missing_ok=True)


def segments_over(sizes: dict[Path, int], bound: int) -> list[Path]:
    """The segments to remove so that the rest fits `bound`. `sizes` has the bytes of each segment, oldest first.

    The newest segments that fill half of the bound stay. Of the older ones, the segment whose neighbors are closest to
    each other is removed first, repeatedly, so that the rest covers the whole time evenly. The first stays longest.
    """
    left, removed, total = list(sizes), list[Path](), sum(sizes.values())
    ranks = {file: rank for rank, file in enumerate(sizes)}
    while total > bound and len(left) > 1:
        old = len(left) - _newest(left, sizes, bound // 2)
        # Candidates exclude the first segment and those of the newest half.
        gaps = {index: ranks[left[index + 1]] - ranks[left[index - 1]] for index in range(1, min(old, len(left) - 1))}
        chosen = min(gaps, key=gaps.__getitem__) if gaps else 0
        total -= sizes[left[chosen]]
        removed.append(left.pop(chosen))
    return removed


def _newest(left: Sequence[Path], sizes: dict[Path, int], bound: int) -> int:
    """The number of newest segments that fit a bound; at least one."""
    total = 0
    for count, file in enumerate(reversed(left)):
        total += sizes[file]
        if total > bound:
            return max(1, count)
    return len(left)


def without_copies(rows: Iterable[SampleRecord]) -> Iterator[SampleRecord]:
    """The rows of training samples, each sample once: an actor that is restarted may send a finished group again, and
    the preprocessor stores what it gets."""
    seen = set[tuple[int, str, int]]()
    for row in rows:
        key = row["position"], row["fingerprint"], row["sample"]
        if key not in seen:
            seen.add(key)
            yield row


def records_of_group(prepared: PreparedGroup, task: str, estimator: str) -> list[SampleRecord]:
    """The rows of a training group, with their advantages if `estimator` computes them from the group."""
    group = prepared.group
    trained: list[float | None] = [*prepared.advantages] if ADVANTAGE_ESTIMATORS[estimator].within_group else []
    advantages = trained or [None] * len(group.samples)
    head = {
        "task": group.task or task,
        "position": group.position,
        "prompt": group.prompt,
        "fingerprint": group.fingerprint(),
        "outcome": prepared.outcome,
    }
    rows = [record_of(sample) | {"advantage": one} for sample, one in zip(group.samples, advantages, strict=True)]
    rows += [record_of(failure) for failure in group.failures]
    return [{**head, "sample": index, **row} for index, row in enumerate(rows)]


def records_of_evaluation(
    outcomes: Sequence[Sequence[Sample | str]], task: str, eval_set: str, labels: Sequence[str] = ()
) -> list[SampleRecord]:
    """The rows of an evaluation: for each prompt its samples, or the reasons of the failed ones. `labels` are the tasks
    of the prompts of a mix, in order."""
    tasks = labels or [task] * len(outcomes)
    return [
        {
            "task": tasks[prompt],
            "eval_set": eval_set,
            "position": prompt,
            "prompt": prompt,
            "sample": index,
            **record_of(outcome),
        }
        for prompt, of_prompt in enumerate(outcomes)
        for index, outcome in enumerate(of_prompt)
    ]


def record_of(outcome: Sample | str) -> SampleRecord:
    """The row of a sample, or of the reason of a failed sample."""
    now = {"time": time.time()}
    if isinstance(outcome, str):
        return {**now, "failure": outcome}
    rows = outcome.rows()
    columns = zip(*(row.stored() for row in rows), strict=True)
    tokens, sampled, logprobs, versions = (np.concatenate(arrays) for arrays in columns)
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
        "versions": versions,
        "turn_times": [msgspec.structs.asdict(turn) for turn in outcome.turn_times],
    }


def record_bytes(row: SampleRecord) -> int:
    """The approximate size of a row before compression, in bytes."""
    return 200 + 9 * int(row.get("length") or 0) + 40 * len(row.get("turn_times") or ())
