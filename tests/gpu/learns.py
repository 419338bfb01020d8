"""Whether a reward rises in whole runs, synchronous and asynchronous, as it does in one process, on GPUs.

    python -m tests.gpu.learns OUT.json [--lags 0 4] [--also KEY=VALUE …] [--steps 60] [--tokens 64] [--lr 1e-4]

The reward is the share of words with an even number, half of them at first (`tests.gpu.words`), of a vocabulary of
1,024: a word has to be sampled often before anybody can know what it is worth. (Most words of the prompts are unknown
to it; the reward does not ask for them.) All begin with the same random weights. The reference is
`tests.gpu.reference`: transformers and one process, with the runs' precision. Each `--also` has all runs with a lag
made again with these keys, and with `--also-lag-0` those without one too.

Compared is the mean reward of ten steps at a time, at equal numbers of samples; the rise of each run without further
keys must be at least nine tenths of the reference's. Exit code 1 unless it is, and unless each way ended well.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench.tables import judge, markdown
from tests.gpu import children, loop
from tests.gpu.words import write_whole_model
from tests.gpu.workload import WORKLOADS

VOCABULARY = 1024
WINDOW = 10
"""Steps over which rewards are averaged."""
ENOUGH = 0.9
"""Of the reference's rise."""
REFERENCE = "one process"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="0.6b", choices=[*WORKLOADS])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--also", nargs="+", action="append", default=[], help="keys of further runs")
    parser.add_argument("--also-lag-0", action="store_true", help="runs without a lag again with these keys too")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--share", action="store_true", help="the server on the trainer's GPU")
    parser.add_argument("--seconds", type=float, default=250, help="for each of the runs, and for the reference")
    given = parser.parse_args(arguments)
    if given.steps < 2 * WINDOW:
        parser.error(f"--steps={given.steps}; expected at least {2 * WINDOW}")
    found: dict[str, Any] = {"command": {name: value for name, value in vars(given).items() if name != "out"}}
    found["ways"] = {}

    def add(name: str, way: dict[str, Any]) -> None:
        found["ways"][name] = way
        given.out.write_text(json.dumps(found, indent=1))

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shape = WORKLOADS[given.shape]
        write_whole_model(model, replace(shape, model=shape.model | {"vocab_size": VOCABULARY}))
        plans = [(lag, keys) for keys in ([], *given.also) for lag in given.lags if lag or not keys or given.also_lag_0]
        for number, (lag, keys) in enumerate(plans):
            root = Path(folder) / str(number)
            root.mkdir()
            (root / "model").symlink_to(model)
            add(" ".join((f"max_lag={lag}", *keys)), run(root, lag, keys, given))
        add(REFERENCE, reference(Path(folder) / "reference.json", model, given))
    return report(found["ways"])


def run(root: Path, lag: int, keys: Sequence[str], given: argparse.Namespace) -> dict[str, Any]:
    """A run as a user starts it: the reward and the seconds of each step."""
    asked = ["--shape", given.shape, "--device", given.device, "--lag", str(lag), "--steps", str(given.steps)]
    asked += ["--tokens", str(given.tokens), "--seconds", str(given.seconds), *(["--share"] if given.share else [])]
    asked += ["model.init=pretrained", f"optim.lr={given.lr}", *keys]
    ran = loop.run(root, loop.asked_for([str(given.out), *asked]), stepped=lambda _: None)
    rows = loop.trained(root)
    names = {"rewards": "reward/mean", "seconds": "seconds/step", "clipped": "clip_fraction"}
    names |= {name: name for name in loop.PRECISION}
    return {"exit": ran["exit"], **{name: [row.get(key) for row in rows] for name, key in names.items()}}


def reference(out: Path, model: Path, given: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.gpu.reference", str(out), str(model), "--device", given.device]
    command += ["--steps", str(given.steps), "--tokens", str(given.tokens), "--lr", str(given.lr)]
    code = children.call(command, given.seconds)
    rows = json.loads(out.read_text()) if out.exists() else []
    return {"exit": code, "rewards": [row["reward"] for row in rows], "seconds": [row["seconds"] for row in rows]}


def means(ways: dict[str, Any]) -> tuple[list[int], dict[str, list[float]]]:
    """Of the steps that all ways have made: after which five or fewer numbers of steps a window begins, and the mean
    reward of each way in each of these."""
    steps = min(len(way["rewards"]) for way in ways.values())
    starts = sorted({round(part * max(steps - WINDOW, 0) / 4) for part in range(5)})
    return starts, {
        name: [statistics.mean(way["rewards"][at : at + WINDOW] or [0.0]) for at in starts]
        for name, way in ways.items()
    }


def mismatch_of(way: dict[str, Any]) -> float:
    """The median over the steps; 0 where trainer and sampler are one."""
    return statistics.median([value for value in way.get("mismatch_kl", []) if value is not None] or [0.0])


def report(ways: dict[str, Any]) -> int:
    starts, found = means(ways)
    titles = [f"steps {at + 1}–{at + WINDOW}" for at in starts]
    rows = [
        (name, *each, statistics.median(ways[name]["seconds"][WINDOW:] or [0.0]), mismatch_of(ways[name]))
        for name, each in found.items()
    ]
    print(markdown(("way", *titles, "s a step", "mismatch_kl"), rows))
    untrained = statistics.mean((way["rewards"] or [0.0])[0] for way in ways.values())
    rises = {name: each[-1] - untrained for name, each in found.items() if " " not in name or name == REFERENCE}
    print(f"\nrises since the first step: {', '.join(f'{name} {rise:.3f}' for name, rise in rises.items())}")
    risen = min(rises.values()) >= ENOUGH * rises[REFERENCE] > 0
    ended = not any(way["exit"] for way in ways.values())
    return judge(f"all ended, and rose by at least {ENOUGH} of what one process did", risen and ended)


if __name__ == "__main__":
    sys.exit(main())
