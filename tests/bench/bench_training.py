"""How fast a training step is, beside a plain torch loop on the same rows, with one process and with two.

    python -m tests.bench.bench_training [--ranks 1 2] [--rows 64] [--longest 200] [--steps 11] [--compile]

Starts a torchrun world of each size and prints one table. The plain loop has the same model, attention, loss, packed
micro-batches, clipping and fused AdamW, and one all-reduce of all gradients; it has no FSDP, no dispatch, no metrics.
Ways take turns, so that other load on the machine strikes all alike: `relative` is the median over the rounds of a
way's CPU seconds (of all ranks) over the plain loop's of the same round. The rule is that the worker, by the dispatch,
costs at most 10 % more. Compilation takes minutes on a CPU, so that way has to be asked for.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline.config import LossConfig, ModelConfig, OptimConfig
from pipeline.train.batching import packing
from pipeline.train.batching.packing import Budget
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.batch_staging import ShardedBatch
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines, RankState, joined_world
from pipeline.train.model.collate import collate
from pipeline.train.model.models import build_model
from pipeline.train.total_loss import total
from pipeline.train.worker_spec import ModelSpec
from tests.bench.tables import judge, markdown

LOSS, OPTIM = LossConfig(name="grpo"), OptimConfig()
TOKENS, WARM_UP = 2048, 2
PLAIN, JUDGED = "plain loop", "worker, staged"
Step = Callable[[], object]
Times = dict[str, list[tuple[float, float]]]
_steps: dict[str, Step] = {}
"""What `take` runs in this process."""


def make_batch(rows: int, longest: int, vocabulary: int) -> Batch:
    """Ragged rows of a tenth to all of `longest` tokens, the first six of them prompt."""
    draw = np.random.default_rng(0)
    made = []
    for length in draw.integers(max(8, longest // 10), longest + 1, rows).tolist():
        mask = np.ones(length, np.uint8)
        mask[:6] = 0
        tokens = draw.integers(0, vocabulary, length).astype(np.int32)
        made.append(TrainSequence(tokens, mask, float(draw.normal()), np.full(length, -np.log(vocabulary), np.float32)))
    return Batch.of(made)


def plain_step(model: ModelConfig, share: list[Batch], ranks: int) -> Step:
    policy = build_model(model, seed=0)
    adamw = torch.optim.AdamW(policy.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        for batch in share:
            micro = collate(batch, "packed", torch.device("cpu"))
            where = micro.tokens_BT, micro.positions_BT, micro.segments, micro.before_M, micro.targets_M
            logprobs_N, _ = policy(*where, batch.temperature, False)
            loss, _ = total(micro.loss_tokens(logprobs_N, None), LOSS, "none")
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        if ranks > 1:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            for gradient, whole in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(whole.view_as(gradient))
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    return step


def make_plain(site: RankState, model: ModelConfig, batch: Batch) -> None:
    share = [batch.take(bins) for bins in packing.split_rows(batch.lengths, site.ranks, Budget(TOKENS))[site.rank]]
    _steps[PLAIN] = plain_step(model, share, site.ranks)


def take(site: RankState, name: str) -> None:
    _steps[name]()


def cpu_seconds(site: RankState) -> float:
    return time.process_time()


def ways(dispatch: RankGroup, padded: RankGroup, model: ModelConfig, batch: Batch, compiled: bool) -> dict[str, Step]:
    """What is measured, by name; every way has a model of its own, and takes staged rows or sends them."""
    specs = {
        JUDGED: (dispatch, True, {}),
        "worker, rows sent each time": (dispatch, False, {}),
        "worker, padded": (padded, False, {}),
        "worker, activations recomputed": (dispatch, True, {"activation_checkpointing": "full"}),
        "worker, compiled": (dispatch, True, {"compile": True}),
    }
    if not compiled:
        del specs["worker, compiled"]
    for name, (of, _, switches) in specs.items():
        of.init_model(name, ModelSpec("policy", model, OPTIM, **switches))
    staged = dispatch.stage([batch])[0]

    def step(of: RankGroup, name: str, data: Batch | ShardedBatch) -> Step:
        def taken() -> None:
            of.forward_backward(name, data, LOSS)
            of.optim_step(name)

        return taken

    steps = {name: step(of, name, staged if stays else batch) for name, (of, stays, _) in specs.items()}
    return {PLAIN: lambda: dispatch.run_on_all_models(take, PLAIN), **steps}


def measure(dispatch: RankGroup, chosen: dict[str, Step], steps: int) -> Times:
    """Wall seconds, and CPU seconds of all ranks, of every step, in turn."""
    times: Times = {name: [] for name in chosen}
    for number in range(WARM_UP + steps):
        for name, step in chosen.items():
            cpu, wall = sum(dispatch.run_on_all_models(cpu_seconds)), time.perf_counter()
            step()
            spent = time.perf_counter() - wall, sum(dispatch.run_on_all_models(cpu_seconds)) - cpu
            if number >= WARM_UP:
                times[name].append(spent)
    return times


def inside(given: argparse.Namespace) -> None:
    """In each process of a world."""
    torch.set_num_threads(1)
    model = ModelConfig(path=given.model, init="random")
    with joined_world("cpu", Deadlines()) as site:
        if site.rank:
            site.serve()
            return
        batch = make_batch(given.rows, given.longest, build_model(model, 0).vocabulary)
        dispatch, padded = RankGroup(site, Budget(TOKENS)), RankGroup(site, Budget(TOKENS, packed=False))
        dispatch.run_on_all_models(make_plain, model, batch)
        times = measure(dispatch, ways(dispatch, padded, model, batch, given.compile), given.steps)
        Path(given.inside).write_text(json.dumps({"tokens": sum(batch.lengths), "times": times}))
        dispatch.close()


def rows_of(found: dict[str, Any], ranks: int) -> Iterator[tuple[object, ...]]:
    """The table's rows of one world."""
    plain = [cpu for _, cpu in found["times"][PLAIN]]
    for name, measured in found["times"].items():
        walls, cpus = zip(*measured, strict=True)
        wall, ratio = statistics.median(walls), statistics.median(a / b for a, b in zip(cpus, plain, strict=True))
        yield name, ranks, wall, statistics.median(cpus), found["tokens"] / wall, ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--longest", type=int, default=200)
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--model", default="conf/models/tiny_qwen3")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        inside(given)
        return 0
    table: list[tuple[object, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in given.ranks:
            out = Path(folder) / str(ranks)
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            command = [sys.executable, *torchrun, "-m", "tests.bench.bench_training", *sys.argv[1:]]
            subprocess.run([*command, "--inside", str(out)], check=True, timeout=1800)
            found = json.loads(out.read_text())
            table += rows_of(found, ranks)
    print(f"{found['tokens']} tokens in {given.rows} rows a step, micro-batches of {TOKENS}, 1 thread a rank\n")
    print(markdown(("variant", "ranks", "s a step", "CPU s", "tokens/s", "relative"), table))
    costs = [float(str(row[5])) for row in table if row[0] == JUDGED]
    return judge("a staged step costs at most 1.10 of the plain loop", max(costs) <= 1.10)


if __name__ == "__main__":
    sys.exit(main())
