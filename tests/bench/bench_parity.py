"""Optimizer steps beside TRL's GRPOTrainer, on the same rows: are log-probabilities, losses and gradient norms equal?

    python -m tests.bench.bench_parity --trl /path/to/python [--steps 10] [--rows 32]

`--trl` is the Python of an environment that has TRL; it is no dependency of the project:

    python -m venv trl && trl/bin/pip install trl

Both train the tiny model from the same random weights in float32 on the CPU, with DAPO's clipped loss normalised by
token, and the same AdamW. Each step has rows of its own: prompts and completions of several lengths, an advantage for
each, and log-probabilities of a sampler that are off the first policy's by so much that both bounds of the ratio bind.
Rollcall packs the rows and cuts them into micro-batches; TRL pads them and takes them in one. Prints each step's mean
log-probability of the completions' tokens, loss, and gradient norm before clipping, of both. The exit code is 1 if any
of them is further apart than 1e-4, relative to TRL's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pipeline.config import LossConfig, ModelConfig, OptimConfig
from pipeline.train.batching.packing import Budget
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.lead_or_serve import run_controller_or_worker
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.worker_spec import ModelSpec
from tests.bench.tables import judge, markdown
from tests.support.ranks.forked_ranks import run_ranks

LIMIT, TOKENS = 1e-4, 512
OPTIM = OptimConfig(lr=1e-3, clip_norm=0.5)
LOSS = LossConfig(name="dapo", clip_low=0.2, clip_high=0.28, old_logprobs="sampler", tis="none")
NAMES = ("log-probability", "loss", "gradient norm")
Steps = list[list[float]]
"""The three numbers of `NAMES` for each step."""


def make_model(folder: Path) -> Path:
    """The tiny model that the project ships, with random weights."""
    shipped = "conf/models/tiny_qwen3"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shipped), dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(shipped).save_pretrained(folder)
    return folder


def make_rows(step: int, count: int) -> list[TrainSequence]:
    """Rows of 2 to 12 prompt tokens and 1 to 40 more; the sampler's log-probabilities are not known yet."""
    draw = np.random.default_rng([7, step])
    rows = []
    for _ in range(count):
        prompt, length = int(draw.integers(2, 13)), int(draw.integers(1, 41))
        tokens = draw.integers(3, 17, prompt + length).astype(np.int32)
        mask = (np.arange(prompt + length) >= prompt).astype(np.uint8)
        rows.append(TrainSequence(tokens, mask, float(np.float32(draw.normal() + 0.5))))
    return rows


def sampled(rows: list[TrainSequence], logprobs: list[NDArray[np.float32]], step: int) -> Batch:
    """The rows as if an older policy than the one that says `logprobs` had sampled them."""
    draw = np.random.default_rng([8, step])
    for row, said in zip(rows, logprobs, strict=True):
        noise = draw.normal(size=len(row.tokens)).astype(np.float32) * np.float32(0.2)
        object.__setattr__(row, "sampler_logprobs", (said + noise) * row.mask)
    return Batch.of(rows)


def mean_logprob(batch: Batch, logprobs: list[NDArray[np.float32]]) -> float:
    """Of all counted tokens."""
    return float(sum(said[row.mask == 1].sum(dtype=np.float64) for row, said in zip(batch.rows, logprobs, strict=True)))


def as_asked(row: TrainSequence) -> dict[str, Any]:
    """A row as `trl_parity.py` reads it."""
    assert row.sampler_logprobs is not None
    begin = int(row.mask.argmax())
    return {
        "prompt": row.tokens[:begin].tolist(),
        "completion": row.tokens[begin:].tolist(),
        "sampler_logprobs": row.sampler_logprobs[begin:].tolist(),
        "advantage": row.advantages,
    }


def train(rank: int, model: str, steps: int, count: int, out: Path) -> None:
    """Rollcall's side, in a process of its own: the numbers of each step, and the rows for TRL."""

    def lead(dispatch: RankGroup) -> None:
        spec = ModelSpec("policy", ModelConfig(path=model, init="pretrained"), OPTIM, steps=steps)
        dispatch.init_model("policy", spec)
        drawn = [make_rows(step, count) for step in range(steps)]
        batches = [sampled(rows, dispatch.forward("policy", Batch.of(rows)), step) for step, rows in enumerate(drawn)]
        found: Steps = []
        for batch in batches:
            logprob = mean_logprob(batch, dispatch.forward("policy", batch)) / batch.counted
            loss = dispatch.forward_backward("policy", batch, LOSS)["loss"]
            found.append([logprob, loss, dispatch.optim_step("policy")["grad_norm"]])
        asked = [[as_asked(row) for row in batch.rows] for batch in batches]
        out.write_text(json.dumps({"steps": found, "batches": asked}))

    run_controller_or_worker(lead, Budget(TOKENS))


def train_with_trl(python: str, folder: Path, model: Path, batches: list[Any]) -> dict[str, Any]:
    """TRL's side: what `tests/bench/trl_parity.py` wrote."""
    asked = {
        "model": str(model),
        "batches": batches,
        "lr": OPTIM.lr,
        "betas": (OPTIM.beta1, OPTIM.beta2),
        "eps": OPTIM.eps,
        "clip_norm": OPTIM.clip_norm,
        "clip": (LOSS.clip_low, LOSS.clip_high),
        "out": str(folder / "trl.json"),
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, str(Path(__file__).with_name("trl_parity.py")), str(folder / "asked.json")]
    done = subprocess.run(command, timeout=900, env=environment, stdout=PIPE, stderr=STDOUT, text=True)
    if done.returncode:
        sys.exit(f"TRL's side ended with exit code {done.returncode}:\n{done.stdout[-3000:]}")
    found: dict[str, Any] = json.loads((folder / "trl.json").read_text())
    return found


def apart(ours: Steps, theirs: Steps) -> Steps:
    """How far each number is from TRL's, relative to TRL's; infinite where one is not finite."""
    found = np.abs(np.subtract(ours, theirs)) / np.abs(theirs)
    return [[float(each) for each in row] for row in np.where(np.isfinite(found), found, np.inf)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", default="", help="Python of an environment with TRL")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=32, help="of each step")
    given = parser.parse_args()
    if given.steps < 1 or given.rows < 2:
        parser.error("expected at least one step, of at least two rows")
    if not given.trl:
        print("skipped: give a Python that has TRL, made by: python -m venv trl && trl/bin/pip install trl; --trl")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model")
        run_ranks(1, train, str(model), given.steps, given.rows, folder / "ours.json")
        ours = json.loads((folder / "ours.json").read_text())
        theirs = train_with_trl(given.trl, folder, model, ours["batches"])
    differences = apart(ours["steps"], theirs["steps"])
    columns = [column for name in NAMES for column in (name, "TRL", "difference")]
    rows = []
    for number, each in enumerate(zip(ours["steps"], theirs["steps"], differences, strict=True)):
        rows.append(
            [number + 1, *(cell for a, b, d in zip(*each, strict=True) for cell in (f"{a:.6f}", f"{b:.6f}", d))]
        )
    print(markdown(("step", *columns), rows))
    worst = max(max(row) for row in differences)
    print(f"\nTRL {theirs['trl']}, transformers {theirs['transformers']}; apart at most {worst:.2e}")
    return judge(f"nothing is more than {LIMIT:g} apart", worst <= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
