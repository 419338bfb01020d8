"""AdamW with each type of `optim.state_dtype`: what a small transformer learns with it, and what a step costs.

    python -m tests.bench.bench_moments [--steps 300] [--seeds 0 1] [--beta2 0.95 0.999]

The model predicts the next byte of this project's documentation. `loss` is the mean of the last fifty steps, `update`
the root mean square of the last hundred updates relative to the learning rate, over all parameters. `CPU ms` is of the
optimizer's step alone, in the median.
"""

import argparse
import time
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config import OptimConfig
from pipeline.config.schema import MomentType
from pipeline.train.model.optimizer import Optimizer

DOCS = Path(__file__).resolve().parents[2] / "docs"
BYTES, WIDTH, HEADS, LAYERS, LENGTH, ROWS = 256, 64, 4, 2, 64, 16
LR = 2e-3


class Model(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, BYTES)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, rows: Tensor) -> Tensor:
        """Logits [rows, LENGTH, BYTES] of bytes [rows, LENGTH]."""
        inputs = self.bytes(rows) + self.places.weight
        return self.head(self.layers(inputs, mask=self.mask, is_causal=True))  # type: ignore[no-any-return]


def learn(text: Tensor, moment_type: MomentType, beta2: float, seed: int, steps: int) -> tuple[float, float, float]:
    """Loss, update and CPU milliseconds; see the module."""
    torch.manual_seed(seed)
    model = Model()
    parameters = list(model.parameters())
    config = OptimConfig(lr=LR, beta2=beta2, state_dtype=moment_type, warmup_steps=20, clip_norm=100.0)
    optimizer = Optimizer(parameters, config, steps)
    losses, updates, milliseconds = [], [], []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (ROWS,)).tolist()
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        before = [parameter.detach().clone() for parameter in parameters]
        started = time.process_time()
        optimizer.step()
        milliseconds.append(1e3 * (time.process_time() - started))
        moved = torch.cat([(p.detach() - was).flatten() for p, was in zip(parameters, before, strict=True)])
        updates.append(float(moved.square().mean().sqrt()) / LR)
        losses.append(loss.item())
    return mean(losses[-50:]), mean(updates[-100:]), median(milliseconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--beta2", type=float, nargs="+", default=[0.95, 0.999])
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    text = torch.tensor(list(b"".join(page.read_bytes() for page in sorted(DOCS.glob("*.md")))))
    print("| beta2 | moments | loss of each seed | update | CPU ms |\n| --- | --- | --- | ---: | ---: |")
    for beta2, moment_type in product(options.beta2, get_args(MomentType)):
        runs = [learn(text, moment_type, beta2, seed, options.steps) for seed in options.seeds]
        losses = ", ".join(f"{loss:.4f}" for loss, _, _ in runs)
        print(
            f"| {beta2:g} | {moment_type} | {losses} | {mean(u for _, u, _ in runs):.4f} "
            f"| {mean(ms for _, _, ms in runs):.1f} |",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
