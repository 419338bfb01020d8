"""How fast a training step is, beside a plain torch loop on the same rows.

    torchrun --nproc-per-node 2 -m tests.bench.bench_training [--rows 256] [--steps 10] [--model conf/models/tiny_qwen3]

Prints, for the worker with packed and with padded micro-batches and for a plain loop (no FSDP, AdamW, the same packed
micro-batch), seconds of wall and of CPU a step and tokens/s of all ranks. Each figure is the median of the steps, which
take turns, so that other load on the machine strikes all alike; CPU seconds are the fairer ones on a busy machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from pipeline import packing
from pipeline.config import LossConfig, ModelConfig, OptimConfig
from pipeline.losses import total
from pipeline.packing import Budget
from pipeline.training.collate import collate
from pipeline.training.model import build
from pipeline.training.ranks import Patience, joined
from pipeline.training.rows import Batch, Row
from pipeline.training.spec import ModelSpec
from pipeline.training.worker import Worker
from tests.bench.tables import markdown

LOSS = LossConfig(name="grpo")
TOKENS = 16384


def make_batch(rows: int, vocabulary: int) -> Batch:
    """Rows of 9 to 18 tokens, the first six of them prompt."""
    draw = np.random.default_rng(0)
    made = []
    for length in draw.integers(9, 19, rows).tolist():
        mask = np.ones(length, np.uint8)
        mask[:6] = 0
        tokens = draw.integers(0, vocabulary, length).astype(np.int32)
        made.append(Row(tokens, mask, float(draw.normal()), np.full(length, -np.log(vocabulary), np.float32)))
    return Batch.of(made)


def worker_step(worker: Worker, share: list[Batch], packed: bool) -> Callable[[], None]:
    def step() -> None:
        worker.forward_backward(share, packed, LOSS)
        worker.optim_step()

    return step


def plain_step(model: ModelConfig, share: list[Batch]) -> Callable[[], None]:
    policy = build(model, seed=0)
    adamw = torch.optim.AdamW(policy.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        for batch in share:
            micro = collate(batch, True, torch.device("cpu"))
            logprobs_N, _ = policy(
                micro.tokens_BT, micro.positions_BT, micro.segments, micro.predict_N, batch.temperature, False
            )
            loss, _ = total(micro.loss_tokens(logprobs_N, None), LOSS)
            loss.backward()  # type: ignore[no-untyped-call]
        adamw.step()
        adamw.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model", default="conf/models/tiny_qwen3")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    model = ModelConfig(path=chosen.model, init="random")
    with joined("cpu", Patience()) as site:
        worker = Worker(ModelSpec("policy", model, OptimConfig()), site.mesh_of("policy"))
        batch = make_batch(chosen.rows, worker.info.vocabulary)
        shares = {
            packed: [batch.take(bins) for bins in packing.split(batch.lengths, site.ranks, budget)[site.rank]]
            for packed, budget in ((True, Budget(TOKENS)), (False, Budget(TOKENS, packed=False)))
        }
        ways = {
            "worker, packed": worker_step(worker, shares[True], True),
            "worker, padded": worker_step(worker, shares[False], False),
            "plain loop": plain_step(model, shares[True]),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(chosen.steps + 2):
            for name, step in ways.items():
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                step()
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        if site.rank == 0:
            report(times, sum(batch.lengths), site.ranks)


def report(times: dict[str, list[tuple[float, float]]], tokens: int, ranks: int) -> None:
    rows = []
    for name, measured in times.items():
        walls, cpus = zip(*measured[2:], strict=True)
        wall, cpu = statistics.median(walls), statistics.median(cpus)
        rows.append((name, wall, cpu, tokens / wall))
    print(f"{tokens} tokens a step, {ranks} ranks, 1 thread each\n")
    print(markdown(("way", "s a step", "CPU s a step", "tokens/s"), rows))


if __name__ == "__main__":
    main()
