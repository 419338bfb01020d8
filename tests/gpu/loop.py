"""The whole loop on the GPUs of this machine, and its two halves alone: how much of the slower one is left.

    python -m tests.gpu.loop OUT.json [--shape 0.6b] [--trainers 1] [--servers 1] [--steps 40] [--lag 4] …

The work: 16-token prompts, 8 samples a prompt, 128 samples a step, completions of 512 tokens, one update a step. The
run is what a user starts, `launchers/submit.py cluster=local`; its rate is taken over the steps after the first ten.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.words import write_model
from tests.gpu.workload import WORKLOADS

SAMPLES, PROMPTS = 8, 16
SETTLED = 10
"""Steps until caches are warm and everything is compiled."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="0.6b", choices=[*WORKLOADS])
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lag", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--api", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("overrides", nargs="*", help="further keys of the run's config")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_model(root / "model", WORKLOADS[chosen.shape])
        code, seconds = run(root, chosen)
        rows = rows_of(root / "runs" / "loop" / "metrics.jsonl")
        if code:
            show_logs(root / "runs" / "loop")
    result = {"command": asked(chosen), "exit": code, "seconds": seconds, **rates(rows), "rows": rows}
    chosen.out.write_text(json.dumps(result, indent=1))
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1))
    return code


def asked(chosen: argparse.Namespace) -> dict[str, Any]:
    """The arguments but the place of the result."""
    return {name: value for name, value in vars(chosen).items() if name != "out"}


def run(root: Path, chosen: argparse.Namespace) -> tuple[int, float]:
    """The run's exit code and how long it took."""
    command = [sys.executable, "launchers/submit.py", *overrides(root, chosen)]
    started = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, "HYDRA_FULL_ERROR": "1"})
    try:
        code = process.wait(chosen.seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(2)
        code = process.wait(120) or 124
    return code, time.monotonic() - started


def overrides(root: Path, chosen: argparse.Namespace) -> list[str]:
    """The run, as keys of the config."""
    gpus = chosen.trainers + chosen.servers * chosen.tensor
    on_gpus = [
        "resources.device=cuda",
        f"resources.gpus_per_node={gpus}",
        "resources.trainer.gpus=1",
        f"resources.inference.gpus={chosen.tensor}",
        "model.dtype=bfloat16",
        "training.compile=true",
    ]
    return [
        "name=loop",
        f"output={root / 'runs'}",
        f"model.path={root / 'model'}",
        f"model.max_length={min(chosen.tokens + 64, WORKLOADS[chosen.shape].model['max_position_embeddings'])}",
        "task.name=tests.gpu.words:Words",
        f"training.steps={chosen.steps}",
        f"training.prompts_per_step={PROMPTS}",
        f"training.max_lag={chosen.lag}",
        "training.eval_every=0",
        "training.checkpoint_every=100000",
        "optim.lr=1e-5",
        f"rollout.samples={SAMPLES}",
        f"rollout.max_tokens={chosen.tokens}",
        "inference.max_sequences=512",
        f"inference.api_processes={chosen.api}",
        "cluster.startup_seconds=400",
        "resources.services.nodes=0",
        f"resources.trainer.processes={chosen.trainers}",
        "resources.inference.nodes=1",
        f"resources.inference.servers={chosen.servers}",
        "tracking.wandb=off",
        *(on_gpus if chosen.device == "cuda" else []),
        *chosen.overrides,
    ]


def rows_of(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def rates(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Samples a second over the settled steps, from the time of each row, and medians of what the trainer says."""
    train = [row for row in rows if row["kind"] == "train" and row["job"] == "rl"]
    settled = train[SETTLED:]
    if len(settled) < 2:
        return {}
    seconds = settled[-1]["time"] - settled[0]["time"]
    found = {"samples_per_second": (len(settled) - 1) * PROMPTS * SAMPLES / seconds}
    names = [name for name, value in settled[-1].items() if "/" in name and isinstance(value, int | float)]
    return found | {name: statistics.median(row[name] for row in settled if name in row) for name in names}


def show_logs(run: Path) -> None:
    for log in sorted(run.glob("attempts/*/logs/*")):
        print(f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-25:], sep="\n", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
