"""The demo for several seeds and several ways to train it.

    python -m tests.bench.bench_demo [--seeds 0 1 2] [--ways grpo gspo dapo ppo lora lag0 …] [--output DIR] [key=v …]

Starts the launcher as a user would, one run after the other, and prints what each run's own `metrics.jsonl` says:
held-out accuracy before and after RL, time, lag, and where the time of a step goes. `lag0`, `lag1` and `lag4` are GRPO
with another `max_lag` than the demo's 2; 0 is synchronous. `lora` trains adapters on what SFT of all weights
left, a run of its own. Exits with 1 when a run gains less than 25 points or takes more than 6
minutes.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.progress import track

from pipeline.run.metrics_log import read_rows, series

ROOT = Path(__file__).resolve().parents[2]
LEAST_GAIN, MOST_SECONDS = 0.25, 360
WAYS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "gspo": ("loss=gspo",),
    "dapo": ("loss=dapo", "training.zero_variance_groups=drop", "training.mask_truncated=true"),
    "ppo": ("loss=ppo",),
    "lag0": ("training.max_lag=0",),
    "lag1": ("training.max_lag=1",),
    "lag4": ("training.max_lag=4",),
    "bfloat16-moments": ("optim.state_dtype=bfloat16",),
    "float8-moments": ("optim.state_dtype=float8",),
    "lora": ("model.init=pretrained", "model.lora.rank=8", "optim.lr=1e-3", "training.sft.steps=0"),
}
COLUMNS = (
    *("way", "seed", "after SFT", "after RL", "gain", "minutes", "lag max"),
    *("s a step", "of it: data", "train", "sync", "samples/s", "idle trainer", "idle servers", "log ratio at lag 0"),
)


def demo(way: str, seed: int, output: Path, overrides: Sequence[str]) -> tuple[Path, float]:
    """One demo: its run directory, and the seconds it took from the command to its end."""
    chosen = WAYS[way]
    if way == "lora":
        base, _ = run(f"{way}-base-{seed}", seed, output, [*overrides, "training.steps=1", "training.eval_every=0"])
        chosen = (*chosen, f"model.path={base / 'model'}")
    return run(f"{way}-{seed}", seed, output, [*chosen, *overrides])


def run(name: str, seed: int, output: Path, overrides: Sequence[str]) -> tuple[Path, float]:
    command = [sys.executable, "launchers/submit.py", "experiment=demo", f"name={name}", f"seed={seed}"]
    started = time.monotonic()
    subprocess.run([*command, f"output={output}", *overrides], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return output / name, time.monotonic() - started


def measure(rows: list[dict[str, Any]], seconds: float, way: str, seed: int) -> dict[str, Any]:
    """What a run's rows say, as a row of the table."""
    accuracy = [value for _, value in series(rows, "eval/accuracy")]
    train = [row for row in rows if row["job"] == "rl" and row["kind"] == "train"]
    middle = {name: median(row[name] for row in train) for name in ("seconds/step", "seconds/data", "seconds/train")}
    return {
        "way": way,
        "seed": seed,
        "after SFT": f"{accuracy[0]:.3f}",
        "after RL": f"{accuracy[-1]:.3f}",
        "gain": accuracy[-1] - accuracy[0],
        "minutes": seconds / 60,
        "lag max": max(row["staleness/max"] for row in train),
        "s a step": middle["seconds/step"],
        "of it: data": middle["seconds/data"],
        "train": middle["seconds/train"],
        "sync": median(row["sync/seconds"] for row in train if "sync/seconds" in row),
        "samples/s": sum(row["samples"] for row in train) / (train[-1]["time"] - train[0]["time"]),
        "idle trainer": mean(row["idle/trainer"] for row in train),
        "idle servers": mean(row["idle/servers"] for row in train if "idle/servers" in row),
        "log ratio at lag 0": f"{train[0].get('mismatch', train[0]['log_ratio']):.1e}",
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for result in results:
        cells = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in map(result.get, COLUMNS)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["grpo"])
    parser.add_argument("--output", type=Path, default=None, help="keep the runs there")
    options, overrides = parser.parse_known_args()
    output = options.output or Path(tempfile.mkdtemp(prefix="rollcall-demo-"))
    results = []
    for way, seed in track(list(product(options.ways, options.seeds)), "demos", console=Console(stderr=True)):
        directory, seconds = demo(way, seed, output, overrides)
        results.append(measure(read_rows(directory / "metrics.jsonl"), seconds, way, seed))
    print(table(results))
    met = all(row["gain"] >= LEAST_GAIN and row["minutes"] * 60 <= MOST_SECONDS for row in results)
    print(f"\nat least {LEAST_GAIN:.0%} more in at most {MOST_SECONDS / 60:g} minutes: {'met' if met else 'NOT met'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
