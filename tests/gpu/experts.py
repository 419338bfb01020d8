"""Tokens/s, model FLOPs utilization and memory of a mixture of experts on one GPU, of this trainer and of plain loops.

    python -m tests.gpu.experts OUT.json [--shape 3b 30b-8layers] [--device cuda] [--steps 4] [--seconds 420]
    torchrun --nproc-per-node 2 -m tests.gpu.experts OUT.json --ep 1 2 [--shape 30b-8layers] [--batches 8] [--dry-run]

Random weights in the shape of Qwen3-MoE, 16 packed rows of 1,024 tokens. The plain loops keep bfloat16 parameters and
have no optimizer; the worker takes whole steps with float32 parameters and AdamW. MFU is as docs/metrics.md counts it.
A way that fails is recorded with its error; none begins after `--seconds`.

With `--ep` the worker alone is timed, on all GPUs of torchrun, with the experts of each layer spread over so many of
them. Each GPU has 16 rows in each of `--batches` micro-batches of a step. Tokens/s are of all GPUs, MFU is their mean,
memory that of the fullest. `--dry-run` prints what would be timed and the memory that the arithmetic expects, without
torchrun for 2 GPUs. `--ways` chooses among the ways by name.
"""

import argparse
import gc
import inspect
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from pipeline.config import LossConfig, ModelConfig, OptimConfig
from pipeline.config.training_keys import Recomputation
from pipeline.errors import TrainingError
from pipeline.topology.gpu_memory import describe_mesh, trainer_memory
from pipeline.train.batching.packing import Budget
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines, RankState, joined_world
from pipeline.train.model.experts import EXPERTS
from pipeline.train.model.model_flops import ModelFlops
from pipeline.train.model.model_size import sizes_of
from pipeline.train.model.models import PolicyModel
from pipeline.train.worker_spec import ModelSpec
from tests.fakes.configs import make_config
from tests.gpu.workload import step_flops

PEAK = 989e12
"""Dense bf16 FLOP/s of an H100 or H200, by its data sheet."""
GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
WARM_UP, CHUNK, ATTENTION = 2, 2048, "bench_packed"
_SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "vocab_size": 128}
SHAPES: dict[str, dict[str, int]] = {
    "3b": {
        "hidden_size": 1536,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "vocab_size": 32768,
    },
    "30b-8layers": {
        "hidden_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "vocab_size": 32768,
    },
    "tiny": _SMALL | {"hidden_size": 64, "num_hidden_layers": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
SHAPES["30b-8layers-64k"] = SHAPES["30b-8layers"]
ROWS = {"tiny": (4, 32), "30b-8layers-64k": (64, 1024)}
"""Rows of a micro-batch, and tokens of each; others have 16 of 1,024."""
PLAIN = ("eager", "grouped_mm", "grouped_mm+compiled", EXPERTS, f"{EXPERTS}+compiled", "dense+compiled")
WORKER = ("worker+compiled+recomputed", "worker+compiled+selective", "worker+compiled", "worker+recomputed")
SPREAD = ("worker+compiled+recomputed+resharded", "worker+compiled+recomputed", "worker+compiled+resharded")
SPREAD += ("worker+compiled+selective+resharded",)


def config_of(shape: str, dense: bool = False) -> Any:
    """Qwen3-MoE of this shape, or the Qwen3 whose tokens meet as many parameters."""
    given: dict[str, Any] = {**SHAPES[shape], "max_position_embeddings": 4096, "tie_word_embeddings": False}
    if not dense:
        return AutoConfig.for_model("qwen3_moe", norm_topk_prob=True, mlp_only_layers=[], **given)
    wide = given.pop("num_experts_per_tok") * given.pop("moe_intermediate_size")
    given.pop("num_experts")
    return AutoConfig.for_model("qwen3", intermediate_size=wide, **given)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **others: Any
) -> tuple[Tensor, None]:
    """Causal attention of packed rows of one length, `others["row_length"]`: [1, H, P, D] → [1, P, H, D]."""
    length = others["row_length"]
    if not query.is_cuda:
        rows = [x[0].reshape(len(x[0]), -1, length, x.shape[-1]).transpose(0, 1) for x in (query, key, value)]
        q, k, v = rows
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)[None], None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
    if GROUPS:
        options["enable_gqa"] = True
    else:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    bounds = torch.arange(0, len(q) + 1, length, dtype=torch.int32, device=q.device)
    attended: Any = varlen.varlen_attn(q, k, v, bounds, bounds, length, length, **options)
    return attended[None], None


AttentionInterface.register(ATTENTION, attend)


def plain_step(way: str, shape: str, device: str) -> tuple[Callable[[], float], ModelFlops]:
    """A forward and backward pass of transformers' model, and what its operations are."""
    experts, *switches = way.split("+")
    dense, (rows, length) = experts == "dense", ROWS.get(shape, (16, 1024))
    chosen = {} if dense else {"experts_implementation": experts}
    with torch.device(device):
        network: Any = AutoModelForCausalLM.from_config(
            config_of(shape, dense), dtype=torch.bfloat16, attn_implementation=ATTENTION, **chosen
        )
        tokens = torch.randint(0, SHAPES[shape]["vocab_size"], (1, rows * length))
        positions = torch.arange(length).repeat(rows)[None]
    for layer in network.model.layers if "compiled" in switches else ():
        layer.compile()

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ network.lm_head.weight.T).float(), targets, reduction="sum")

    def step() -> float:
        network.zero_grad(set_to_none=True)
        given = {"input_ids": tokens, "position_ids": positions, "use_cache": False, "row_length": length}
        hidden, targets = network.model(**given).last_hidden_state[0], tokens[0].roll(-1)
        parts = zip(torch.split(hidden, CHUNK), torch.split(targets, CHUNK), strict=True)
        loss = sum(checkpoint(part, h, t, use_reentrant=False) for h, t in parts) / len(targets)
        loss.backward()
        return float(loss)

    return step, PolicyModel(network).flops


def time_plain(way: str, shape: str, device: str, steps: int) -> dict[str, Any]:
    step, flops = plain_step(way, shape, device)
    return figures(step, step_flops(flops, make_batch(shape)), shape, device, steps)


def time_worker(way: str, shape: str, device: str, steps: int) -> dict[str, Any]:
    """Whole steps of this trainer's worker, in a world of one rank."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update(own)
        with joined_world("cuda" if device == "cuda" else "cpu", Deadlines(300, 600, grace=5)) as site:
            found = time_ranks(site, way, shape, steps, folder)
            RankGroup(site, Budget(1)).close()
    return found


def time_ranks(
    site: RankState, way: str, shape: str, steps: int, folder: str, ep: int = 1, batches: int = 1
) -> dict[str, Any]:
    """Controller: whole steps of this trainer's workers on all ranks of a world, of so many micro-batches."""
    config_of(shape).save_pretrained(folder)
    (Path(folder) / "tokenizer.json").write_text("{}")
    spec = ModelSpec(
        kind="policy",
        model=ModelConfig(path=folder, init="random", dtype="bfloat16"),
        optim=OptimConfig(lr=1e-6),
        compile="compiled" in way,
        activation_checkpointing=recomputation(way),
        reshard="resharded" in way,
        ep=ep,
    )
    shares = site.ranks * batches
    batch = make_batch(shape, shares)
    dispatch = RankGroup(site, Budget(sum(batch.lengths) // shares, shared=False))
    dispatch.init_model("policy", spec)

    def step() -> float:
        metrics = dispatch.forward_backward("policy", batch, LossConfig(name="reinforce"))
        dispatch.optim_step("policy")
        return metrics["loss"]

    try:
        flops = step_flops(dispatch.models["policy"].flops, batch)
        found = figures(step, flops, shape, site.device, steps, site.ranks, batches)
        found["peak_gib"] = max(dispatch.run_on_all_models(peak_gib))
    finally:
        if not dispatch.broken:
            dispatch.remove_model("policy")
    return found


def recomputation(way: str) -> Recomputation:
    """The value of `training.activation_checkpointing` in a way of the worker."""
    return "full" if "recomputed" in way else "selective" if "selective" in way else "none"


def peak_gib(site: RankState) -> float:
    """The most memory that was allocated since `forget_peak`."""
    return torch.cuda.max_memory_allocated() / 2**30 if site.device == "cuda" else 0.0


def forget_peak(site: RankState) -> None:
    clear(site.device)


def time_spread(given: argparse.Namespace, begun: float) -> dict[str, dict[str, Any]]:
    """Every way with experts spread over each of `--ep` ranks, in torchrun's world; empty on other ranks than 0."""
    found = dict[str, dict[str, Any]]()
    with joined_world(given.device, Deadlines(300, 600, grace=5)) as site:
        if site.rank:
            site.serve()
            return {}
        control = RankGroup(site, Budget(1))
        for shape, way, ep in product(given.shape, given.ways or SPREAD, given.ep):
            name = f"{shape}, {way}, {site.ranks} ranks, ep {ep}"
            if time.perf_counter() - begun > given.seconds:
                found[name] = {"error": "not begun: time is over"}
                continue
            control.run_on_all_models(forget_peak)
            try:
                with tempfile.TemporaryDirectory() as folder:
                    found[name] = time_ranks(site, way, shape, given.steps, folder, ep, given.batches)
            except (TrainingError, torch.cuda.OutOfMemoryError) as error:
                found[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            given.out.write_text(json.dumps(found, indent=1))
        control.close()
    return found


def describe_spread(shape: str, way: str, ep: int, ranks: int) -> str:
    """What would be timed, and the memory that the arithmetic expects."""
    rows, length = ROWS.get(shape, (16, 1024))
    with tempfile.TemporaryDirectory() as folder:
        config_of(shape).save_pretrained(folder)
        (Path(folder) / "tokenizer.json").write_text("{}")
        config = make_config(
            resources={"device": "cuda", "trainer": {"processes": ranks, "gpus": 1}},
            model={"path": folder, "init": "random", "dtype": "bfloat16", "max_length": length},
            training={
                "steps": 0,
                "prompts_per_step": 1,
                "sft": {"steps": 1, "batch": rows * ranks},
                "micro_batch_tokens": rows * length,
                "compile": "compiled" in way,
                "activation_checkpointing": recomputation(way),
                "reshard_after_forward": "resharded" in way,
                "mesh": {"ep": ep},
            },
        )
        need = trainer_memory(config, sizes_of(config.model))
    return f"{shape}, {way}: {describe_mesh(config)}: {need}"


def make_batch(shape: str, shares: int = 1) -> Batch:
    (rows, length), draw = ROWS.get(shape, (16, 1024)), np.random.default_rng(0)
    rows *= shares
    tokens = draw.integers(0, SHAPES[shape]["vocab_size"], (rows, length)).astype(np.int32)
    mask, sampled = (np.arange(length) >= length // 16).astype(np.uint8), np.full(length, -10.0, np.float32)
    made = [
        TrainSequence(each, mask, advantages=1.0, sampler_logprobs=sampled, prompt=index)  # rows of as many prompts
        for index, each in enumerate(tokens)
    ]
    return Batch.of(made, "token")


def figures(
    step: Callable[[], float], flops: float, shape: str, device: str, steps: int, ranks: int = 1, batches: int = 1
) -> dict[str, Any]:
    """The median of `steps` steps of `flops` operations after `WARM_UP` others; peak memory of this rank."""
    seconds, loss = [], 0.0
    for _ in range(WARM_UP + steps):
        begun = time.perf_counter()
        loss = step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    rows, length = ROWS.get(shape, (16, 1024))
    median = statistics.median(seconds[WARM_UP:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {
        "tokens_per_second": ranks * batches * rows * length / median,
        "mfu": flops / median / PEAK / ranks,
        "peak_gib": peak,
        "seconds": seconds,
        "loss": loss,
    }


def clear(device: str) -> None:
    gc.collect()
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def attempt(way: str, shape: str, device: str, steps: int) -> dict[str, Any]:
    try:
        return (time_worker if way in WORKER else time_plain)(way, shape, device, steps)
    except Exception as error:  # noqa: BLE001 (the failure of one way is a result; the others are still timed)
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def table(found: dict[str, dict[str, Any]]) -> str:
    """One line for each shape and way."""
    lines = [f"{'shape, way':68s} {'tokens/s':>9s} {'MFU':>6s} {'peak GiB':>8s}"]
    for name, each in found.items():
        numbers = "{tokens_per_second:9,.0f} {mfu:6.3f} {peak_gib:8.1f}"
        lines.append(f"{name:68s} {each['error'] if 'error' in each else numbers.format(**each)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", nargs="*", default=["3b", "30b-8layers"], choices=SHAPES)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--ep", nargs="*", type=int, help="time the worker on all ranks, with experts spread so")
    parser.add_argument("--batches", type=int, default=1, help="with --ep: micro-batches of a step")
    parser.add_argument(
        "--ways", nargs="*", choices=(*WORKER, *PLAIN, *SPREAD), help="the ways to time; all by default"
    )
    parser.add_argument("--dry-run", action="store_true", help="with --ep: print what would be timed, and its memory")
    given = parser.parse_args()
    begun, found = time.perf_counter(), dict[str, dict[str, Any]]()
    torch._dynamo.config.recompile_limit = 32
    if given.ep and given.dry_run:
        ranks = int(os.environ.get("WORLD_SIZE", "2"))
        ways = given.ways or SPREAD
        print(*(describe_spread(*each, ranks) for each in product(given.shape, ways, given.ep)), sep="\n")
        return
    if given.ep:
        if found := time_spread(given, begun):
            print(table(found))
        return
    for shape, way in [(shape, way) for shape in given.shape for way in given.ways or (*WORKER, *PLAIN)]:
        if time.perf_counter() - begun > given.seconds:
            found[f"{shape}, {way}"] = {"error": "not begun: time is over"}
            continue
        clear(given.device)
        found[f"{shape}, {way}"] = attempt(way, shape, given.device, given.steps)
        given.out.write_text(json.dumps(found, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()
