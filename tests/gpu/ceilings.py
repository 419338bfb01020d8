"""What each half of a run does alone: the server that nobody updates, the trainer that never waits for rows.

Owns both measurements, which `tests.gpu.loop` takes in the same call as the run that it compares with them. They run at
the same time, each on the GPUs that its half of the run has.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.gpu import children
from tests.gpu.pulse import tokens_made
from tests.gpu.traffic import PROCESSES, Traffic
from tests.gpu.weights import SECRET, servers, visible_gpus

WAYS = ("plain loop, compiled", "worker, compiled, rows staged")
TRAINING_SECONDS = 240
EXPERT_PARALLEL = ["--enable-expert-parallel"]
PROMPT = 16


@dataclass(frozen=True)
class Halves:
    """The work and who does it.

    Attributes:
        shape: a name of `WORKLOADS`.
        trainers: GPUs that train.
        servers, tensor: servers, and GPUs of each.
        per_gpu: servers that share one GPU.
        api: processes of each server that answer HTTP.
        tokens: most tokens of a completion.
        ends: token ids that end one; 1: completions have `tokens` tokens.
        mean: tokens of a completion on average.
        samples: of a step.
        group: samples of a prompt.
        concurrency: requests at a time, over all servers.
        ep: processes over which both halves spread experts.
        seconds: for which servers are asked.
    """

    shape: str
    trainers: int
    servers: int
    tensor: int
    per_gpu: int
    api: int
    tokens: int
    ends: int
    mean: float
    samples: int
    group: int
    concurrency: int
    seconds: float
    ep: int = 1


def measure(halves: Halves, model: Path) -> dict[str, float]:
    """Samples a second of each half alone, and of the plain training loop; the first GPUs are the trainer's."""
    with ThreadPoolExecutor(2) as pool:
        trained = pool.submit(train, halves, model.parent / "training.json", visible_gpus()[: halves.trainers])
        served = pool.submit(serve, halves, model)
        return trained.result() | served.result()


def serve(halves: Halves, model: Path) -> dict[str, float]:
    """Samples a second of all servers together."""
    places = [halves.trainers + index // halves.per_gpu * halves.tensor for index in range(halves.servers)]
    keys = {"length": halves.tokens + 64, "max_sequences": 512, "gpu_memory": 0.85}
    keys |= {"extra_args": EXPERT_PARALLEL} if halves.ep > 1 else {}
    with servers(model, places, halves.tensor, halves.api, halves.per_gpu, **keys) as endpoints:
        share = halves.concurrency // len(endpoints)
        with ThreadPoolExecutor(len(endpoints)) as pool:
            rates = list(pool.map(lambda endpoint: ask(halves, endpoint, share), endpoints))
    return {"generation_samples_per_second": sum(rates) / halves.mean, "generation_tokens_per_second": sum(rates)}


def ask(halves: Halves, endpoint: str, concurrency: int) -> float:
    """Tokens a second of one server, warmed up, by its own count: what it makes while the first requests have not
    spread yet, or while the last ones run out, does not count."""
    ends = 0 if halves.ends == 1 else halves.ends
    requests = max(concurrency, PROCESSES * halves.group)
    traffic = Traffic(endpoint, SECRET, requests, halves.seconds, halves.tokens, ends=ends, group=halves.group)
    with replace(traffic, seconds=1.0, tokens=64).running():
        pass
    with traffic.running():
        time.sleep(0.4 * halves.seconds)
        began, before = time.monotonic(), tokens_made(endpoint)
        time.sleep(0.5 * halves.seconds)
        return (tokens_made(endpoint) - before) / (time.monotonic() - began)


def time_ways(
    ways: Sequence[str],
    out: Path,
    ranks: int,
    asked: Sequence[str],
    seconds: float,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, dict[str, Any]]:
    """What `tests.gpu.speed` says of each of these ways. Raises `RuntimeError` if it does not end, or one fails."""
    command = children.torchrun(ranks, "tests.gpu.speed", str(out), *asked, "--ways", *ways)
    code = children.call(command, seconds, environment=environment)
    found: dict[str, dict[str, Any]] = json.loads(out.read_text()) if out.exists() else {}
    trouble = [way["error"] for way in found.values() if "error" in way]
    if code or trouble:
        raise RuntimeError(trouble[0] if trouble else f"tests.gpu.speed ended with exit code {code}")
    return found


def train(halves: Halves, out: Path, devices: list[int]) -> dict[str, float]:
    """Samples a second of the trainer, and of a plain loop, on rows as long as a sample is on average."""
    length = PROMPT + round(halves.mean)
    asked = ["--shape", halves.shape, "--length", str(length), "--rows", str(halves.samples), "--ep", str(halves.ep)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    plain, worker = WAYS
    ways = (worker,) if halves.ep > 1 else WAYS  # the plain loop spreads no experts
    found = time_ways(ways, out, halves.trainers, asked, TRAINING_SECONDS, environment)
    rates = {way: halves.samples / found[way]["step_seconds"] for way in ways}
    return {
        **({"plain_training_samples_per_second": rates[plain]} if plain in rates else {}),
        "training_samples_per_second": rates[worker],
        "training_mfu": found[worker]["mfu"],
    }
