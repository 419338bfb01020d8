"""RL of one model in each compute type: how far trainer and servers differ, how fast, and what is learned.

    python -m tests.bench.bench_precision [--dtypes float32 bfloat16 float16] [--steps 30] [--output DIR] [key=v …]

SFT of the demo in float32 makes one model; then each compute type starts the same synchronous RL from it
(`training.max_lag=0`, correction on), as a user would. Prints what each run's own `metrics.jsonl` says: the means over
its steps of the mismatch before any update, samples/s, and the reward of the first and the last five steps. Exits with
1 unless float16 has a smaller `mismatch_kl` than bfloat16, and no step of it was skipped.

On CPUs without instructions for float16 its products are slow, so that samples/s compares nothing there.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from pipeline.run.metrics_log import read_rows
from tests.bench.bench_demo import run
from tests.bench.tables import judge, markdown

DTYPES = "float32", "bfloat16", "float16"
ENDS = 5
"""Steps at either end whose rewards are averaged."""
BASE = ("model.dtype=float32", "training.sft.steps=200", "training.steps=1", "training.eval_every=0")
SHORT = (
    *("training.sft.steps=0", "training.max_lag=0", "training.prompts_per_step=16", "training.eval_every=0"),
    "optim.lr=3e-4",
)
COLUMNS = (
    *("dtype", "mismatch_kl", "mismatch", "mismatch_max", "samples/s", "reward, first 5", "reward, last 5"),
    *("skipped", "loss_scale"),
)


def measure(dtype: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The table's row of a run."""
    train = [row for row in rows if row["job"] == "rl" and row["kind"] == "train"]
    rewards = [row["reward/mean"] for row in train]
    return {
        "dtype": dtype,
        **{name: mean(row[name] for row in train) for name in ("mismatch_kl", "mismatch")},
        "mismatch_max": max(row["mismatch_max"] for row in train),
        "samples/s": sum(row["samples"] for row in train[1:]) / (train[-1]["time"] - train[0]["time"]),
        "reward, first 5": mean(rewards[:ENDS]),
        "reward, last 5": mean(rewards[-ENDS:]),
        "skipped": sum(row["skipped"] for row in train),
        "loss_scale": train[-1].get("loss_scale", "none"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=None, help="keep the runs there")
    options, overrides = parser.parse_known_args()
    output = options.output or Path(tempfile.mkdtemp(prefix="rollcall-precision-"))
    base, _ = run("base", 0, output, BASE)
    start = ("model.init=pretrained", f"model.path={base / 'model'}", f"training.steps={options.steps}", *SHORT)
    found = {}
    for dtype in options.dtypes:
        directory, _ = run(dtype, 0, output, (*start, f"model.dtype={dtype}", *overrides))
        found[dtype] = measure(dtype, read_rows(directory / "metrics.jsonl"))
        print(markdown(COLUMNS, [[row[name] for name in COLUMNS] for row in found.values()]), flush=True)
    if not {"bfloat16", "float16"} <= found.keys():
        return 0
    smaller = found["float16"]["mismatch_kl"] < found["bfloat16"]["mismatch_kl"]
    return judge("a smaller mismatch_kl in float16, no skipped step", smaller and not found["float16"]["skipped"])


if __name__ == "__main__":
    sys.exit(main())
