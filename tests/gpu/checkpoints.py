"""Checkpoints of a trainer on CUDA: copies in pinned memory, kill and resume, and how long training stands still.

    python -m tests.gpu.checkpoints [--ranks N] [--device cpu --shape tiny]

A world of N ranks commits step 3 of three models, goes on to step 6 while that is written, and is killed in its next
commit; a second one, whose models take turns on the device, resumes and must take the same steps within 1e-5 (CUDA
sums in no fixed order). Then the commits of a policy of Qwen3-0.6B's shape are timed, whose first step comes so many
seconds (`--early`) after the models are there: in a run, servers start meanwhile.
"""

import argparse
import json
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.config import LossConfig
from pipeline.run.paths import RunPaths
from pipeline.train.batching.packing import Budget
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.lead_or_serve import run_controller_or_worker
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.run_recorder import RunRecorder
from pipeline.utils.waiting import wait_for
from tests.fakes.configs import make_config
from tests.support.models.tiny import write_tiny
from tests.support.ranks import checkpoint_worlds as worlds
from tests.support.ranks.forked_ranks import end_ranks, start_in

CLOSE = 1e-5
SHAPES: dict[str, dict[str, int]] = {
    "0.6b": {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "tiny": {},
}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--early", type=float, default=0.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        killed_and_resumed(Path(folder) / "run", asked.ranks, asked.device)
        timed(Path(folder) / "large", asked.ranks, asked.device, asked.shape, asked.early)


def killed_and_resumed(run: Path, ranks: int, device: str) -> None:
    write_tiny(run / "model")
    first = start(ranks, worlds.world, worlds.first, run, "1-0", run / "first", False, device)
    try:
        wait_for("the second commit", (run / "first" / "reached").exists, 240)
    finally:
        end_ranks(first)
    finish(start(ranks, worlds.world, worlds.resume, run, "1-1", run / "resume", True, device))
    one, other = (json.loads((run / name / "steps.json").read_text()) for name in ("first", "resume"))
    distances = [abs(mine[key] - truth[key]) for mine, truth in zip(one, other, strict=True) for key in truth]
    states = [torch.load(run / name / "state.pt", weights_only=True) for name in ("first", "resume")]
    for name in worlds.NAMES:
        for place, value in states[0][name].items():
            if torch.is_tensor(value):
                distance = (states[1][name][place] - value).abs().max() / value.abs().max().clamp(min=CLOSE)
                distances.append(float(distance))
    print(f"killed and resumed: {len(distances)} numbers, largest difference {max(distances):.1e}", flush=True)
    assert max(distances) <= CLOSE


def timed(run: Path, ranks: int, device: str, shape: str, early: float) -> None:
    write_tiny(run / "model", **SHAPES[shape], **HEADS)
    finish(start(ranks, time_commits, run, device, early))


def time_commits(rank: int, run: Path, device: Any, early: float) -> None:
    """Three commits: the first waits for its memory, as far as that is not made yet."""
    config = make_config(model={"path": str(run / "model"), "init": "random"})

    def lead(dispatch: RankGroup) -> None:
        commits = RunRecorder(RunPaths(run).attempt("large-1", "1-0"), config, dispatch)
        job = commits.restore().job
        time.sleep(early)
        draw = np.random.default_rng(0)
        row = TrainSequence(
            draw.integers(0, 17, 64).astype(np.int32), np.arange(64) > 0, 1.0, np.full(64, -3, np.float32)
        )
        for step in (1, 2, 3):
            dispatch.forward_backward("policy", Batch.of([row], "token"), LossConfig(name="grpo"))
            dispatch.optim_step("policy")
            began = time.monotonic()
            commits.save_checkpoint(job, step, ())
            still = time.monotonic() - began
            commits.finish()
            durable = time.monotonic() - began
            print(f"commit {step}: stood still {still:.2f} s, durable after {durable:.2f} s", flush=True)

    run_controller_or_worker(lead, Budget(tokens=64), device=device)


def start(count: int, work: Any, *arguments: Any) -> list[BaseProcess]:
    """Ranks that begin from nothing: CUDA cannot be forked."""
    return start_in(get_context("spawn"), count, work, *arguments)


def finish(ranks: list[BaseProcess]) -> None:
    for process in ranks:
        process.join(400)
    codes = [process.exitcode for process in ranks]
    end_ranks(ranks)
    assert codes == [0] * len(ranks), codes


if __name__ == "__main__":
    main()
