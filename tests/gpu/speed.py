"""Tokens/s, model FLOPs utilisation and memory of one optimizer step, of this trainer and of a plain loop.

    torchrun --nproc-per-node N -m tests.gpu.speed OUT.json [--shape 0.6b] [--device cuda] [--steps 6] [--ways …]

Rows are ragged (`--small`: 256 short ones, 16k tokens in all), or of one `--length`. With `--profile`, for one process,
each way is then traced: launches and times by phase (`step_profile`). Each way stands alone: built, warmed up, timed
and removed; what is known is written after each. A way that fails is recorded with its error, and the next one begins.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from pipeline.config import LossConfig, ModelConfig, OptimConfig
from pipeline.config.training_keys import Recomputation
from pipeline.train.batching import packing
from pipeline.train.batching.packing import Budget
from pipeline.train.batching.sequences import Batch
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines, RankState, joined_world
from pipeline.train.worker_spec import ModelSpec
from tests.gpu.plain import plain_step
from tests.gpu.step_profile import phases, profile_step
from tests.gpu.workload import WORKLOADS, Workload, flops_of, step_flops

LOSS = LossConfig(name="grpo")
OPTIM = OptimConfig(lr=1e-6)
WARM_UP = 3
PEAK = 989e12
"""Dense bf16 FLOP/s of an H100 or H200, by its data sheet."""
SAME_LOSS = 0.002
"""How far the losses of two ways may be apart: both compute in bf16, and differ in their head and their sums."""


@dataclass(frozen=True)
class Way:
    """One way to take a step."""

    plain: bool = False
    compile: bool = False
    packed: bool = True
    checkpointing: Recomputation = "none"
    staged: bool = False
    reshard: bool = False
    shared: bool = False
    replicas: int = 1
    moments: Literal["float32", "bfloat16", "float8"] = "float32"


WAYS = {
    "plain loop, compiled": Way(plain=True, compile=True),
    "plain loop, compiled, padded": Way(plain=True, compile=True, packed=False),
    "worker, compiled": Way(compile=True),
    "worker, compiled, rows staged": Way(compile=True, staged=True),
    "worker, compiled, rows staged, sharded again": Way(compile=True, staged=True, reshard=True),
    "worker, compiled, rows staged, prefixes shared": Way(compile=True, staged=True, shared=True),
    "worker, compiled, rows staged, moments bfloat16": Way(compile=True, staged=True, moments="bfloat16"),
    "worker, compiled, rows staged, moments float8": Way(compile=True, staged=True, moments="float8"),
    "worker, eager": Way(),
    "plain loop, eager": Way(plain=True),
    "worker, compiled, padded": Way(compile=True, packed=False),
    "worker, compiled, activations recomputed": Way(compile=True, checkpointing="full"),
}


@dataclass(frozen=True)
class Task:
    """What all ways share."""

    site: RankState
    model: Path
    load: Workload
    device: torch.device
    steps: int
    profile: bool = False
    ep: int = 1


def plain_micro_batches(batch: Batch, load: Workload, rank: int, ranks: int) -> list[Batch]:
    """This rank's micro-batches, cut as the worker's are."""
    return [batch.take(bins) for bins in packing.split_rows(batch.lengths, ranks, Budget(load.budget))[rank]]


def padded(batch: Batch) -> Batch:
    """The same rows, all as long as the longest: what is added counts for nothing, and has to be computed."""
    longest = max(batch.lengths)
    rows = [
        replace(
            row,
            tokens=np.pad(row.tokens, (0, longest - len(row))),
            mask=np.pad(row.mask, (0, longest - len(row))),
            sampler_logprobs=None
            if row.sampler_logprobs is None
            else np.pad(row.sampler_logprobs, (0, longest - len(row))),
        )
        for row in batch.rows
    ]
    return replace(batch, rows=rows)


def run_plain(
    site: RankState, model: str, load: Workload, way: Way, steps: int, profiled: bool = False
) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """On every rank: seconds of each step, and this rank's share of its loss; and the summary of a trace."""
    batch, device = load.make_batch(), torch.device(site.device)
    mine = plain_micro_batches(batch if way.packed else padded(batch), load, site.rank, site.ranks)
    step = plain_step(Path(model), mine, load.budget, device, site.ranks, way.compile)
    taken = [timed(step, device) for _ in range(WARM_UP + steps)]
    return taken, profile_step(step) if profiled else {}


@contextmanager
def the_worker(task: Task, way: Way) -> Iterator[tuple[Callable[[], float], RankGroup]]:
    """A step of the worker by the dispatch, and the dispatch."""
    budget, batch = Budget(task.load.budget, packed=way.packed, shared=way.shared), task.load.make_batch()
    dispatch = RankGroup(task.site, budget)
    spec = ModelSpec(
        kind="policy",
        model=ModelConfig(path=str(task.model), init="random", dtype="bfloat16"),
        optim=OPTIM.model_copy(update={"state_dtype": way.moments}),
        activation_checkpointing=way.checkpointing,
        compile=way.compile,
        reshard=way.reshard,
        dp_replicate=way.replicas,
        ep=task.ep,
    )
    dispatch.init_model("policy", spec)
    data = dispatch.stage([batch])[0] if way.staged else batch

    def step() -> float:
        metrics = dispatch.forward_backward("policy", data, LOSS)
        dispatch.optim_step("policy")
        return metrics["loss"]

    yield step, dispatch
    dispatch.remove_model("policy")


def reset_memory(site: RankState) -> None:
    gc.collect()
    torch._dynamo.reset()
    if site.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory(site: RankState) -> int:
    return torch.cuda.max_memory_allocated() if site.device == "cuda" else 0


def timed(step: Callable[[], float], device: torch.device) -> tuple[float, float]:
    """Seconds of the step, and what it returned."""
    begun = time.perf_counter()
    loss = step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun, loss


def measure(task: Task, way: Way) -> dict[str, Any]:
    """Controller: what one way costs."""
    everywhere = RankGroup(task.site, Budget(task.load.budget))
    everywhere.run_on_all_models(reset_memory)
    if way.plain:
        settings = (str(task.model), task.load, way, task.steps, task.profile)
        of_ranks = everywhere.run_on_all_models(run_plain, *settings)
        flops = step_flops(flops_of(task.model), task.load.make_batch())
        steps, summary = zip(*(ran for ran, _ in of_ranks), strict=True), of_ranks[0][1]
        taken = [(shares[0][0], sum(loss for _, loss in shares)) for shares in steps]
    else:
        with the_worker(task, way) as (step, dispatch):
            taken = [timed(step, task.device) for _ in range(WARM_UP + task.steps)]
            summary = profile_step(step) if task.profile else {}
            flops = dispatch.forward_backward("policy", task.load.make_batch(), LOSS)["flops"]
    seconds, losses = zip(*taken, strict=True)
    step_seconds, tokens = statistics.median(seconds[WARM_UP:]), sum(task.load.make_batch().lengths)
    return {
        "step_seconds": step_seconds,
        "first_step_seconds": seconds[0],
        "tokens_per_second": tokens / step_seconds,
        "mfu": flops / step_seconds / task.site.ranks / PEAK,
        "flops": flops,
        "peak_bytes": everywhere.run_on_all_models(peak_memory)[0],
        "steps": seconds,
        "losses": losses,
    } | ({"profile": summary} if summary else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=WORKLOADS, default="0.6b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), help="names as in WAYS")
    parser.add_argument("--length", type=int, default=0, help="tokens of each row; 0: ragged")
    parser.add_argument("--rows", type=int, default=128, help="rows of a step, where they have one length")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt, where rows have one length")
    parser.add_argument("--group", type=int, default=1, help="samples of a prompt, where rows have one length")
    parser.add_argument("--ep", type=int, default=1, help="processes over which the worker spreads experts")
    parser.add_argument("--small", action="store_true", help="short ragged rows, 16k tokens in all")
    parser.add_argument("--profile", action="store_true", help="trace each way; of one process")
    given = parser.parse_args()
    with joined_world(given.device, Deadlines(operation=300, control=600, grace=5)) as site:
        if site.rank:
            site.serve()
            return
        with tempfile.TemporaryDirectory() as folder:
            load = WORKLOADS[given.shape]
            load.write_model(Path(folder))
            if given.length:
                load = load.of_length(given.rows, given.length, given.prompt, given.group)
            elif given.small:
                load = load.of_small_rows()
            task = Task(site, Path(folder), load, torch.device(given.device), given.steps, given.profile, given.ep)
            with phases() if given.profile else nullcontext():
                lead(task, given.ways, given.out)
        RankGroup(site, Budget(1)).close()


def lead(task: Task, ways: list[str], out: Path) -> None:
    found: dict[str, Any] = {}
    for name in ways:
        try:
            found[name] = measure(task, WAYS[name])
        except Exception:  # noqa: BLE001 - one way's failure is a result; the others are still to be measured
            found[name] = {"error": traceback.format_exc()[-2000:]}
        out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
