"""The trained groups of a run, read back from its ledger and its stored samples: the input of a replay.

Owns the join of `ledger.jsonl`, which has the batches of a run, with the samples below `rollouts/train/`, which have
their tokens. Promises that a batch has exactly the groups that the run trained, in the order in which it trained them,
proven by the fingerprint of each; samples that are missing or differ raise one `ConfigError`. Nothing is written.

    recorded = RecordedRun(replayed_run(config))
    recorded.check(config)              # everything a replay with this config needs is there
    recorded.batch(step)                # Groups, in order
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeline.config import RunConfig
from pipeline.config.frozen_config import read_frozen_config
from pipeline.config.model_directory import model_directory
from pipeline.errors import ConfigError
from pipeline.rollout.sample_store import TRAIN, segments, without_copies
from pipeline.run.paths import RunPaths
from pipeline.transport.ledger import Settlement
from pipeline.transport.sample_records import Branch, Group, Sample
from pipeline.utils.append_log import complete_lines

log = logging.getLogger(__name__)

_MODEL_FILES = ("config.json", "tokenizer.json")
"""Files of a model directory that decide what a token id means."""
_SAME = ("training.prompts_per_step", "rollout.temperature")
"""Keys that a replay cannot change: the recorded batches and log-probabilities depend on them."""
Sampling = tuple[int, str]
"""A position and the fingerprint of its group."""


def replayed_run(config: RunConfig) -> RunPaths:
    """The run that `replay` names, by its directory or by its name below `output`; `ConfigError` if there is none."""
    for folder in (Path(config.replay), config.output / config.replay):
        if RunPaths(folder).run.exists():
            if folder.resolve() == config.directory.resolve():
                raise ConfigError("replay", config.replay, "another run", "give the replay another name: name=…")
            return RunPaths(folder.resolve())
    raise ConfigError("replay", config.replay, f"a run directory, or a name below {config.output}/", "fix the path")


class RecordedRun:
    """The batches of a run."""

    def __init__(self, run: RunPaths) -> None:
        self.run = run
        self._lines = _lines_by_step(run.ledger)

    @property
    def steps(self) -> int:
        """The number of steps, from the first one, whose batch is in the ledger."""
        count = 0
        while self.entries(count):
            count += 1
        return count

    def entries(self, step: int) -> list[Settlement]:
        """The ledger's lines of the batch of a step (counted from 0), in order; empty for a step without one."""
        batch = [line for line in self._lines.get(step, ()) if line.order is not None]
        return sorted(batch, key=lambda line: line.order or 0)

    def set_aside(self, step: int) -> list[Settlement]:
        """The positions that were done without a batch while a step waited for its own: filtered or failed ones."""
        return [line for line in self._lines.get(step, ()) if line.order is None]

    def batch(self, step: int) -> list[Group]:
        """The groups of a step's batch, in order; `ConfigError` if samples are missing or not the trained ones."""
        entries = self.entries(step)
        samplings = {(line.position, line.fingerprint) for line in entries}
        files = {self._files[sampling] for sampling in samplings if sampling in self._files}
        groups = dict[Sampling, Group]()
        for file in sorted(files):
            groups |= {key: group_of_records(records, self._task) for key, records in _records_in(file, samplings)}
        for line in entries:
            group = groups.get((line.position, line.fingerprint))
            if group is None or group.fingerprint() != line.fingerprint:
                raise self._error(step, line.position, "are missing" if group is None else "are not the trained ones")
        return [groups[line.position, line.fingerprint] for line in entries]

    def check(self, config: RunConfig) -> None:
        """`ConfigError` unless `config` can train the recorded samples of all its steps."""
        recorded = read_frozen_config(self.run)
        if recorded is None:
            raise ConfigError("replay", config.replay, "a run with a readable config.json", f"see {self.run.config}")
        _check_settings(config, recorded)
        if recorded.rollout.sample_store_bytes == 0:
            expected = "a run that stored its samples; it had rollout.sample_store_bytes=0"
            raise ConfigError("replay", config.replay, expected, "record one with the default")
        if not self.steps:
            expected = "a run whose ledger.jsonl has a batch: one with RL steps, and a checkpoint after them"
            raise ConfigError("replay", config.replay, expected, "replay it once it has one")
        if config.training.steps > self.steps:
            expected = f"at most {self.steps}, the recorded steps of {self.run.root}"
            raise ConfigError("training.steps", config.training.steps, expected, "lower it")
        for step in range(config.training.steps):
            if len(self.entries(step)) != config.training.prompts_per_step:
                raise self._incomplete(step, config.training.prompts_per_step)
            for line in self.entries(step):
                if (line.position, line.fingerprint) not in self._files:
                    raise self._error(step, line.position, "are missing")

    @cached_property
    def _task(self) -> str:
        """The name of the run's task."""
        recorded = read_frozen_config(self.run)
        return recorded.task.name if recorded is not None else ""

    @cached_property
    def _files(self) -> Mapping[Sampling, Path]:
        """The segment of each stored group. Segments end between two groups."""
        files = dict[Sampling, Path]()
        for file in segments(self.run.rollouts / TRAIN):
            for row in _rows(file, ["position", "fingerprint"]):
                files[row["position"], row["fingerprint"]] = file
        return files

    def _incomplete(self, step: int, size: int) -> ConfigError:
        positions = f"{len(self.entries(step))} of the {size} positions of step {step + 1}"
        expected = f"a run with a whole ledger; {self.run.ledger.name} has {positions}"
        return ConfigError("replay", str(self.run.root), expected, _steps_before(step))

    def _error(self, step: int, position: int, what: str) -> ConfigError:
        whose = f"those of position {position}, trained in step {step + 1}"
        expected = f"a run with all its trained samples; {whose}, {what}"
        return ConfigError("replay", str(self.run.root), expected, _steps_before(step))


def _steps_before(step: int) -> str:
    return f"training.steps={step} replays the steps before it" if step else "record it again"


def group_of_records(records: Sequence[Mapping[str, Any]], task: str) -> Group:
    """The group of stored samples of a run with this task: the inverse of `sample_store.records_of_group`, without
    routed experts and times."""
    first = records[0]
    label = first["task"] if first["task"] != task else ""
    samples = tuple(_sample_of(record) for record in records if record["failure"] is None)
    failures = tuple(record["failure"] for record in records if record["failure"] is not None)
    position, prompt = first["position"], first["prompt"]
    return Group(position=position, prompt=prompt, samples=samples, failures=failures, task=label)


def _sample_of(record: Mapping[str, Any]) -> Sample:
    first, *others = _arrays_of(record)
    named = ("reward", "version_min", "version_max", "finish", "turns", "seconds", "server")
    return Sample(
        **first | {name: record[name] for name in named},
        metrics=dict(record["metrics"] or ()),
        branches=tuple(Branch(of=0, shared=0, **row) for row in others),
    )


def _arrays_of(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The arrays of each row, as the wire has them. Rows are stored whole, so that no row shares a prefix."""
    mask = np.array(record["mask"], "<u1")
    offsets = np.where(mask, np.array(record["versions"]) - record["version_min"], 0).astype("<u1")
    arrays = {
        "tokens": np.array(record["tokens"], "<i4"),
        "sampled": mask,
        "logprobs": np.array(record["logprobs"], "<f4"),
        "version_offsets": offsets,
    }
    begin = 0
    for length in record["row_lengths"]:
        yield {name: array[begin : begin + length].tobytes() for name, array in arrays.items()}
        begin += length


def _lines_by_step(ledger: Path) -> dict[int, list[Settlement]]:
    """The complete lines of a ledger, in order, by step; without those that a disk damaged."""
    lines, damaged = defaultdict[int, list[Settlement]](list), 0
    for text in complete_lines(ledger):
        try:
            line = msgspec.json.decode(text, type=Settlement)
        except (msgspec.DecodeError, UnicodeDecodeError):
            damaged += 1
            continue
        lines[line.step].append(line)
    if damaged:
        log.warning("%s: %d lines cannot be read and are left out", ledger, damaged)
    return dict(lines)


def _records_in(file: Path, samplings: Iterable[Sampling]) -> Iterator[tuple[Sampling, list[dict[str, Any]]]]:
    """The wanted groups of a segment, each with the records of its samples in order."""
    positions = [position for position, _ in samplings]
    records = defaultdict[Sampling, list[dict[str, Any]]](list)
    for row in without_copies(_rows(file, None, filters=[("position", "in", positions)])):
        records[row["position"], row["fingerprint"]].append(row)
    return ((key, rows) for key, rows in records.items() if key in samplings)


def _rows(file: Path, columns: Sequence[str] | None, **options: Any) -> list[dict[str, Any]]:
    """Rows of a segment; none of a damaged one, or of one that was deleted meanwhile."""
    from pyarrow import parquet

    try:
        rows: list[dict[str, Any]] = parquet.read_table(file, columns=columns, **options).to_pylist()
    except (OSError, ValueError):
        return []
    return rows


def _check_settings(config: RunConfig, recorded: RunConfig) -> None:
    """`ConfigError` for a config whose model or batches are not those of the recorded run, or whose samples need more
    than the store has."""
    for key, mine, other in ((key, _value(config, key), _value(recorded, key)) for key in _SAME):
        if mine != other:
            raise ConfigError(key, mine, f"{other}, as in the recorded run", "leave it out")
    if recorded.teacher.url or recorded.training.routing_replay != "none":
        key = "teacher.url" if recorded.teacher.url else "training.routing_replay"
        expected = f"a run without {key}: stored samples have neither a teacher's log-probabilities nor routed experts"
        raise ConfigError("replay", config.replay, expected, "name another run")
    mine, other = model_directory(config.model), model_directory(recorded.model)
    for name in _MODEL_FILES:
        if _content(mine / name) != _content(other / name):
            expected = f"a model with the {name} of {other}, whose tokens were recorded"
            raise ConfigError("model.path", config.model.path, expected, "leave it out")


def _value(config: RunConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""
