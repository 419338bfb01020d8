"""What the API costs: steps through the SDK, gateway and trainer, beside the same steps on the dispatch alone.

    python -m tests.bench.bench_tinker [--clients 1 4 16] [--steps 24] [--data 32] [--length 64]

Each client trains an adapter of its own on the demo's tiny model, on this machine's CPU: forward_backward, then
optim_step, two steps ahead of their results, as the SDK's page advises. The dispatch alone does the same requests for
as many adapters, which take turns as those of clients do. The trainer has one thread both times. Both are measured in
turns, three rounds; the figures are medians. Prints requests and tokens a second of both and their ratio, all by the
clock; exit code 1 if one is below 0.9. Beside them stands the CPU time that each part takes for a request: what the
clients take from a trainer on the same cores, and what other work on the machine changes less than the clock.
"""

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import psutil
import tinker

from pipeline.config import RunConfig
from pipeline.train.service.random_base import write_base
from tests.bench.tables import judge, markdown
from tests.integration.tinker_server import TinkerServer
from tests.support.models.jobs import VOCABULARY, config_of, world_of_one
from tests.support.servers.vllm import TINY
from tests.support.tinker_traffic import Training

LEAST, ROUNDS = 0.9, 3


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_tinker")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=24, help="of each client")
    parser.add_argument("--data", type=int, default=32, help="of each forward_backward")
    parser.add_argument("--length", type=int, default=64, help="tokens of each datum")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    work = Training(given.data, given.length, VOCABULARY)
    rows, ratios = [], []
    with tempfile.TemporaryDirectory(prefix="bench-tinker-") as folder:
        write_base(TINY, Path(folder) / "base", seed=0)
        for clients in given.clients:
            steps = max(4, given.steps // clients)
            tokens = clients * steps * given.data * given.length
            settings, root = config(Path(folder), given), Path(folder) / f"run-{clients}"
            with (
                dispatch_alone(settings, clients, work) as own,
                server_of(settings, root, clients, work) as (api, server),
            ):
                rounds = [costs_of(own, api, server, steps) for _ in range(ROUNDS)]
            alone, served, *parts = (median(each) for each in zip(*rounds, strict=True))
            ratios.append(alone / served)
            requests = 2 * clients * steps
            rates = [requests / alone, requests / served, tokens / alone, tokens / served]
            rows.append([clients, *rates, ratios[-1], *(1000 * part / requests for part in parts)])
    columns = ["clients", "requests/s alone", "requests/s served", "tokens/s alone", "tokens/s served", "ratio"]
    print(markdown([*columns, *(f"ms of CPU: {part}" for part in ("alone", "trainer", "gateway", "clients"))], rows))
    return judge(f"the API reaches {LEAST} of the dispatch alone", min(ratios) >= LEAST)


def config(folder: Path, given: argparse.Namespace) -> RunConfig:
    plain = config_of(folder / "base")
    serve = plain.serve.model_copy(update={"enabled": True, "port": 0, "base_name": "tiny"})
    model = plain.model.model_copy(update={"max_length": given.length})
    training = plain.training.model_copy(update={"micro_batch_tokens": 16 * given.length})
    return plain.model_copy(update={"serve": serve, "model": model, "training": training})


def costs_of(
    own: Callable[[int], None], api: Callable[[int], None], server: TinkerServer, steps: int
) -> tuple[float, ...]:
    """Seconds of both ways; then seconds of CPU: of the dispatch alone, and of trainer, gateway and clients."""
    assert server.gateway is not None
    here = psutil.Process()
    parts = [psutil.Process(server.trainers[0].pid), psutil.Process(server.gateway.pid), here]
    alone, served = seconds_of(own, steps, [here]), seconds_of(api, steps, parts)
    return (alone[0], served[0], *alone[1], *served[1])


def seconds_of(train: Callable[[int], None], steps: int, parts: Sequence[psutil.Process]) -> tuple[float, list[float]]:
    """Seconds on the clock, and of CPU in each of these processes."""
    before, started = [_cpu_of(part) for part in parts], time.perf_counter()
    train(steps)
    seconds = time.perf_counter() - started
    return seconds, [_cpu_of(part) - earlier for part, earlier in zip(parts, before, strict=True)]


def _cpu_of(part: psutil.Process) -> float:
    times = part.cpu_times()
    return float(times.user + times.system)


@contextmanager
def dispatch_alone(config: RunConfig, clients: int, work: Training) -> Iterator[Callable[[int], None]]:
    """What does so many steps of each client, in turns."""
    with (
        tempfile.TemporaryDirectory() as folder,
        world_of_one(config.training.micro_batch_tokens) as dispatch,
        work.alone(dispatch, config, clients, Path(folder)) as train,
    ):
        yield train


@contextmanager
def server_of(
    config: RunConfig, root: Path, clients: int, work: Training
) -> Iterator[tuple[Callable[[int], None], TinkerServer]]:
    """What does so many steps of each client through the API, from the first request to the last result of all."""
    server = TinkerServer(root, config)
    try:
        server.start()
        opened = [tinker.ServiceClient(base_url=server.url, api_key=server.key) for _ in range(clients)]
        yield work.served(opened, "tiny"), server
        for each in opened:
            each.close("success").result()
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
