"""Adapters that change while a server generates: whether each token is of the adapter that it is labelled with.

    python -m tests.gpu.adapters OUT.json [--shape 0.6b] [--tensor 2] [--share] [--backend nccl] [--rank 16] …
    python -m tests.gpu.adapters OUT.json --device cpu --shape tiny --tensor 2     # over gloo, on CPUs

This process sends adapters A and B in turn from the first GPU; the server is tensor-parallel on the GPUs after it, or
with `--share` from that one on. Each token's log-probability is compared with that of the base with the adapter of the
version that the server labels it with, on the keys and values that earlier versions left. One process of the server
that is late, or a label that lies, gives other log-probabilities. Exit code 1: wrong tokens, a lost request, an update
that failed or that paused the server.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import InferenceConfig, LoraConfig, RunConfig
from pipeline.inference.weight_sync.publication import CPU
from pipeline.inference.weight_sync.server_sync import MeetingPoint
from pipeline.inference.weight_sync.sync_round import SyncReport
from pipeline.inference.weight_sync.weight_sender import WeightSender
from pipeline.rollout.server_client import Completion
from pipeline.rollout.server_pool import InferenceClient
from pipeline.train.model.lora import add_adapters, is_trained
from pipeline.utils import subprocesses
from tests.fakes.configs import make_config
from tests.gpu.weights import note, visible_gpus
from tests.gpu.words import write_whole_model
from tests.gpu.workload import WORKLOADS
from tests.support.servers.traffic import PROBE, sample
from tests.support.servers.vllm import SECRET, TRAINER, Model, Served, parameters, starting_of, tensor_arguments

TOLERANCE = {"cuda": 0.15, "cpu": 1e-3}
"""Nats; servers on GPUs compute in bfloat16."""
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
REQUEST_SECONDS = 120
STRENGTH = 0.5
"""Of what an adapter adds, before it is scaled by alpha / rank, for inputs of size 1."""


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = asked_for(arguments)
    lora = LoraConfig(rank=chosen.rank, alpha=2.0 * chosen.rank, targets=TARGETS)
    device = torch.device(chosen.device)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        model = Path(folder) / "model"
        write_whole_model(model, WORKLOADS[chosen.shape])
        gpus = tuple(visible_gpus()[0 if chosen.share else 1 :][: chosen.tensor]) if device.type == "cuda" else ()
        server = started.enter_context(starting_of(config_of(model, lora, chosen), "127.0.0.1", gpus=gpus))()
        meeting = MeetingPoint(TRAINER, started.enter_context(subprocesses.hold_port()).getsockname()[1], SECRET)
        config, sends = InferenceConfig(update_seconds=60), torch.device("cuda", 0) if chosen.backend == "nccl" else CPU
        sender = started.enter_context(WeightSender([server.endpoint], meeting, config, 120, note, lora, sends))
        result = measure(sender, server, [adapted(model, lora, seed, device) for seed in (1, 2)], chosen)
    result["command"] = {name: value for name, value in vars(chosen).items() if name != "out"}
    result["vllm"] = __import__("vllm").__version__
    result["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    chosen.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    return int(bool(result["wrong_tokens"] or result["retries"] or result["paused"]))


def asked_for(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="0.6b", choices=[*WORKLOADS])
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--share", action="store_true", help="the server on the sender's GPU, too")
    parser.add_argument("--backend", choices=["nccl", "gloo"], help="default: nccl on GPUs, gloo on CPUs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64, help="at a time")
    parser.add_argument("--tokens", type=int, default=128, help="of each completion")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each window")
    parser.add_argument("--checked", type=int, default=300, help="completions of each window that are compared")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between two updates under load")
    chosen = parser.parse_args(arguments)
    chosen.backend = chosen.backend or {"cuda": "nccl", "cpu": "gloo"}[chosen.device]
    if chosen.device == "cpu" and chosen.backend == "nccl":
        parser.error("--backend nccl needs GPUs")
    return chosen


def config_of(model: Path, lora: LoraConfig, chosen: argparse.Namespace) -> RunConfig:
    """The server's."""
    whole = {"path": str(model), "init": "pretrained", "max_length": 256, "lora": lora.model_dump()}
    if chosen.device == "cpu":
        extra = tensor_arguments(chosen.tensor) if chosen.tensor > 1 else ()
        return make_config(model=whole, inference={"extra_args": extra})
    return make_config(
        model=whole | {"dtype": "bfloat16"},
        resources={
            "device": "cuda",
            "colocate": chosen.share,
            "inference": {"gpus": chosen.tensor},
            "trainer": {"gpus": 1},
        },
        inference={"gpu_memory": 0.4, "max_sequences": 512, "backend": chosen.backend},
    )


@torch.no_grad()
def adapted(path: Path, lora: LoraConfig, seed: int, device: torch.device) -> Model:
    """The base in float32 with adapters that change every layer about as much as the layer itself computes."""
    from transformers import AutoModelForCausalLM

    model: Model = add_adapters(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), lora).to(device).eval()
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in model.named_parameters():
        if is_trained(name):  # A [rank, in], B [out, rank]
            size = STRENGTH if ".lora_B." in name else 1.0
            drawn = torch.randn(tensor.shape, generator=generator, device=device)
            tensor.copy_(size * drawn / tensor.shape[1] ** 0.5)
    return model


@dataclass
class Window:
    """Requests without a break for some seconds."""

    seconds: float = 0.0
    completions: list[Completion] = field(default_factory=list)
    reports: list[SyncReport] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return sum(len(each.tokens) for each in self.completions) / self.seconds


class Updates:
    """Versions 0, 1, 2, …: adapters A and B in turn."""

    def __init__(self, sender: WeightSender, models: Sequence[Model]) -> None:
        self._sender, self._models = sender, models
        self.version = -1

    def model(self, version: int) -> Model:
        return self._models[version % 2]

    def next(self) -> SyncReport:
        """The next version on the server; `RuntimeError` if the server was evicted."""
        self.version += 1
        report = self._sender.publish(self.version, parameters(self.model(self.version)))
        if report.failures or not report.servers:
            raise RuntimeError(f"version {self.version}: {report.failures or 'no server has it'}")
        return report


def measure(
    sender: WeightSender, server: Served, models: Sequence[Model], chosen: argparse.Namespace
) -> dict[str, Any]:
    updates = Updates(sender, models)
    join = updates.next()
    print(f"joined in {join.seconds:.1f} s", flush=True)
    windows, retries = asyncio.run(windows_of(server, updates, chosen))
    print({name: len(window.completions) for name, window in windows.items()}, "completions", flush=True)
    idle = [updates.next() for _ in range(10)]
    checks = {name: check(window, updates, chosen) for name, window in windows.items()}
    reports = [*windows["updating"].reports, *idle]
    return {
        "bytes": sum(tensor.numel() * tensor.element_size() for _, tensor in parameters(models[0])),
        "join_seconds": join.seconds,
        "idle_ms": milliseconds(idle),
        "under_load_ms": milliseconds(windows["updating"].reports),
        "updates_under_load": len(windows["updating"].reports),
        "tokens_per_second": {name: window.tokens_per_second for name, window in windows.items()},
        "paused": sum("pause" in phases for report in reports for phases in report.phases.values()),
        "retries": retries,
        "checks": checks,
        "wrong_tokens": sum(each["wrong"] for each in checks.values()),
    }


def milliseconds(reports: Sequence[SyncReport]) -> dict[str, float]:
    """Medians of an update and of its parts, and the longest update."""
    phases = [phases for report in reports for phases in report.phases.values()]
    parts = {name: 1e3 * statistics.median(each[name] for each in phases) for name in phases[0]}
    whole = [1e3 * seconds for report in reports for seconds in report.servers.values()]
    return {"update_in_all": statistics.median(whole), "longest": max(whole), **parts}


async def windows_of(
    server: Served, updates: Updates, chosen: argparse.Namespace
) -> tuple[dict[str, Window], dict[str, int]]:
    """Two windows without updates and one with them between, and how often requests were asked again."""
    async with InferenceClient([server.endpoint], SECRET, REQUEST_SECONDS, max_lag=1 << 20) as client:
        client.update(server.endpoint, updates.version)
        await window(client, server, None, chosen, seconds=1.0)
        windows = {
            "calm": await window(client, server, None, chosen),
            "updating": await window(client, server, updates, chosen),
            "calm again": await window(client, server, None, chosen),
        }
        return windows, dict(client.retries)


async def window(
    client: InferenceClient,
    server: Served,
    updates: Updates | None,
    chosen: argparse.Namespace,
    seconds: float | None = None,
) -> Window:
    """As many requests at a time as were asked for, with updates meanwhile if there are any."""
    made, began = Window(), time.monotonic()
    until = began + (chosen.seconds if seconds is None else seconds)

    async def ask() -> None:
        while time.monotonic() < until:
            made.completions.append(await sample(client, chosen.tokens))

    asking = [asyncio.create_task(ask()) for _ in range(chosen.requests)]
    while updates is not None and time.monotonic() < until:
        await asyncio.sleep(chosen.pause)
        made.reports.append(await asyncio.to_thread(updates.next))
        client.update(server.endpoint, updates.version)
    await asyncio.gather(*asking)
    made.seconds = time.monotonic() - began
    return made


def check(window: Window, updates: Updates, chosen: argparse.Namespace) -> dict[str, Any]:
    """Tokens whose log-probability is not that of their version, and how many would show it with the other adapter.

    Completions of several versions are compared first.
    """
    mixed_first = sorted(window.completions, key=lambda each: each.version_min == each.version_max)
    checked, tolerance = mixed_first[: chosen.checked], TOLERANCE[chosen.device]
    off, other = (torch.cat([difference(each, updates, shift) for each in checked]) for shift in (0, 1))
    return {
        "completions": len(window.completions),
        "checked": len(checked),
        "of_several_versions": sum(each.version_min < each.version_max for each in window.completions),
        "tokens": len(off),
        "wrong": int((off > tolerance).sum()),
        "mean_difference": float(off.mean()),
        "largest_difference": float(off.max()),
        "would_show": float((other > tolerance).float().mean()),
    }


@torch.no_grad()
def difference(completion: Completion, updates: Updates, shift: int) -> Tensor:
    """float32[tokens]: how far each log-probability is from that of the token's version plus `shift`.

    Tokens are fed as the server fed them: those of a version to its model, after the keys and values of earlier ones.
    """
    device = next(updates.model(0).parameters()).device
    ids = torch.tensor([[*PROBE, *completion.tokens]], device=device)
    cache, fed, found = None, 0, list[Tensor]()
    for first, last, version in spans(completion.versions):
        until = len(PROBE) + last - 1  # the last token of a span is fed with the next one's
        answer: Any = updates.model(version + shift)(ids[:, fed:until], past_key_values=cache, use_cache=True)
        logits = answer.logits[0, first - last :].float()  # [last - first, vocabulary]
        sampled = ids[0, len(PROBE) + first : len(PROBE) + last, None]
        found.append(logits.log_softmax(-1).gather(-1, sampled)[:, 0])
        cache, fed = answer.past_key_values, until
    return (torch.cat(found).cpu() - torch.tensor(completion.logprobs)).abs()


def spans(versions: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first, last + 1, version) of each run of tokens of one version."""
    cuts = [0, *(at for at in range(1, len(versions)) if versions[at] != versions[at - 1]), len(versions)]
    return [(first, last, versions[first]) for first, last in pairwise(cuts)]


if __name__ == "__main__":
    raise SystemExit(main())
