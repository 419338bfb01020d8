"""What the API costs who samples: samples through the SDK and the gateway, beside the same requests to the raw server.

    python -m tests.bench.bench_tinker_sampling [--clients 1 4 16] [--requests 64] [--samples 8] [--tokens 64]

One vLLM server on this machine's CPU has the demo's tiny model and one adapter, which both ways sample from. Each
client keeps two requests under way; `--requests` are those of all clients together. Both ways are measured in turns,
three rounds; the figures are medians. Prints requests and tokens a second of both and their ratio; exit code 1 if one
is below 0.9.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import tinker

from pipeline.tinker.entities import SampledWeights
from tests.bench.tables import judge, markdown
from tests.integration.tinker_server import TinkerServer, serving_samples
from tests.support.servers.vllm import SECRET, Served
from tests.support.tinker_traffic import Sampling, folder_of

LEAST, ROUNDS, LONGEST = 0.9, 3, 256
ADDRESS = "127.0.0.12"


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
    model = SampledWeights(folder_of(server.api / "weights", path)).name
    Sampling(clients, 1, given.tokens).served(samplers)
    work = Sampling(given.requests, given.samples, given.tokens)
    raw, api = [], []
    for _ in range(ROUNDS):
        raw.append(work.raw(served.endpoint, SECRET, model, clients))
        api.append(work.served(samplers))
    for each in opened:
        each.close("success").result()
    return median(raw), median(api)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
