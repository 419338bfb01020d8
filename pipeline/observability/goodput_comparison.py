"""A run under faults compared with an undisturbed one: useful steps per hour, outages, and losses.

Owns the comparison that `launchers/goodput.py` prints and writes. Promises that every number is read from the two run
directories alone, so it can be repeated later.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import median

import msgspec

from pipeline.config import RunConfig
from pipeline.config.frozen_config import read_frozen_config
from pipeline.errors import ConfigError
from pipeline.rollout.sample_store import without_copies
from pipeline.run.goodput_records import read_goodput
from pipeline.run.lost_seconds import CAUSES, Goodput, Outage
from pipeline.run.metrics_log import MetricRecord, read_rows
from pipeline.run.paths import RunPaths
from pipeline.transport.ledger import TRAINED, Settlement
from pipeline.utils.append_log import complete_lines

START_CAUSES = ("agent", "rendezvous", "trainer", "restore", "servers", "weights", "batch")
"""The causes of the seconds of a start, cold or warm."""


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two runs.

    Attributes:
        steps: RL steps of its model.
        seconds: from the end of the first one to the end of the last one.
        steps_per_hour: (`steps` - 1) in these seconds, per hour.
        goodput: the metrics of its goodput.
        prompts_lost: prompts that were issued long before others that are done, and are not.
        trained_twice: prompts that the final model was trained on more than once.
        tokens_again: sampled tokens of finished groups whose prompts were sampled again later.
        tokens: all sampled tokens of finished groups.
    """

    run: str
    steps: int
    seconds: float
    steps_per_hour: float
    goodput: dict[str, float]
    prompts_lost: int
    trained_twice: int
    tokens_again: int
    tokens: int


class OutageResult(msgspec.Struct, frozen=True, kw_only=True):
    """One outage: its time since the run began, the seconds to the next step, and the lost seconds by cause."""

    what: str
    at: float
    gap: float | None
    seconds: dict[str, float]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A run under faults and the same run without them.

    Attributes:
        ratio: useful steps per hour of the disturbed run / of the undisturbed run.
        cold, warm: the lost seconds of the first start, and the medians over the starts after outages of the trainer,
            by cause.
    """

    undisturbed: RunResult
    disturbed: RunResult
    ratio: float
    cold: dict[str, float]
    warm: dict[str, float]
    outages: tuple[OutageResult, ...]


def compare(undisturbed: Path, disturbed: Path) -> Comparison:
    """Compare two runs by their directories; `ConfigError` if one of them has fewer than two RL steps."""
    base, other = (_measure(folder) for folder in (undisturbed, disturbed))
    measured = other[1]
    restarted = [outage for outage in measured.outages if "restore" in outage.seconds]
    return Comparison(
        undisturbed=base[0],
        disturbed=other[0],
        ratio=other[0].steps_per_hour / base[0].steps_per_hour,
        cold=_start_seconds([measured.start]),
        warm=_start_seconds(restarted),
        outages=tuple(
            OutageResult(what=outage.what, at=outage.time - measured.start.time, gap=outage.gap, seconds=outage.seconds)
            for outage in measured.outages
        ),
    )


def rl_rows(root: Path) -> list[MetricRecord]:
    """The rows of the RL steps of the run's model, in order."""
    rows = [row for row in read_rows(RunPaths(root).metrics) if (row["kind"], row["job"]) == ("train", "rl")]
    return sorted(rows, key=lambda row: row["step"])


def _measure(root: Path) -> tuple[RunResult, Goodput]:
    run, rows = RunPaths(root), rl_rows(root)
    config, measured = read_frozen_config(run), read_goodput(root)
    if config is None or measured is None or len(rows) < 2:
        raise ConfigError("run", str(root), "a run with two RL steps or more", "see its logs, or run longer")
    seconds = rows[-1]["time"] - rows[0]["time"]
    final_entries = _settlements(run.ledger)
    trained = Counter(entry.position for entry in final_entries if entry.outcome == TRAINED)
    tokens, again = sampled_tokens(run.rollouts / "train")
    return RunResult(
        run=root.name,
        steps=len(rows),
        seconds=seconds,
        steps_per_hour=3600 * (len(rows) - 1) / seconds,
        goodput=measured.metrics(),
        prompts_lost=len(lost_positions({entry.position for entry in final_entries}, _window(config))),
        trained_twice=sum(count - 1 for count in trained.values()),
        tokens_again=again,
        tokens=tokens,
    ), measured


def lost_positions(done: set[int], window: int) -> list[int]:
    """The positions that are not done although more than `window` later ones are: nothing samples them any more."""
    last = max(done, default=-1)
    missing = [position for position in range(last + 1) if position not in done]
    return [position for position in missing if sum(other > position for other in done) > window]


def _window(config: RunConfig) -> int:
    """Groups that may overtake a position which is still sampled: twice the groups that may be outstanding."""
    return 2 * config.training.prompts_per_step * (config.training.max_lag + 1)


def _settlements(ledger: Path) -> list[Settlement]:
    return [msgspec.json.decode(line, type=Settlement) for line in complete_lines(ledger)]


def sampled_tokens(folder: Path) -> tuple[int, int]:
    """The sampled tokens of all stored samples, and of those whose prompt was sampled again later."""
    files = sorted(folder.glob("*.parquet"))
    if not files:
        return 0, 0
    from pyarrow import parquet  # slow to import

    columns = ["position", "fingerprint", "sample", "time", "sampled"]
    rows = chain.from_iterable(parquet.read_table(file, columns=columns).to_pylist() for file in files)
    times: dict[tuple[int, str], float] = {}
    sampled: Counter[tuple[int, str]] = Counter()
    for row in without_copies(rows):
        sampling = row["position"], row["fingerprint"]
        times[sampling] = max(row["time"], times.get(sampling, 0.0))
        sampled[sampling] += row["sampled"] or 0
    last = {position: (position, fingerprint) for position, fingerprint in sorted(times, key=times.__getitem__)}
    return sampled.total(), sampled.total() - sum(sampled[sampling] for sampling in last.values())


def _start_seconds(outages: Sequence[Outage]) -> dict[str, float]:
    """The median seconds of each cause of a start, without causes that take none."""
    medians = {cause: median(outage.seconds.get(cause, 0.0) for outage in outages) for cause in START_CAUSES if outages}
    return {cause: seconds for cause, seconds in medians.items() if seconds}


def tables(result: Comparison) -> str:
    """The tables of the comparison, as Markdown."""
    base, other = result.undisturbed, result.disturbed
    runs = [
        ("RL steps", f"{base.steps}", f"{other.steps}"),
        ("seconds, first to last step", f"{base.seconds:.0f}", f"{other.seconds:.0f}"),
        ("useful steps per hour", f"{base.steps_per_hour:.0f}", f"{other.steps_per_hour:.0f}"),
        ("of the undisturbed run", "1", f"{result.ratio:.2f}"),
        ("goodput (useful / wall seconds)", *(f"{run.goodput['goodput/ratio']:.2f}" for run in (base, other))),
        ("restarts", *(f"{run.goodput['goodput/restarts']:.0f}" for run in (base, other))),
        ("prompts lost", f"{base.prompts_lost}", f"{other.prompts_lost}"),
        ("prompts trained twice", f"{base.trained_twice}", f"{other.trained_twice}"),
        ("tokens sampled again", *(f"{run.tokens_again:,} of {run.tokens:,}" for run in (base, other))),
    ]
    used = [cause for cause in CAUSES if any(outage.seconds.get(cause) for outage in result.outages)]
    outages = [
        (outage.what, f"{outage.at:.0f} s", _shown(outage.gap), *(_shown(outage.seconds.get(cause)) for cause in used))
        for outage in result.outages
    ]
    starts: list[tuple[str, ...]] = [
        (cause, _shown(result.cold.get(cause)), _shown(result.warm.get(cause)))
        for cause in START_CAUSES
        if cause in result.cold or cause in result.warm
    ]
    starts.append(("all", *(f"{sum(start.values()):.1f}" for start in (result.cold, result.warm))))
    parts = [
        _table(("", "undisturbed", "disturbed"), runs),
        _table(("fault", "at", "s to the next step", *used), outages) if outages else "No outage.\n",
        _table(("seconds before the first step", "first start", "after an outage (median)"), starts),
    ]
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}"
