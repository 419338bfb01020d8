"""Proof from its files alone that a run trained what it should have trained, once and in time.

`check_run` reads `config.json`, `metrics.jsonl`, `ledger.jsonl`, `finished.json` and the stored samples, which all
describe the final model: rolled-back steps have left no line. It shares the formats of these files with the code that
writes them, and no rule: neither the ledger, nor the staleness gate, nor the fingerprint of samples is imported here.

    check = check_run(Path("runs/demo"))
    check.problems      # ("position 17 is done twice, at steps 4 and 9", …); empty for a sound run

| rule | what is a problem |
|---|---|
| metrics | a step of a phase without a row, with two, or out of order; an evaluation with two |
| positions | done twice; or issued and never done, unless it may still have been in flight at the end |
| batches | a step without its `training.prompts_per_step` groups in their recorded order |
| staleness | a group older than `training.max_lag` at its step |
| samples | stored samples that differ from the fingerprint or the versions of the trained group |
"""

import hashlib
import json
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.config.frozen_config import read_frozen_config
from pipeline.errors import ConfigError
from pipeline.rollout.sample_store import without_copies
from pipeline.run.metrics_log import decode_row
from pipeline.run.paths import RunPaths
from pipeline.run.run_documents import Finished
from pipeline.utils import shared_files

ISSUES = 3
"""How often a position is issued at most: the trainer refuses it twice as too old, and waits for it then."""
_HASHED = (("tokens", "<i4"), ("mask", "<u1"), ("logprobs", "<f4"), ("versions", "<i4"))
_COLUMNS = ("position", "fingerprint", "sample", "reward", "row_lengths", *(name for name, _ in _HASHED))
Line = dict[str, Any]


@dataclass(frozen=True)
class RunCheck:
    """The result of a check.

    Attributes:
        steps: RL steps that the ledger covers; for an unfinished run, those up to its last checkpoint.
        positions: positions that are done.
        in_flight: positions that were issued before others and are not done; harmless at the end of a run.
        groups, stored: trained groups, and those of them whose stored samples were found and are the trained ones.
        is_finished: whether the run reached its last step.
        problems: one sentence each.
    """

    steps: int
    positions: int
    in_flight: int
    groups: int
    stored: int
    is_finished: bool
    problems: tuple[str, ...]


def check_run(folder: Path) -> RunCheck:
    """The check of the run in `folder`; `ConfigError` if there is no readable config."""
    run = RunPaths(folder)
    config = read_frozen_config(run)
    if config is None:
        raise ConfigError("run", str(folder), "a run with a readable config.json", f"see {run.config}")
    finished = shared_files.read_document(run.finished, Finished)
    ledger, broken_lines = _lines(run.ledger, _decode)  # first: in a run in progress the metrics are ahead of it
    rows, broken_rows = _lines(run.metrics, decode_row)
    batches = _batches(ledger)
    stored, differing = _stored_samples(run.rollouts / "train", batches)
    missing = _missing(ledger)
    problems = [
        *broken_rows,
        *broken_lines,
        *_metric_problems(rows, config, finished),
        *_position_problems(ledger, missing, config),
        *_batch_problems(ledger, batches, rows, config, finished is not None),
        *_lag_problems(batches, config),
        *differing,
    ]
    return RunCheck(
        steps=len(batches),
        positions=len(ledger),
        in_flight=len(missing),
        groups=sum(map(len, batches.values())),
        stored=stored,
        is_finished=finished is not None,
        problems=tuple(problems),
    )


def _lines(path: Path, decode: Callable[[bytes], Line | None]) -> tuple[list[Line], list[str]]:
    """The complete lines of a file, and a problem for each without a result. The last one may be incomplete."""
    lines, problems = list[Line](), list[str]()
    whole, _, _ = (path.read_bytes() if path.exists() else b"").rpartition(b"\n")
    for number, text in enumerate(whole.split(b"\n") if whole else (), 1):
        line = decode(text)
        if line is None:
            problems.append(f"line {number} of {path.name} is damaged")
        else:
            lines.append(line)
    return lines, problems


def _decode(text: bytes) -> Line | None:
    """The JSON object of a line of the ledger."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _batches(ledger: Iterable[Line]) -> dict[int, list[Line]]:
    """The lines of each step's batch, in their order; also of a step without an update."""
    batches = defaultdict[int, list[Line]](list)
    for line in ledger:
        if line.get("order") is not None:
            batches[line["step"]].append(line)
    return batches


def _metric_problems(rows: list[Line], config: RunConfig, finished: Finished | None) -> Iterator[str]:
    counts = Counter((row["kind"], row["job"], row["step"], row.get("set", "")) for row in rows)
    for (kind, job, step, name), count in counts.items():
        if count > 1:
            yield f"metrics.jsonl has {count} rows for {kind} {name or job} step {step}"
    # Job files count the steps of all kinds together, so only the steps of a run's own phases are consecutive.
    own = [row for row in rows if row["kind"] == "train" and "file" not in row]
    for job in ("sft", "preference", "rl"):
        steps = [row["step"] for row in own if row["job"] == job]
        lost = sorted(set(range(1, max(steps, default=0) + 1)) - set(steps))
        if lost:
            yield f"metrics.jsonl has no row for {job} steps {_listed(lost)}"
        if steps != sorted(steps):
            yield f"metrics.jsonl has its {job} steps out of order"
    if finished is not None and own:
        last = own[-1]["step"]
        if last != finished.steps:
            yield f"the run finished with step {finished.steps}, and the last row of metrics.jsonl has step {last}"
    if finished is not None and config.has_rl and finished.steps != config.training.steps:
        yield f"the run finished with step {finished.steps} of training.steps={config.training.steps}"


def _missing(ledger: list[Line]) -> dict[int, int]:
    """The positions that are not done although a later one is, with the first step at which a later one was done."""
    done = {line["position"]: line["step"] for line in ledger}
    missing, earliest = {}, max(done.values(), default=0)
    for position in range(max(done, default=-1), -1, -1):
        if position in done:
            earliest = min(earliest, done[position])
        else:
            missing[position] = earliest
    return missing


def _position_problems(ledger: list[Line], missing: dict[int, int], config: RunConfig) -> Iterator[str]:
    steps = defaultdict[int, list[int]](list)
    for line in ledger:
        steps[line["position"]].append(line["step"])
    for position, times in steps.items():
        if len(times) > 1:
            yield f"position {position} is done {len(times)} times, at steps {_listed(times)}"
    # The gate admits at most `limit` unfinished positions, and each of a position's issues lasts `max_lag` + 1 steps
    # unless its samples take longer.
    training = config.training
    limit, patience = training.prompts_per_step * (training.max_lag + 1), ISSUES * (training.max_lag + 1)
    last = max((line["step"] for line in ledger), default=0)
    lost = [position for position, step in missing.items() if last - step > patience]
    if lost:
        yield f"positions {_listed(sorted(lost))} are lost: issued over {patience} steps before the end, never done"
    elif len(missing) > limit:
        yield f"{len(missing)} positions are issued and not done; the gate admits {limit}"


def _batch_problems(
    ledger: list[Line], batches: dict[int, list[Line]], rows: list[Line], config: RunConfig, is_finished: bool
) -> Iterator[str]:
    order = [line["step"] for line in ledger]
    if order != sorted(order):
        yield "ledger.jsonl has its steps out of order"
    size = config.training.prompts_per_step
    for step, lines in batches.items():
        if (orders := [line["order"] for line in lines]) != list(range(size)):
            yield f"the batch of step {step + 1} has groups {_listed(orders)}, not 0 to {size - 1} in order"
    logged = max((row["step"] for row in rows if row["kind"] == "train" and row["job"] == "rl"), default=0)
    last = max(batches, default=-1) + 1
    if last > logged or (is_finished and last < logged):  # before the end, the ledger ends at a checkpoint
        yield f"ledger.jsonl ends with step {last}, and metrics.jsonl with step {logged}"
    if absent := sorted(set(range(last)) - set(batches)):
        yield f"ledger.jsonl has no batch of steps {_listed(absent, 1)}"


def _lag_problems(batches: dict[int, list[Line]], config: RunConfig) -> Iterator[str]:
    """Samples of a group are refused by their oldest token, or with `stale=mask` if all their tokens are too old."""
    bound, checked = config.training.max_lag, 0 if config.training.stale == "refuse" else 1
    for step, lines in batches.items():
        for line in lines:
            lag = step - line["versions"][checked]
            if lag > bound:
                yield f"position {line['position']} is {lag} steps old at step {step + 1}; training.max_lag={bound}"


def _stored_samples(folder: Path, batches: dict[int, list[Line]]) -> tuple[int, list[str]]:
    """The number of trained groups whose stored samples were found, and the differences between both."""
    lines = (line for batch in batches.values() for line in batch)
    trained = {(line["position"], line["fingerprint"]): line["versions"] for line in lines}
    present, problems = set[int](), list[str]()
    for file in sorted(folder.glob("[!.]*.parquet")):
        for key, samples in groupby(without_copies(_samples_of(file)), key=_sampling):
            if key not in trained:  # another sampling of the position: before a rollback, or refused as too old
                continue
            digest, (oldest, newest) = hashlib.blake2b(digest_size=8), trained[key]
            for sample in samples:
                versions = sample["versions"][sample["mask"] == 1]
                if versions.size and not oldest <= versions.min() <= versions.max() <= newest:
                    problems.append(f"position {key[0]} has a token of a version outside of {oldest} to {newest}")
                lengths = sample["row_lengths"]
                digest.update(struct.pack(f"<d{len(lengths)}i", sample["reward"], *lengths))
                for name, _ in _HASHED:
                    digest.update(sample[name].tobytes())
            present.add(key[0])
            if digest.hexdigest() != key[1]:
                problems.append(f"the stored samples of position {key[0]} are not those that were trained")
    return len(present), problems


def _sampling(sample: dict[str, Any]) -> tuple[int, str]:
    return sample["position"], sample["fingerprint"]


def _samples_of(file: Path) -> Iterator[dict[str, Any]]:
    """The samples in a file that have tokens, with arrays as in `_HASHED`; none of a damaged file."""
    from pyarrow import parquet

    try:
        table = parquet.read_table(file, columns=list(_COLUMNS)).combine_chunks()
    except (OSError, ValueError):  # deleted meanwhile, or damaged: its samples are not found
        return
    arrays = {}
    for name, kind in (("row_lengths", "<i4"), *_HASHED):
        column = table[name].combine_chunks()
        # The values of a column are one array, and its offsets the bounds of each sample: no Python object per token.
        arrays[name] = column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=False).astype(kind)
    for index, values in enumerate(table.select(["position", "fingerprint", "sample", "reward"]).to_pylist()):
        if values["reward"] is not None:
            spans = {name: array[offsets[index] : offsets[index + 1]] for name, (offsets, array) in arrays.items()}
            yield values | spans


def _listed(numbers: Iterable[int], offset: int = 0) -> str:
    """The first ten of some numbers, for an error."""
    shown = [str(number + offset) for number in numbers]
    return ", ".join(shown[:10]) + (f" and {len(shown) - 10} more" if len(shown) > 10 else "")
