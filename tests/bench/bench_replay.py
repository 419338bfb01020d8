"""What routing replay leaves of the difference between a trainer and servers of another type.

    python -m tests.bench.bench_replay [--out OUT.json] [--steps 12] [--sft-steps 150] [--lag 1] [--seeds 0] [key=v …]

A mixture in the size of the demo's model (16 experts, 4 of a token) is trained as a user would: SFT, then RL with real
servers, whose weights change while they sample. The trainer computes in float32, the servers in bfloat16, so that their
routers choose other experts where scores are nearly equal. Each seed runs once for each value of
`training.routing_replay`. Exits with 1 unless the mean `mismatch_kl` with replay is at most half of that without.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.config.model_directory import BUILT_IN
from pipeline.run.metrics_log import read_rows
from tests.bench.tables import judge, markdown

ROOT = Path(__file__).resolve().parents[2]
WAYS = ("none", "rollout")
MAX_RATIO = 0.5
NAMES = ("mismatch_kl", "mismatch", "mismatch_max", "routing/replayed", "staleness/mean", "seconds/step")
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the result as JSON")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--sft-steps", type=int, default=150)
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options, overrides = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rollcall-replay-") as folder:
        model = write_mixture(Path(folder) / "model")
        ways = {
            way: [
                train(Path(folder), f"{way}-{seed}", [*keys(model, options), *overrides], way, seed)
                for seed in options.seeds
            ]
            for way in WAYS
        }
    result = {
        "command": {name: getattr(options, name) for name in ("steps", "sft_steps", "lag", "seeds")},
        "ways": ways,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))
    return report(ways)


def write_mixture(path: Path) -> Path:
    """The directory of a mixture with the demo's tokenizer, without weights."""
    path.mkdir()
    for file in (BUILT_IN / "tiny_qwen3").glob("*.json"):
        (path / file.name).write_text(file.read_text())
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | EXPERTS))
    return path


def keys(model: Path, options: argparse.Namespace) -> list[str]:
    """The run, as keys of the config."""
    return [
        "experiment=demo",
        f"model.path={model}",
        "model.init=random",
        "loss.old_logprobs=recompute",
        f"training.sft.steps={options.sft_steps}",
        f"training.steps={options.steps}",
        f"training.max_lag={options.lag}",
        "training.eval_every=0",
        "training.checkpoint_every=1000",
        "tracking=none",
        'inference.extra_args=["--dtype","bfloat16"]',
    ]


def train(folder: Path, name: str, overrides: Sequence[str], way: str, seed: int) -> list[dict[str, float]]:
    """`NAMES` of each RL step of one run."""
    command = [sys.executable, "launchers/submit.py", f"name={name}", f"output={folder / 'runs'}", *overrides]
    command += [f"seed={seed}", f"training.routing_replay={way}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return steps_of(read_rows(folder / "runs" / name / "metrics.jsonl"))


def steps_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """`NAMES` of each RL step that a run has logged."""
    trained = [row for row in rows if row["kind"] == "train" and row["job"] == "rl"]
    return [{name: row[name] for name in NAMES if name in row} for row in trained]


def report(ways: dict[str, list[list[dict[str, float]]]]) -> int:
    """Print the means over all steps and seeds; 1 unless replay at least halves the difference."""
    means = {way: mean_of([step for run in runs for step in run]) for way, runs in ways.items()}
    print(markdown(("training.routing_replay", *NAMES), [(way, *values.values()) for way, values in means.items()]))
    if not all(run for runs in ways.values() for run in runs):
        return judge("every run takes steps", False)
    if len(means) < len(WAYS):
        return 0  # nothing to compare with
    ratio = means["rollout"]["mismatch_kl"] / means["none"]["mismatch_kl"]
    print(f"\nmismatch_kl with replay / without: {ratio:.3f}")
    return judge(f"at most {MAX_RATIO} of the difference is left", ratio <= MAX_RATIO)


def mean_of(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each of `NAMES` over the steps that have it; 0 if none has."""
    return {name: fmean([step[name] for step in steps if name in step] or [0.0]) for name in NAMES}


if __name__ == "__main__":
    sys.exit(main())
