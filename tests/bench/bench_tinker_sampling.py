"""What the API costs who samples: samples through the SDK and the front, beside the same requests to the raw server.

    python -m tests.bench.bench_tinker_sampling [--clients 1 4 16] [--requests 64] [--samples 8] [--tokens 64]

One vLLM server on this machine's CPU has the demo's tiny model and one adapter, which both ways sample from. Each
client keeps two requests under way; `--requests` are those of all clients together. Both ways are measured in turns,
three rounds; the figures are medians. Prints requests and tokens a second of both and their ratio; exit code 1 if one
is below 0.9.
"""

import argparse
import asyncio
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import tinker
from tinker import types

from pipeline.api.generation import adapter_name, request_body
from tests.bench.tables import judge, markdown
from tests.integration.tinker_server import TinkerServer, serving_samples
from tests.support.servers.vllm import SECRET, Served

LEAST, AHEAD, ROUNDS, LONGEST = 0.9, 2, 3, 256
ADDRESS = "127.0.0.12"
PROMPT = [1 + at % 16 for at in range(32)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_tinker_sampling")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=48, help="of all clients together")
    parser.add_argument("--samples", type=int, default=8, help="of each request")
    parser.add_argument("--tokens", type=int, default=64, help="of each sample")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    rows, ratios = [], []
    with (
        tempfile.TemporaryDirectory(prefix="bench-tinker-") as folder,
        serving_samples(Path(folder), [ADDRESS], max_length=LONGEST) as (server, (served,)),
    ):
        for clients in given.clients:
            raw, api = seconds_of_both(server, served, clients, given)
            tokens = given.requests * given.samples * given.tokens
            ratios.append(raw / api)
            rows.append([clients, given.requests / raw, given.requests / api, tokens / raw, tokens / api, ratios[-1]])
    columns = ["clients", "requests/s raw", "requests/s served", "tokens/s raw", "tokens/s served", "ratio"]
    print(markdown(columns, rows))
    return judge(f"sampling through the API reaches {LEAST} of the raw server", min(ratios) >= LEAST)


def seconds_of_both(
    server: TinkerServer, served: Served, clients: int, given: argparse.Namespace
) -> tuple[float, float]:
    """Medians for all requests: asked of the server itself, and through the API."""
    opened = [tinker.ServiceClient(base_url=server.url, api_key=server.key) for _ in range(clients)]
    trainer = opened[0].create_lora_training_client(base_model="tiny", rank=8, seed=1).result()
    path = trainer.save_weights_for_sampler("adapter").result().path
    samplers = [each.create_sampling_client(model_path=path) for each in opened]
    for sampler in samplers:
        sampler.sample(prompt(), 1, params(given)).result()
    raw, api = [], []
    for _ in range(ROUNDS):
        raw.append(asyncio.run(seconds_raw(served, adapter_name(folder_of(server, path)), clients, given)))
        api.append(seconds_api(samplers, given))
    for each in opened:
        each.close("success").result()
    return median(raw), median(api)


def folder_of(server: TinkerServer, path: str) -> str:
    """The adapter's folder below that of the weights."""
    root = server.api / "weights"
    (version,) = (root / path.removeprefix("tinker://").replace(":", "-")).iterdir()
    return str(version.relative_to(root))


def prompt() -> types.ModelInput:
    return types.ModelInput.from_ints(PROMPT)


def params(given: argparse.Namespace) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=given.tokens, stop=[])


async def seconds_raw(served: Served, model: str, clients: int, given: argparse.Namespace) -> float:
    body: dict[str, Any] = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}}
    body |= {"num_samples": given.samples, "sampling_params": {"max_tokens": given.tokens, "stop": []}}
    asked, left = request_body(body, model, LONGEST), iter(range(given.requests))
    headers = {"Authorization": f"Bearer {SECRET}"}
    async with aiohttp.ClientSession(headers=headers) as http:

        async def ask() -> None:
            for _ in left:
                async with http.post(f"http://{served.endpoint}/inference/v1/generate", json=asked) as answer:
                    answer.raise_for_status()
                    assert len((await answer.json())["choices"]) == given.samples

        started = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(clients * AHEAD)))
        return time.perf_counter() - started


def seconds_api(samplers: Sequence[Any], given: argparse.Namespace) -> float:
    """From the first request of any client to the last answer of all."""
    left = iter(range(given.requests))

    def ask(sampler: Any) -> None:
        for _ in left:
            assert len(sampler.sample(prompt(), given.samples, params(given)).result().sequences) == given.samples

    asking = [sampler for sampler in samplers for _ in range(AHEAD)]
    started = time.perf_counter()
    with ThreadPoolExecutor(len(asking)) as threads:
        list(threads.map(ask, asking))
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
