"""Weights that change while a server generates: what an update takes, what it costs, and that none is torn.

    python -m tests.gpu.weights OUT.json [--shape 0.6b] [--servers 1] [--tensor 1] [--per-gpu 1] [--requests 256] …

This process sends from the first GPU, the servers generate on the others, or with `--share` from that one on. Every
token's log-probability has one of a few values under weights A and one of a few others under weights B, and depends on
the MLPs of all layers, on embedding and head: a step that saw a mixture of both would show. Those of attention do not
show, since its output is zero.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config import InferenceConfig, RunConfig
from pipeline.inference.vllm.server_command import server_environment
from pipeline.inference.weight_sync.server_sync import MeetingPoint
from pipeline.inference.weight_sync.weight_sender import WeightSender
from pipeline.roles import inference
from pipeline.topology.plan import Placement
from pipeline.utils import subprocesses
from pipeline.utils.waiting import wait_for
from tests.fakes.configs import make_config
from tests.gpu.traffic import PROCESSES, Answers, Traffic
from tests.gpu.workload import WORKLOADS
from tests.support.servers.vllm import SECRET, world_file

START_SECONDS = 300
CLOSE = 0.015
"""Log-probabilities are counted by hundredths."""
SLOW_SECONDS = 1.0
SHOWN = 40
"""Different log-probabilities of each row, in what is written."""
EMBEDDING, WEIGHT, SUMMANDS = 2**-8, 2**-3, 16
"""Of the weights that are sent: log-probabilities near those of even chances, where each weight shows."""
LIKELIER, OTHER = (0, 1), 3
"""Token ids that greedy sampling draws, one of the two under each of the weights; and one that it never does."""
PAUSES = (1.0, 0.3, 0.05)
NamedTensors = list[tuple[str, Tensor]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="0.6b", choices=[*WORKLOADS])
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--per-gpu", type=int, default=1, help="servers that share one GPU")
    parser.add_argument("--share", action="store_true", help="servers on the sender's GPU")
    parser.add_argument("--host", action="store_true", help="send out of the host's memory")
    parser.add_argument("--servers-host", action="store_true", help="weights arrive in memory of the servers' host")
    parser.add_argument("--requests", type=int, default=256, help="at a time, to the first server")
    parser.add_argument("--tokens", type=int, default=512, help="of each completion")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--api", type=int, default=4)
    chosen = parser.parse_args(arguments)
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        model = Path(folder) / "model"
        WORKLOADS[chosen.shape].write_model(model)
        first = 0 if chosen.share else 1
        places = [first + index // chosen.per_gpu * chosen.tensor for index in range(chosen.servers)]
        endpoints = started.enter_context(servers(model, places, chosen.tensor, chosen.api, chosen.per_gpu))
        config = InferenceConfig(update_seconds=60, staging_device="host" if chosen.servers_host else "gpu")
        holder = started.enter_context(subprocesses.hold_port())
        meeting = MeetingPoint("127.0.0.1", holder.getsockname()[1], SECRET)
        device = torch.device("cuda", 0)
        sender = started.enter_context(
            WeightSender(endpoints, meeting, config, 120, note, device=device, on_host=chosen.host)
        )
        result = measure(sender, endpoints, model, chosen)
    result["gpu"], result["vllm"] = torch.cuda.get_device_name(), __import__("vllm").__version__
    chosen.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    return 1 if result["torn"] else 0


def note(server: str, version: int | None) -> None:
    if version is None:
        print(f"{server} was evicted", flush=True)


def measure(sender: WeightSender, endpoints: Sequence[str], model: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    first, second = weights(model, 1), weights(model, 2)
    bytes_sent = sum(tensor.numel() * tensor.element_size() for _, tensor in first)
    version, started = 0, time.monotonic()

    def update(values: NamedTensors) -> float:
        nonlocal version
        version += 1
        began = time.monotonic()
        report = sender.publish(version, values)
        if report.failures or (version > 1 and len(report.servers) != len(endpoints)):
            raise RuntimeError(f"version {version}: {report.failures or f'only {[*report.servers]} have it'}")
        took = time.monotonic() - began
        if took > SLOW_SECONDS or version <= 3:
            print(f"{time.monotonic() - started:.0f} s: version {version} took {took:.2f} s", flush=True)
        return took

    print("the servers are ready", flush=True)
    begun = time.monotonic()
    update(first)  # the first server to join ends it
    wait_for("all servers", lambda: [*sender.versions().values()] == [version] * len(endpoints), 120)
    joined = time.monotonic() - begun
    traffic = Traffic(endpoints[0], SECRET, chosen.requests, chosen.seconds, chosen.tokens, greedy=True)
    calm = {name: alone(update, values, traffic) for name, values in (("A", first), ("B", second))}
    legal = {name: sorted(answers.logprobs) for name, answers in calm.items()}
    print(f"undisturbed: {calm['A'].tokens_per_second:.0f} tokens/s", flush=True)
    idle = [update(values) for values in (first, second) * 5]
    rows = [under_updates(update, (first, second), traffic, pause) for pause in PAUSES]
    calm["A again"] = alone(update, first, traffic)
    undisturbed = statistics.mean(answers.tokens_per_second for answers in calm.values())
    torn = Counter[float]()
    for row in rows:
        torn += strange(row["seen"], legal)
        row["seen"] = {f"{value:.2f}": times for value, times in sorted(row["seen"].items())[:SHOWN]}
        row["ratio"] = row["tokens_per_second"] / undisturbed
        print(row, flush=True)
    return {
        "command": {name: value for name, value in vars(chosen).items() if name != "out"},
        "bytes": bytes_sent,
        "join_seconds": joined,
        "idle_update_ms": [1e3 * seconds for seconds in idle],
        "undisturbed_tokens_per_second": {name: answers.tokens_per_second for name, answers in calm.items()},
        "under_updates": rows,
        "torn": sum(torn.values()),
        "strange": dict(torn.most_common(5)),
        "legal": legal,
    }


def alone(update: Callable[[NamedTensors], float], values: NamedTensors, traffic: Traffic) -> Answers:
    """What a server says under these weights alone, with few requests at a time and with many: kernels differ. After
    each of the likelier tokens and after others: while weights change, the token before may be the other weights'."""
    update(values)
    traffic = replace(traffic, last=(*LIKELIER, OTHER))
    with replace(traffic, requests=PROCESSES, seconds=1.0, tokens=32).running() as few:
        pass
    with traffic.running() as many:
        pass
    return Answers(many.tokens_per_second, few.logprobs + many.logprobs)


def under_updates(
    update: Callable[[NamedTensors], float], weights: Sequence[NamedTensors], traffic: Traffic, pause: float
) -> dict[str, Any]:
    """What came back while the weights changed to and fro."""
    taken: list[float] = []
    with traffic.running() as busy:
        time.sleep(1)  # until the server is full
        until = time.monotonic() + traffic.seconds
        while time.monotonic() < until:
            taken.append(update(weights[len(taken) % 2]))
            time.sleep(pause)
    return {
        "pause_seconds": pause,
        "updates": len(taken),
        "update_ms": 1e3 * statistics.median(taken),
        "update_ms_max": 1e3 * max(taken),
        "tokens_per_second": busy.tokens_per_second,
        "tokens": sum(busy.logprobs.values()),
        "seen": busy.logprobs,
    }


def strange(seen: Counter[float], legal: dict[str, list[float]]) -> Counter[float]:
    """Log-probabilities that neither weights give."""
    known = [value for values in legal.values() for value in values]
    return Counter({value: n for value, n in seen.items() if min(abs(value - each) for each in known) > CLOSE})


@contextmanager
def servers(
    model: Path, places: Sequence[int], tensor: int, api: int, per_gpu: int = 1, **keys: Any
) -> Iterator[list[str]]:
    """A server of `tensor` GPUs, from each of these GPUs on, with these keys of `inference.*`; all are ready. So many
    share a GPU as are to be `per_gpu`, each with its part of `gpu_memory`."""
    with ExitStack() as started:
        config = gpu_config(model, tensor, api, per_gpu, **keys)
        children = [started.enter_context(a_server(config, model, *place)) for place in enumerate(places)]
        yield wait_until_ready(children)


def wait_until_ready(children: Sequence[tuple[str, Path, subprocesses.Child]]) -> list[str]:
    """Where these servers listen, once all of them do; `RuntimeError` with what one said that ended."""
    for endpoint, log, child in children:
        address, _, port = endpoint.partition(":")

        def healthy(address: str = address, port: str = port, log: Path = log, child: Any = child) -> bool:
            if child.poll() is not None:
                raise RuntimeError("\n".join(subprocesses.tail(log, 60)))
            return inference.is_healthy(address, int(port), SECRET)

        wait_for("a server", healthy, START_SECONDS)
    return [endpoint for endpoint, _, _ in children]


@contextmanager
def a_server(config: RunConfig, model: Path, index: int, first: int) -> Iterator[tuple[str, Path, subprocesses.Child]]:
    tensor = config.resources.inference.gpus
    with subprocesses.hold_port() as holder:
        gpus = tuple(visible_gpus()[first : first + tensor])
        place = Placement(
            role="inference", index=index, rank=0, address="127.0.0.1", ports=(holder.getsockname()[1],), gpus=gpus
        )
        environment = dict(os.environ) | server_environment(config, place, world_file(model.parent))
        log = model.parent / f"server-{index}.log"
        child = subprocesses.Child(inference.server_command(config, place), log, environment)
        try:
            yield place.endpoint, log, child
        finally:
            child.stop(20)
            print(f"--- {log.name}", *subprocesses.tail(log, 15), sep="\n", flush=True)


def visible_gpus() -> list[int]:
    """Indices of the GPUs that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [int(word) for word in named.split(",")] if named else [*range(torch.cuda.device_count())]


def gpu_config(model: Path, tensor: int, api: int, per_gpu: int = 1, length: int = 1024, **keys: Any) -> RunConfig:
    return make_config(
        model={"path": str(model), "init": "random", "max_length": length, "dtype": "bfloat16"},
        resources={"device": "cuda", "inference": {"gpus": tensor, "servers_per_gpu": per_gpu}, "trainer": {"gpus": 1}},
        inference={"gpu_memory": 0.6, "max_sequences": 512, "api_server_count": api} | keys,
    )


@torch.no_grad()
def weights(path: Path, seed: int) -> NamedTensors:
    """A model's parameters under their Hugging Face names, on the first GPU, such that every token has the same hidden
    state whatever came before it (attention adds nothing, all embeddings are alike): so its log-probability says which
    weights the step had, all of them. Two tokens are likelier than the others.

    Each output is the sum of a few inputs, times a power of two, which float32 holds exactly in any order unless they
    differ by orders of magnitude. With dense weights and 36 layers, values under the same weights lay 0.3 to 1.2 nats
    apart, which looks like a tear.
    """
    with torch.device("cuda"):  # on a CPU, billions of random numbers take minutes
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(seed)

    def signs(*shape: int) -> Tensor:
        return torch.randint(2, shape, generator=generator, device="cuda").mul(2).sub(1).to(torch.bfloat16)

    for name, parameter in model.named_parameters():
        draw(name, parameter, signs, generator)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def draw(name: str, parameter: Tensor, signs: Callable[..., Tensor], generator: torch.Generator) -> None:
    """One parameter of `weights`."""
    outputs, inputs = parameter.shape[0], parameter.shape[-1]
    if "norm" in name:
        parameter.fill_(1.0)
        return
    if "o_proj" in name:
        parameter.zero_()
        return
    if "embed" in name or "lm_head" in name:
        parameter.copy_(EMBEDDING * signs(inputs).expand_as(parameter))
        for token, times in zip(LIKELIER, (3, -3), strict=True):
            parameter[token] *= times
        return
    at = torch.randint(inputs, (outputs, SUMMANDS), generator=generator, device="cuda")
    parameter.zero_().scatter_(1, at, WEIGHT * signs(outputs, SUMMANDS))


if __name__ == "__main__":
    raise SystemExit(main())
