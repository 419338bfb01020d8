"""Selecting and reading the stored samples of a run.

Samples can be filtered and ordered, and are joined with the ledger (the step that trained them, and their lag).
Segments that are deleted meanwhile or damaged are skipped. Tokens are read only for the selected samples.

    samples = read_samples(run)
    for sample in samples.where(Filter(most_reward=0.0)).worst(5).load(): …
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipeline.rollout.sample_store import COLUMNS, EVAL, TRAIN, UNLOADED_COLUMNS, schema, segments
from pipeline.run.paths import RunPaths
from pipeline.transport.ledger import TRAINED, Settlement

_LIGHT = [name for name in COLUMNS if name not in UNLOADED_COLUMNS]
_SEGMENT, _ROW = "segment", "place"
"""Added columns: the index of a sample's file, and its row in this file."""


@dataclass(frozen=True)
class Filter:
    """Criteria for samples. Bounds are inclusive; None and empty text match all samples.

    Attributes:
        kind: `train`, `eval`, or empty for both.
        eval_set, task: names of an evaluation set and of a task.
        least_reward, most_reward, least_length, most_length: bounds; a finite bound excludes failed samples.
        least_turns, most_turns, least_seconds, most_seconds: bounds too.
        first_version, last_version: bounds of a sample's oldest policy version.
        failed, cut: only failed samples; only truncated samples.
        failure: a text within the reason of a failure.
        position: the prompt's position in issue order.
    """

    kind: str = ""
    eval_set: str = ""
    task: str = ""
    least_reward: float = -inf
    most_reward: float = inf
    least_length: float = -inf
    most_length: float = inf
    least_turns: float = -inf
    most_turns: float = inf
    least_seconds: float = -inf
    most_seconds: float = inf
    first_version: float = -inf
    last_version: float = inf
    failed: bool = False
    cut: bool = False
    failure: str = ""
    position: int | None = None


class SampleRow(NamedTuple):
    """One sequence of an episode, as lists of equal length.

    Attributes:
        tokens: token ids.
        mask: 1 for a token that the policy sampled, else 0.
        logprobs: the sampler's log-probabilities of sampled tokens.
    """

    tokens: list[int]
    mask: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class ReadSample:
    """One stored sample with all columns, and the ledger's record of its position.

    Attributes:
        values: the columns.
        step: the step that trained the sample; None if no step has, or another sampling of its position was trained.
        lag: its lag at that step.
        outcome: the final state of its position; empty if the position is not finished.
    """

    values: dict[str, Any]
    step: int | None = None
    lag: int | None = None
    outcome: str = ""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def rows(self) -> list[SampleRow]:
        """The sequences of its episode, in order; empty for a failed sample."""
        tokens, mask, logprobs = (self.values[name] or [] for name in ("tokens", "mask", "logprobs"))
        ends = list(accumulate(self.values["row_lengths"] or [len(tokens)])) if tokens else []
        spans = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        return [SampleRow(tokens[span], mask[span], logprobs[span]) for span in spans]


class SampleTable:
    """Samples of a run, without their tokens, the oldest first."""

    def __init__(self, table: Any, files: Sequence[Path], settlements: dict[int, Settlement]) -> None:
        self.table, self._files, self._settlements = table, files, settlements

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def column(self, name: str) -> list[Any]:
        """The values of one column; None for a sample without a value."""
        return list(self.table[name].to_pylist())

    def where(self, criteria: Filter) -> "SampleTable":
        """The samples that match all criteria."""
        import pyarrow.compute as pc

        table = self.table
        conditions: list[Any] = []
        if criteria.kind:
            is_train = criteria.kind == TRAIN
            conditions.append(pc.is_null(table["eval_set"]) if is_train else pc.is_valid(table["eval_set"]))
        named = {"eval_set": criteria.eval_set, "task": criteria.task}
        conditions += [pc.equal(table[name], value) for name, value in named.items() if value]
        if criteria.position is not None:
            conditions.append(pc.equal(table["position"], criteria.position))
        bounds = {
            "reward": (criteria.least_reward, criteria.most_reward),
            "length": (criteria.least_length, criteria.most_length),
            "turns": (criteria.least_turns, criteria.most_turns),
            "seconds": (criteria.least_seconds, criteria.most_seconds),
            "version_min": (criteria.first_version, criteria.last_version),
        }
        for name, (least, most) in bounds.items():
            conditions += [pc.greater_equal(table[name], least)] if least > -inf else []
            conditions += [pc.less_equal(table[name], most)] if most < inf else []
        if criteria.failed or criteria.failure:
            conditions.append(pc.is_valid(table["failure"]))
        if criteria.failure:
            conditions.append(pc.match_substring(table["failure"], criteria.failure, ignore_case=True))
        if criteria.cut:
            conditions.append(pc.equal(table["finish"], "length"))
        if conditions:
            # A comparison with a null is null: such a sample does not match.
            table = table.filter(pc.fill_null(reduce(pc.and_, conditions), False))
        return self._with(table)

    def between(self, begin: float, end: float) -> "SampleTable":
        """The samples that were stored at `begin` or later, and before `end` (seconds since the epoch)."""
        import pyarrow.compute as pc

        times = self.table["time"]
        return self._with(self.table.filter(pc.and_(pc.greater_equal(times, begin), pc.less(times, end))))

    def containing(self, text: str, decode: Callable[[list[int]], str]) -> "SampleTable":
        """The samples whose tokens or failure contain `text`, in any case. `decode` makes a text of tokens.

        All tokens of this table are read, so filter by columns first.
        """
        needle, chosen = text.casefold(), list[bool]()
        for light, heavy in self._read(["tokens"]):
            decoded = decode(heavy["tokens"]) if heavy and heavy["tokens"] else ""
            chosen.append(needle in f"{decoded}\n{light['failure'] or ''}".casefold())
        return self._with(self.table.filter(chosen) if chosen else self.table)

    def best(self, count: int) -> "SampleTable":
        """The `count` samples with the highest rewards; of equal rewards, the newest."""
        return self.ranked("reward").slice(0, count)

    def worst(self, count: int) -> "SampleTable":
        """The `count` samples with the lowest rewards; of equal rewards, the newest. Failed samples have none."""
        return self.ranked("reward", ascending=True).slice(0, count)

    def newest(self, count: int) -> "SampleTable":
        """The last `count` samples, the oldest first."""
        return self.slice(max(0, len(self) - count), count)

    def ranked(self, column: str, *, ascending: bool = False) -> "SampleTable":
        """The samples with a value in this column, the largest first; of equal values, the newest."""
        import pyarrow.compute as pc

        valued = self.table.filter(pc.is_valid(self.table[column]))
        order = "ascending" if ascending else "descending"
        return self._with(valued.sort_by([(column, order), ("time", "descending")]))

    def within(self, parts: "Sequence[SampleTable]") -> "SampleTable":
        """The samples that are in one of these `parts` of this table, each once, in the order of this table."""
        names = {name for part in parts for name in part.names()}
        return self._with(self.table.filter([name in names for name in self.names()])) if len(self) else self

    def names(self) -> list[tuple[int, int]]:
        """The number of each sample's file, and its row in this file."""
        return list(zip(self.column(_SEGMENT), self.column(_ROW), strict=True))

    def spread(self, count: int, files: int) -> "SampleTable":
        """At most `count` samples, from at most this number of `files`, both evenly over this table."""
        present = list(dict.fromkeys(self.column(_SEGMENT)))
        read = {present[index] for index in _evenly(len(present), files)}
        rows = [row for row, segment in enumerate(self.column(_SEGMENT)) if segment in read]
        chosen = {rows[index] for index in _evenly(len(rows), count)}
        return self._with(self.table.filter([row in chosen for row in range(len(self))])) if len(self) else self

    def slice(self, start: int, count: int) -> "SampleTable":
        """The `count` samples from `start` on, in this order."""
        return self._with(self.table.slice(start, count))

    def load(self) -> Iterator[ReadSample]:
        """Every sample with all its columns, except samples whose segment is deleted."""
        for light, heavy in self._read(list(UNLOADED_COLUMNS)):
            if heavy is not None:
                yield self._joined({**light, **heavy, "metrics": dict(light["metrics"] or ())})

    def _read(self, columns: list[str]) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
        """The loaded columns of each sample, and these further ones; None if its segment is deleted."""
        from pyarrow import parquet

        number, opened = -1, None
        for light in self.table.to_pylist():
            segment, row = light.pop(_SEGMENT), light.pop(_ROW)
            if number != segment:
                try:
                    opened = parquet.read_table(self._files[segment], columns=columns, schema=schema())
                except (OSError, ValueError):
                    opened = None
                number = segment
            yield light, None if opened is None else opened.slice(row, 1).to_pylist()[0]

    def _joined(self, values: dict[str, Any]) -> ReadSample:
        settlement = self._settlements.get(values["position"]) if values["eval_set"] is None else None
        if settlement is None:
            return ReadSample(values)
        # A position that was refused as too old, or lost, has the samples of each time; the ledger names one.
        is_other = bool(settlement.fingerprint) and values["fingerprint"] != settlement.fingerprint
        if settlement.outcome != TRAINED or values["failure"] is not None or is_other:
            return ReadSample(values, outcome=settlement.outcome)
        return ReadSample(values, settlement.step, settlement.step - values["version_min"], settlement.outcome)

    def _with(self, table: Any) -> "SampleTable":
        return SampleTable(table, self._files, self._settlements)


def _evenly(total: int, count: int) -> list[int]:
    """At most `count` indices below `total`, at equal distances, the last one included."""
    count = max(0, min(total, count))
    return [(index + 1) * total // count - 1 for index in range(count)]


def read_samples(run: RunPaths) -> SampleTable:
    """All stored samples of a run, without their tokens."""
    import pyarrow as pa
    from pyarrow import parquet

    files = sorted([*segments(run.rollouts / TRAIN), *segments(run.rollouts / EVAL)], key=lambda file: file.name)
    tables = []
    for number, file in enumerate(files):
        try:
            table = parquet.read_table(file, columns=_LIGHT, schema=schema())
        except (OSError, ValueError):  # deleted meanwhile, or damaged
            continue
        table = table.append_column(_SEGMENT, pa.array([number] * table.num_rows, pa.int32()))
        tables.append(table.append_column(_ROW, pa.array(range(table.num_rows), pa.int32())))
    empty = schema().empty_table().select(_LIGHT)
    empty = empty.append_column(_SEGMENT, pa.array([], pa.int32())).append_column(_ROW, pa.array([], pa.int32()))
    return SampleTable(pa.concat_tables([empty, *tables]), files, _settlements(run.ledger))


def _settlements(ledger: Path) -> dict[int, Settlement]:
    """The finished positions in `ledger.jsonl`."""
    settlements = {}
    for line in ledger.read_bytes().splitlines() if ledger.exists() else ():
        try:
            settlement = msgspec.json.decode(line, type=Settlement)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        settlements[settlement.position] = settlement
    return settlements
