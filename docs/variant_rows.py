"""The table of docs/performance.md that compares whole runs of a real model with different keys (`tests.gpu.variants`).

Owns how these results are shown: each seed of a way, in the order of the seeds. Runs of one way with different other
keys are different rows.
"""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

WAYS = {
    "recipe": "bfloat16",
    "fp8": "bfloat16, FP8 rollouts",
    "float16": "float16",
    "old-recipe": "keys before",
    "old": "keys before, lr 1e-4",
    "defaults": "lr 1e-6",
}
"""The names of ways in the table."""
KEEP = "training.zero_variance_groups=keep"
KEEPS = ("old-recipe", "old")
"""Ways that set `KEEP` themselves."""
STEPS = (0, 20, 40, 60)
"""Steps of the evaluations."""
Run = dict[str, Any]


def variants(raw: Path) -> list[dict[str, str]]:
    """One row for each way and for each handling of groups with equal rewards."""
    runs: defaultdict[tuple[str, bool], list[Run]] = defaultdict(list)
    for path in sorted(raw.glob("variants-*.json")):
        result = json.loads(path.read_text())
        for run in result["runs"]:
            runs[run["way"], run["way"] in KEEPS or KEEP in result["command"]["overrides"]].append(run)
    return [_row(way, all_groups, runs[way, all_groups]) for way, all_groups in sorted(runs, key=_order)]


def _order(way: tuple[str, bool]) -> tuple[bool, int]:
    name, all_groups = way
    return not all_groups, [*WAYS].index(name)


def _row(way: str, all_groups: bool, runs: list[Run]) -> dict[str, str]:
    accuracies = {f"accuracy after {step} steps": ", ".join(_accuracy(run, step) for run in runs) for step in STEPS}
    first = [run["first_row"]["mismatch_kl"] for run in runs]
    return {
        "variant": WAYS[way],
        "groups of equal rewards": "trained" if all_groups else "discarded",
        **accuracies,
        "`mismatch_kl` of the first step": f"{statistics.median(first):.1e}",
        "samples/s": f"{statistics.median(run['samples_per_second'] for run in runs):.0f}",
    }


def _accuracy(run: Run, step: int) -> str:
    """The accuracy of a run at a step; a dash if its time limit ended it before."""
    return next((f"{row['eval/accuracy']:.3f}" for row in run["evals"] if row["step"] == step), "–")
