"""Step seconds, tokens/s, model FLOPs utilization and memory of long rows, with and without context parallelism.

    python -m tests.gpu.context OUT.json [--lengths 32768 65536 131072] [--shape 0.6b] [--ways 1x1 2x1 2x2] [--compile]

Whole steps (float32 parameters, AdamW) on packed rows of one length, random weights in the shape of Qwen3. Activations
are recomputed as `--recompute` says. A way GPUSxCP has so many GPUs, of which so many share a row: by default one row
on one GPU; a row on each of two GPUs; one row on two GPUs. Each way has processes of its own, one a GPU, so one that
runs out of memory harms no other and is recorded with its error. `--reshard` gathers each layer's parameters again for
its backward pass. Tokens/s are of all GPUs, MFU (docs/metrics.md) is their mean, memory that of the fullest.
`--dry-run` prints what would be timed and the memory that the arithmetic expects. `--device cpu --shape tiny` needs no
GPU. None begins after `--seconds`.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from pipeline.config import LoraConfig, LossConfig, ModelConfig, OptimConfig
from pipeline.topology.gpu_memory import describe_mesh, trainer_memory
from pipeline.topology.memory_budget import GIB
from pipeline.train.batching.packing import Budget
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines, RankState, joined_world
from pipeline.train.loss_specs import SFT, LossSpec
from pipeline.train.model.model_size import sizes_of
from pipeline.train.throughput import PEAKS, peak_flops
from pipeline.train.worker_spec import ModelSpec
from tests.fakes.configs import make_config
from tests.gpu.step_profile import phases, profile_step
from tests.gpu.workload import TIED, WORKLOADS, step_flops

WARM_UP = 2
WHOLE_VOCABULARY = {"0.6b": {"vocab_size": 151_936}}
"""Of workloads that have a smaller one."""
WAYS = ("1x1", "2x1", "2x2")
"""Processes, and how many of them share a row."""


def model_of(shape: str) -> dict[str, Any]:
    """Arguments of `Qwen3Config`."""
    return TIED | WORKLOADS[shape].model | WHOLE_VOCABULARY.get(shape, {})


def write_shape(shape: str, longest: int, folder: Path) -> None:
    """A model directory of this shape, without weights."""
    settings: dict[str, Any] = model_of(shape) | {"max_position_embeddings": longest}
    AutoConfig.for_model("qwen3", **settings).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def make_batch(shape: str, length: int, rows: int) -> Batch:
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, model_of(shape)["vocab_size"], (rows, length)).astype(np.int32)
    mask, sampled = (np.arange(length) >= length // 16).astype(np.uint8), np.full(length, -10.0, np.float32)
    return Batch.of(
        [TrainSequence(row, mask, advantages=1.0, sampler_logprobs=sampled, prompt=i) for i, row in enumerate(tokens)]
    )


def time_rank(given: argparse.Namespace) -> None:
    """One rank of a way; rank 0 writes the figures."""
    with joined_world(given.device, Deadlines(300, 600, grace=5)) as site:
        if site.rank:
            site.serve()
            return
        dispatch = RankGroup(site, Budget(given.length * max(1, given.rows), shared=False))
        try:
            given.out.write_text(json.dumps(time_steps(dispatch, given)))
        finally:
            dispatch.close()


def time_steps(dispatch: RankGroup, given: argparse.Namespace) -> dict[str, Any]:
    """The median of `--steps` steps after `WARM_UP` others."""
    rows = given.rows or given.ranks // given.cp
    batch = make_batch(given.shape, given.length, rows)
    spec = ModelSpec(
        kind="policy",
        model=ModelConfig(
            path=str(given.model),
            init="random",
            dtype="bfloat16",
            max_length=given.length,
            lora=LoraConfig(rank=given.lora),
        ),
        optim=OptimConfig(lr=1e-6),
        activation_checkpointing=given.recompute,
        compile=given.compile,
        reshard=given.reshard,
        cp=given.cp,
    )
    flops = step_flops(dispatch.init_model("policy", spec).flops, batch)
    objective: LossSpec = SFT if given.loss == "sft" else LossConfig(name=given.loss)
    seconds, losses = [], []

    def step() -> None:
        losses.append(dispatch.forward_backward("policy", batch, objective)["loss"])
        dispatch.optim_step("policy")
        dispatch.run_on_all_models(synchronize)

    for _ in range(WARM_UP + given.steps):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    loss = losses[-1]
    median = statistics.median(seconds[WARM_UP:])
    rate = rows * given.length / median
    peak = given.ranks * ((peak_flops(torch.cuda.get_device_name()) if given.device == "cuda" else 0) or PEAKS["H100"])
    return {
        "step_seconds": median,
        "tokens_per_second": rate,
        "mfu": flops / median / peak,
        "peak_gib": max(dispatch.run_on_all_models(peak_gib)),
        "seconds": seconds,
        "loss": loss,
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
    } | ({"profile": traced(step)} if given.profile else {})


def traced(step: Callable[[], None]) -> dict[str, Any]:
    with phases():
        return profile_step(step)


def synchronize(site: RankState) -> None:
    if site.device == "cuda":
        torch.cuda.synchronize()


def peak_gib(site: RankState) -> float:
    return torch.cuda.max_memory_allocated() / GIB if site.device == "cuda" else 0.0


def attempt(given: argparse.Namespace, model: Path, length: int, ranks: int, cp: int) -> dict[str, Any]:
    """The figures of one way, from processes of its own; its error if one of them fails."""
    out = model / "figures.json"
    out.unlink(missing_ok=True)
    options = {"length": length, "ranks": ranks, "cp": cp, "model": model, "steps": given.steps, "shape": given.shape}
    options |= {"recompute": given.recompute, "lora": given.lora, "loss": given.loss, "rows": given.rows}
    words = [f"--{name}={value}" for name, value in (options | {"device": given.device}).items()]
    words += [f"--{name}" for name in ("compile", "reshard", "profile") if getattr(given, name)]
    command = [sys.executable, "-m", "tests.gpu.context", str(out), *words]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    log = model / "log"
    with log.open("w") as file:
        started = [
            subprocess.Popen(
                command, env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=file
            )
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait(given.patience) for process in started]
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {given.patience:g} s"}
        finally:
            for process in started:
                process.kill()
                process.wait()
    if any(codes) or not out.exists():
        errors = [line for line in log.read_text().splitlines() if "Error" in line]
        return {"error": (errors or [f"exit codes {codes}"])[0][:300]}
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def describe(given: argparse.Namespace, model: Path, length: int, ranks: int, cp: int) -> str:
    """What would be timed, and the memory that the arithmetic expects of it."""
    config = make_config(
        resources={"device": "cuda", "trainer": {"processes": ranks, "gpus": 1}},
        model={"path": str(model), "init": "random", "dtype": "bfloat16", "max_length": length},
        training={
            "steps": 0,
            "prompts_per_step": 1,
            "sft": {"steps": 1, "batch": ranks // cp},
            "micro_batch_tokens": length // cp,
            "activation_checkpointing": given.recompute,
            "compile": given.compile,
            "reshard_after_forward": given.reshard,
            "mesh": {"cp": cp},
        },
    )
    return f"{name_of(length, ranks, cp)}: {describe_mesh(config)}; {trainer_memory(config, sizes_of(config.model))}"


def name_of(length: int, ranks: int, cp: int) -> str:
    return f"{length} tokens a row, {ranks // cp} rows, {ranks} GPUs, cp {cp}"


def table(found: dict[str, dict[str, Any]]) -> str:
    """One line for each way."""
    lines = [f"{'':46s} {'s/step':>8s} {'tokens/s':>9s} {'MFU':>6s} {'peak GiB':>8s}"]
    numbers = "{step_seconds:8.3f} {tokens_per_second:9,.0f} {mfu:6.3f} {peak_gib:8.1f}"
    for name, each in found.items():
        lines.append(f"{name:46s} {each['error'] if 'error' in each else numbers.format(**each)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="0.6b", choices=WORKLOADS)
    parser.add_argument("--lengths", nargs="*", type=int, default=[32_768, 65_536, 131_072])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--patience", type=float, default=150.0, help="seconds for one way")
    parser.add_argument("--ways", nargs="*", default=WAYS, help="GPUs x how many of them share a row, such as 4x2")
    parser.add_argument("--recompute", default="full", choices=("none", "selective", "full"))
    parser.add_argument("--loss", default="reinforce", help="sft, or a loss of RL")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0: all weights")
    parser.add_argument("--rows", type=int, default=0, help="rows of a step; 0: one for each set of GPUs")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--reshard", action="store_true")
    parser.add_argument("--profile", action="store_true", help="trace each way too: launches and times by phase")
    parser.add_argument("--dry-run", action="store_true", help="print what would be timed, and its memory")
    for option in ("length", "ranks", "cp"):
        parser.add_argument(f"--{option}", type=int, default=0, help=argparse.SUPPRESS)  # of one rank of a way
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.model:
        time_rank(given)
        return
    begun, found = time.perf_counter(), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        write_shape(given.shape, max(given.lengths), Path(folder))
        ways = [tuple(map(int, way.split("x"))) for way in given.ways]
        for way in [(length, *way) for length in given.lengths for way in ways]:
            if given.dry_run:
                print(describe(given, Path(folder), *way))
            elif time.perf_counter() - begun > given.seconds:
                found[name_of(*way)] = {"error": "not begun: time is over"}
            else:
                found[name_of(*way)] = attempt(given, Path(folder), *way)
                given.out.write_text(json.dumps(found, indent=1))
    if found:
        print(table(found))


if __name__ == "__main__":
    main()
