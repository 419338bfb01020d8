"""Whether a reward rises in whole runs, synchronous and asynchronous, as it does in one process, on GPUs.

    python -m tests.gpu.learns OUT.json [key=value …] [--lags 0 4] [--steps 60] [--tokens 64] [--lr 1e-4] [--share]

The reward is the share of words with an even number, half of them at first (`tests.gpu.words`), of a vocabulary of
1,024: a word has to be sampled often before anybody can know what it is worth. All begin with the same random weights.
The reference is `tests.gpu.reference`: transformers and one process. Compared is the mean reward of ten steps at a
time, at equal numbers of samples; a run's rise must be at least nine tenths of the reference's. Exit code 1 unless it
is, and unless each way ended well.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench.tables import judge, markdown
from tests.gpu import loop
from tests.gpu.words import write_model
from tests.gpu.workload import WORKLOADS

VOCABULARY = 1024
WINDOW = 10
"""Steps over which rewards are averaged."""
ENOUGH = 0.9
"""Of the reference's rise."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="0.6b", choices=[*WORKLOADS])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--share", action="store_true", help="the server on the trainer's GPU")
    parser.add_argument("--seconds", type=float, default=250, help="for each of the runs, and for the reference")
    parser.add_argument("overrides", nargs="*", help="further keys of the runs' config")
    given = parser.parse_intermixed_args(arguments)
    found: dict[str, Any] = {"command": {name: value for name, value in vars(given).items() if name != "out"}}
    found["ways"] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shape = WORKLOADS[given.shape]
        write_model(model, replace(shape, model=shape.model | {"vocab_size": VOCABULARY}))
        subprocess.run([sys.executable, "-m", "tests.gpu.words", str(model)], check=True, timeout=loop.WRITE_SECONDS)
        for lag in given.lags:
            root = Path(folder) / str(lag)
            root.mkdir()
            found["ways"][f"max_lag={lag}"] = run(root, model, lag, given)
            given.out.write_text(json.dumps(found, indent=1))
        found["ways"]["one process"] = reference(Path(folder) / "reference.json", model, given)
        given.out.write_text(json.dumps(found, indent=1))
    return report(found["ways"])


def run(root: Path, model: Path, lag: int, given: argparse.Namespace) -> dict[str, Any]:
    """A run as a user starts it: the reward and the seconds of each step."""
    (root / "model").symlink_to(model)
    asked = ["--shape", given.shape, "--device", given.device, "--lag", str(lag), "--steps", str(given.steps)]
    asked += ["--tokens", str(given.tokens), "--seconds", str(given.seconds), *(["--share"] if given.share else [])]
    keys = ["model.init=pretrained", f"optim.lr={given.lr}", *given.overrides]
    ran = loop.run(root, loop.asked_for([str(given.out), *asked, *keys]), stepped=lambda _: None)
    rows = [row for row in loop.rows_of(root / "runs" / "loop" / "metrics.jsonl") if row["kind"] == "train"]
    if ran["exit"]:
        print(*(f"--- {name}\n{text[-2000:]}" for name, text in loop.logs_of(root / "runs" / "loop").items()), sep="\n")
    return {
        "exit": ran["exit"],
        "rewards": [row["reward/mean"] for row in rows],
        "seconds": [row["seconds/step"] for row in rows],
    }


def reference(out: Path, model: Path, given: argparse.Namespace) -> dict[str, Any]:
    asked = ["--steps", str(given.steps), "--tokens", str(given.tokens), "--lr", str(given.lr)]
    command = [sys.executable, "-m", "tests.gpu.reference", str(out), str(model), *asked]
    try:
        code = subprocess.run(command, timeout=given.seconds).returncode
    except subprocess.TimeoutExpired:
        code = 124
    rows = json.loads(out.read_text()) if out.exists() else []
    return {"exit": code, "rewards": [row["reward"] for row in rows], "seconds": [row["seconds"] for row in rows]}


def report(ways: dict[str, Any]) -> int:
    """The table, over the steps that all ways have made."""
    steps = min(len(way["rewards"]) for way in ways.values())
    if steps < 2 * WINDOW:
        print(f"{steps} steps in common are too few:", {name: len(way["rewards"]) for name, way in ways.items()})
        return 1
    starts = sorted({0, *(round(part * (steps - WINDOW) / 4) for part in range(1, 5))})
    means = {name: [statistics.mean(way["rewards"][at : at + WINDOW]) for at in starts] for name, way in ways.items()}
    titles = [f"steps {at + 1}–{at + WINDOW}" for at in starts]
    rows = [(name, *each, statistics.median(ways[name]["seconds"][WINDOW:])) for name, each in means.items()]
    print(markdown(("way", *titles, "s a step"), rows))
    untrained = statistics.mean(way["rewards"][0] for way in ways.values())
    rises = {name: each[-1] - untrained for name, each in means.items()}
    print(f"\nrises since the first step: {', '.join(f'{name} {rise:.3f}' for name, rise in rises.items())}")
    risen = min(rises.values()) >= ENOUGH * rises["one process"] > 0
    ended = not any(way["exit"] for way in ways.values())
    return judge(f"all ended, and rose by at least {ENOUGH} of what one process did", risen and ended)


if __name__ == "__main__":
    sys.exit(main())
