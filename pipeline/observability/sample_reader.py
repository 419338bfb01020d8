"""The samples that a run kept, found and read.

Owns the choice among them: filters, order, and what the ledger knows of their positions (at which step they were
trained, and with which lag). Promises that a segment which goes while it is looked at, or is torn, is passed over; and
that tokens are read only of the samples that are chosen. Must not know how a sample is shown.

    kept = read_samples(run)
    chosen = kept.where(Filter(most_reward=0.0)).worst(5)
    for sample in kept.load(chosen): …
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipeline.rollout.sample_store import COLUMNS, EVAL, TRAIN, UNLOADED_COLUMNS, schema, segments
from pipeline.run.paths import RunPaths
from pipeline.transport.ledger import TRAINED, Settlement

_LIGHT = [name for name in COLUMNS if name not in UNLOADED_COLUMNS]
_SEGMENT, _PLACE = "segment", "place"


@dataclass(frozen=True)
class Filter:
    """Which samples are wanted; bounds are inclusive, and None or an empty text wants all.

    Attributes:
        kind: `train`, `eval`, or both when empty. `eval_set` and `task` by name.
        least_reward, most_reward, least_length, most_length: of samples; then none that failed.
        first_version, last_version: of the oldest weights that sampled.
        failed, cut: only those that failed, only those that were cut off.
        failure: a text that the reason of a failure has.
        position: of the prompt in the run's order.
    """

    kind: str = ""
    eval_set: str = ""
    task: str = ""
    least_reward: float = -inf
    most_reward: float = inf
    least_length: float = -inf
    most_length: float = inf
    first_version: float = -inf
    last_version: float = inf
    failed: bool = False
    cut: bool = False
    failure: str = ""
    position: int | None = None


class SampleRow(NamedTuple):
    """One row of an episode: token ids, 1 where the policy sampled one, and the log-probabilities of those."""

    tokens: list[int]
    mask: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class ReadSample:
    """One kept sample with all its columns, and what the ledger says: the `step` that trained it (None if none did, or
    none did yet), its `lag` then, and what became of its position."""

    values: dict[str, Any]
    step: int | None = None
    lag: int | None = None
    outcome: str = ""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def rows(self) -> list[SampleRow]:
        """The rows of its episode, the first one first; none of a sample that failed."""
        tokens, mask, logprobs = (self.values[name] or [] for name in ("tokens", "mask", "logprobs"))
        ends = list(accumulate(self.values["row_lengths"] or [len(tokens)])) if tokens else []
        spans = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        return [SampleRow(tokens[span], mask[span], logprobs[span]) for span in spans]


class SampleTable:
    """The samples of a run, without their tokens, the oldest first."""

    def __init__(self, table: Any, files: Sequence[Path], settled: dict[int, Settlement]) -> None:
        self.table, self._files, self._settled = table, files, settled

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def column(self, name: str) -> list[Any]:
        """The values of one column, None where a sample has none."""
        return list(self.table[name].to_pylist())

    def where(self, wanted: Filter) -> "SampleTable":
        """Those that are wanted."""
        import pyarrow.compute as pc

        found, every = self.table, None
        conditions: list[Any] = []
        if wanted.kind:
            conditions.append(pc.is_null(found["eval_set"]) if wanted.kind == TRAIN else pc.is_valid(found["eval_set"]))
        named = {"eval_set": wanted.eval_set, "task": wanted.task}
        conditions += [pc.equal(found[name], value) for name, value in named.items() if value]
        if wanted.position is not None:
            conditions.append(pc.equal(found["position"], wanted.position))
        bounds = {
            "reward": (wanted.least_reward, wanted.most_reward),
            "length": (wanted.least_length, wanted.most_length),
            "version_min": (wanted.first_version, wanted.last_version),
        }
        for name, (least, most) in bounds.items():
            conditions += [pc.greater_equal(found[name], least)] if least > -inf else []
            conditions += [pc.less_equal(found[name], most)] if most < inf else []
        if wanted.failed or wanted.failure:
            conditions.append(pc.is_valid(found["failure"]))
        if wanted.failure:
            conditions.append(pc.match_substring(found["failure"], wanted.failure, ignore_case=True))
        if wanted.cut:
            conditions.append(pc.equal(found["finish"], "length"))
        for condition in conditions:
            every = condition if every is None else pc.and_(every, condition)
        if every is not None:
            found = found.filter(pc.fill_null(every, False))
        return self._of(found)

    def between(self, begin: float, end: float) -> "SampleTable":
        """Those that were handed over at `begin` or later, and before `end` (seconds since the epoch)."""
        import pyarrow.compute as pc

        times = self.table["time"]
        return self._of(self.table.filter(pc.and_(pc.greater_equal(times, begin), pc.less(times, end))))

    def best(self, count: int) -> "SampleTable":
        """Those of the highest reward, of equal ones the newest."""
        return self._ranked(count, "descending")

    def worst(self, count: int) -> "SampleTable":
        """Those of the lowest reward, of equal ones the newest; a sample that failed has none."""
        return self._ranked(count, "ascending")

    def newest(self, count: int) -> "SampleTable":
        """The last ones, in their order."""
        return self._of(self.table.slice(max(0, len(self) - count)))

    def load(self) -> Iterator[ReadSample]:
        """Every sample, whole; those whose segment is gone are left out."""
        from pyarrow import parquet

        opened: tuple[int, Any] = (-1, None)
        for light in self.table.to_pylist():
            segment, place = light.pop(_SEGMENT), light.pop(_PLACE)
            if opened[0] != segment:
                try:
                    opened = (
                        segment,
                        parquet.read_table(self._files[segment], columns=list(UNLOADED_COLUMNS), schema=schema()),
                    )
                except (OSError, ValueError):
                    continue
            heavy = opened[1].slice(place, 1).to_pylist()[0]
            yield self._joined({**light, **heavy, "metrics": dict(light["metrics"] or ())})

    def _joined(self, values: dict[str, Any]) -> ReadSample:
        found = self._settled.get(values["position"]) if values["eval_set"] is None else None
        if found is None:
            return ReadSample(values)
        if found.outcome != TRAINED or values["failure"] is not None:
            return ReadSample(values, outcome=found.outcome)
        return ReadSample(values, found.step, found.step - values["version_min"], found.outcome)

    def _ranked(self, count: int, order: str) -> "SampleTable":
        import pyarrow.compute as pc

        scored = self.table.filter(pc.is_valid(self.table["reward"]))
        return self._of(scored.sort_by([("reward", order), ("time", "descending")]).slice(0, count))

    def _of(self, table: Any) -> "SampleTable":
        return SampleTable(table, self._files, self._settled)


def read_samples(run: RunPaths) -> SampleTable:
    """All samples that a run kept, without their tokens."""
    import pyarrow as pa
    from pyarrow import parquet

    files = sorted([*segments(run.rollouts / TRAIN), *segments(run.rollouts / EVAL)], key=lambda file: file.name)
    tables = []
    for number, file in enumerate(files):
        try:
            table = parquet.read_table(file, columns=_LIGHT, schema=schema())
        except (OSError, ValueError):  # gone by now, or torn
            continue
        table = table.append_column(_SEGMENT, pa.array([number] * table.num_rows, pa.int32()))
        tables.append(table.append_column(_PLACE, pa.array(range(table.num_rows), pa.int32())))
    empty = schema().empty_table().select(_LIGHT)
    empty = empty.append_column(_SEGMENT, pa.array([], pa.int32())).append_column(_PLACE, pa.array([], pa.int32()))
    return SampleTable(pa.concat_tables([empty, *tables]), files, _settlements(run.ledger))


def _settlements(ledger: Path) -> dict[int, Settlement]:
    """What became of each position, as far as `ledger.jsonl` tells."""
    found = {}
    for line in ledger.read_bytes().splitlines() if ledger.exists() else ():
        try:
            settled = msgspec.json.decode(line, type=Settlement)
        except msgspec.DecodeError:
            continue
        found[settled.position] = settled
    return found
