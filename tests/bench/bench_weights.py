"""How long a weight update takes, and how many tokens the client gets out of the servers.

    python -m tests.bench.bench_weights [--servers 2] [--updates 20] [--hidden 128] [--rank 0]

Prints the milliseconds of an update with idle servers and with 16 requests in flight: how long `start` holds up the
trainer, and when all servers have the weights; and tokens/s at 64 requests of 8 samples. Weights travel to all servers
at once. `--hidden 768 --layers 12 --vocabulary 32000` is a model of about 130M parameters; `--rank 16` sends adapters
of that rank on it.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from pipeline.config import LoraConfig
from pipeline.inference.weight_sync.weight_sender import WeightSender
from pipeline.rollout.server_pool import InferenceClient
from pipeline.train.model.lora import add_adapters
from tests.bench.tables import markdown
from tests.support.servers.vllm import (
    SECRET,
    Model,
    Served,
    a_model,
    a_sender,
    model_directory,
    parameters,
    publish_to_all,
    starting,
)

PROMPT = [1, 5, 6, 7, 11, 4]
COLUMNS = ("update", "start ms, median", "all ms, median", "all ms, worst")

Updates = list[tuple[float, float]]


def client_at(servers: list[Served], sender: WeightSender) -> InferenceClient:
    """A client that may ask every server; versions that appear meanwhile do not matter to it."""
    client = InferenceClient([server.endpoint for server in servers], SECRET, 120, max_lag=1 << 30)
    for server, version in sender.versions().items():
        client.update(server, version)
    return client


def updates(sender: WeightSender, model: Model, count: int) -> Updates:
    """Milliseconds of each of `count` further updates: until `start` returns, and until all servers have it."""
    first = 1 + max(version or 0 for version in sender.versions().values())
    times = []
    for version in range(first, first + count):
        began = time.monotonic()
        sender.start(version, parameters(model))
        handed = time.monotonic()
        sender.wait_until_synced()
        times.append((1000 * (handed - began), 1000 * (time.monotonic() - began)))
    return times


async def updates_in_flight(servers: list[Served], sender: WeightSender, model: Model, count: int) -> Updates:
    """The same while 16 requests are always in flight."""
    async with client_at(servers, sender) as client:

        async def ask() -> None:
            while True:
                await client.generate(PROMPT, n=1, temperature=1.0, max_tokens=200, stop_token_ids=[])

        requests = [asyncio.create_task(ask()) for _ in range(16)]
        times = await asyncio.to_thread(updates, sender, model, count)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        return times


async def throughput(servers: list[Served], sender: WeightSender, requests: int, samples: int) -> float:
    """Sampled tokens a second of `requests` at once, each of `samples` × 32 tokens, in four rounds."""
    async with client_at(servers, sender) as client:

        async def ask() -> None:
            for _ in range(4):
                await client.generate(PROMPT, n=samples, temperature=1.0, max_tokens=32, stop_token_ids=[])

        await client.generate(PROMPT, n=samples, temperature=1.0, max_tokens=32, stop_token_ids=[])
        warm, started = client.tokens, time.monotonic()
        await asyncio.gather(*(ask() for _ in range(requests)))
        return (client.tokens - warm) / (time.monotonic() - started)


def row(name: str, times: Updates) -> tuple[str, float, float, float]:
    starts, wholes = zip(*times, strict=True)
    return name, statistics.median(starts), statistics.median(wholes), max(wholes)


def make_model(folder: Path, options: argparse.Namespace) -> Path:
    """The tiny model, in the asked size."""
    directory = model_directory(folder / "model", tied=False)
    path = directory / "config.json"
    size = {
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "layer_types": ["full_attention"] * options.layers,
        "vocab_size": options.vocabulary,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | size))
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure weight updates and the client's throughput.")
    for name, default in {"servers": 2, "updates": 20, "hidden": 128, "layers": 4, "vocabulary": 17, "rank": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        directory = make_model(Path(folder), options)
        model, lora = a_model(directory, seed=0), LoraConfig(rank=options.rank)
        if lora.rank:
            model.save_pretrained(directory)  # type: ignore[operator]
            add_adapters(model, lora)
        waits = [stack.enter_context(starting(directory, f"127.0.0.{3 + i}", lora)) for i in range(options.servers)]
        started = time.monotonic()
        servers = [wait() for wait in waits]
        millions = sum(parameter.numel() for _, parameter in parameters(model)) / 1e6
        print(f"{options.servers} servers; {millions:.2f}M float32 parameters are sent; up after", end=" ")
        print(f"{time.monotonic() - started:.1f} s\n")
        sender = stack.enter_context(a_sender(servers, lora=lora))
        publish_to_all(sender, 0, model)
        idle = updates(sender, model, options.updates)
        in_flight = asyncio.run(updates_in_flight(servers, sender, model, options.updates))
        print(markdown(COLUMNS, [row("idle", idle), row("16 requests in flight", in_flight)]))
        print(f"\n{asyncio.run(throughput(servers, sender, 64, 8)):,.0f} tokens/s at 64 requests of 8 samples")


if __name__ == "__main__":
    main()
