"""How a real pretrained model learns with other keys: whole runs of several seeds, one after the other on one GPU.

    python -m tests.gpu.variants OUT.json --model DIR [--ways recipe old fp8 …] [--seeds 0 1 2] [key=value …]

SmolLM2-135M-Instruct learns sums (`tests.gpu.real`). Of each way and seed: the mean reward of the first and of the last
ten steps, the highest mean of ten steps, the accuracy on the held-out prompts at the first and at the last evaluation,
samples a second, and the medians of `mismatch_kl` and of what a step consists of. Where groups of equal rewards are
discarded, rewards are those of the other groups, so that only accuracies compare such a way with others. The result is
written after each run; no run begins after `--deadline` seconds.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurm.submission.compose_config import compose_config
from tests.bench.tables import markdown
from tests.gpu import loop, real
from tests.gpu.cold_starts import command_of, gpu_name

WAYS: dict[str, tuple[str, ...]] = {
    "recipe": (),
    "defaults": ("optim.lr=1e-6",),
    "old": ("optim.lr=1e-4", "training.max_lag=2", "training.zero_variance_groups=keep", "loss.tis=truncate"),
    "old-recipe": ("training.max_lag=2", "training.zero_variance_groups=keep", "loss.tis=truncate"),
    "fp8": ("inference.quantization=fp8",),
    "float16": ("model.dtype=float16",),
    "ngram": ("inference.speculation.method=ngram",),
}
"""Keys in addition to `experiment=smollm2`, which is `recipe`; `defaults` and `old` (docs/algorithms.md#defaults) take
the learning rate of a run that states none."""
WINDOW = 10
"""Steps over which rewards are averaged."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=WAYS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=200, help="for each run")
    parser.add_argument("--deadline", type=float, default=3600)
    parser.add_argument("--caches", type=Path, help="folder for compiled code, kept; absent: a new one")
    parser.add_argument("--logs", type=Path, help="folder for the logs of each run")
    parser.add_argument("overrides", nargs="*", help="further keys of all runs")
    given = parser.parse_intermixed_args(arguments)
    found: dict[str, Any] = {"command": command_of(given), "gpu": gpu_name(), "runs": []}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in given.seeds:
            for way in given.ways:
                if time.monotonic() - began < given.deadline:
                    here = folder / f"{way}-{seed}"
                    here.mkdir()
                    found["runs"].append({"way": way, "seed": seed} | run(here, folder, way, seed, given))
                    given.out.write_text(json.dumps(found, indent=1))
                    print(report(found["runs"]), flush=True)
    return int(any(run["exit"] != 0 for run in found["runs"]))


def run(here: Path, folder: Path, way: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    keys = [f"seed={seed}", *WAYS[way], *given.overrides]
    arguments = [str(given.out), "--model", str(given.model), "--steps", str(given.steps), "--until", "2"]
    logs = ["--logs", str(given.logs / here.name)] if given.logs else []
    asked = real.asked_for([*arguments, "--no-peer", *logs, *keys])
    config = compose_config([*real.settings(asked), f"output={folder}"])
    ran = real.run_ours(here, given.caches or folder / "caches", config, asked, given.seconds)
    found = real.summary("ours", ran, config)
    means = [statistics.mean(ran["rewards"][at : at + WINDOW]) for at in range(len(ran["rewards"]) - WINDOW + 1)]
    if means:
        found |= {"first": means[0], "last": means[-1], "best": max(means)}
    return found | {"evals": evals(here / "run" / "metrics.jsonl")}


def evals(metrics: Path) -> list[dict[str, float]]:
    """Step, accuracy and standard error of each evaluation of the held-out prompts that has an accuracy."""
    rows = [row for row in loop.rows_of(metrics) if row["kind"] == "eval" and "eval/accuracy" in row]
    return [{name: row[name] for name in ("step", "eval/accuracy", "eval/stderr")} for row in rows]


def report(runs: Sequence[dict[str, Any]]) -> str:
    names = ("first", "last", "best", "samples_per_second")
    rows = [
        (
            run["way"],
            run["seed"],
            *(f"{run[name]:.3f}" if name in run else "" for name in names),
            *(f"{run['evals'][at]['eval/accuracy']:.3f}" if run.get("evals") else "" for at in (0, -1)),
            f"{run['split']['mismatch_kl']:.1e}" if "mismatch_kl" in run.get("split", {}) else "",
            len(run["ends"]),
            run["exit"],
        )
        for run in runs
    ]
    return markdown(("way", "seed", *names, "accuracy before", "after", "mismatch KL", "steps", "exit"), rows)


if __name__ == "__main__":
    sys.exit(main())
