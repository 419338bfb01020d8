"""What long tails cost, and what helps: `python -m tests.bench.bench_tails [--steps N] [--rounds N]`.

The whole loop but for the learner: a real vLLM server of the tiny model, the actor's generation with its gate, the
preprocessor, the trainer's batches, and weights that are sent after every step. A step trains nothing and takes no
time, so the servers decide. 4 prompts of 8 samples a step. Lengths are drawn from a lognormal distribution (median 24
tokens, σ = 1, at most 440): their mean is 39, and that of the longest of a group 117.

The ways take turns. Each figure is the median of the rounds, and so is each ratio to the first way of the same lag and
round. `tokens/s` are those that the loss counts, `kept` is their share of all tokens that the server sampled, and
`masked` what is missing from trained samples because it was too old.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import urlopen

from pipeline.config import RunConfig
from pipeline.environments import load_task
from pipeline.roles.preprocessor import Preprocessor
from pipeline.rollout.group_rollout import GroupBuilder
from pipeline.rollout.issue_loop import IssueLoop
from pipeline.rollout.server_client import Completion
from pipeline.rollout.server_pool import InferenceClient
from pipeline.run.paths import AttemptPaths
from pipeline.train.loop.batch_metrics import batch_metrics
from pipeline.train.loop.group_batches import GroupBatches
from pipeline.train.loop.rl import rows_of
from pipeline.transport import AsyncStreams
from pipeline.transport.file_streams import FileStreams
from pipeline.transport.ledger import Ledger
from pipeline.transport.shared_state import SharedState
from tests.bench.bench_actor import MODEL, EndlessChat
from tests.bench.tables import markdown
from tests.fakes.configs import make_config
from tests.fakes.inline_calls import InlineCalls
from tests.support.servers.vllm import (
    SECRET,
    Model,
    Served,
    a_model,
    a_sender,
    model_directory,
    parameters,
    starting_of,
)

PROMPTS, SAMPLES, MEDIAN, SIGMA, LONGEST = 4, 8, 24, 1.0, 440
WARM = 4
"""Steps until as much is in flight as at the end; what is counted begins there."""
WAYS = [(0, "refuse", 0), (0, "refuse", 2), (0, "refuse", 4), (1, "refuse", 0), (1, "refuse", 2), (1, "mask", 0)]
"""`training.max_lag`, `training.stale` and `rollout.oversample`."""
COLUMNS = "max_lag", "stale", "extra", "samples/s", "ratio", "tokens/s", "ratio", "refused", "masked", "kept"


@dataclass(frozen=True)
class Found:
    """Of one run: samples and counted tokens a second; groups refused of all that came, tokens masked of trained
    samples, tokens counted of those sampled."""

    samples: float
    tokens: float
    refused: float
    masked: float
    kept: float


class Tailed:
    """The client, asked for samples that end at a length of their own."""

    def __init__(self, client: InferenceClient) -> None:
        self._client, self._draw = client, Random(0)

    async def generate(
        self, token_ids: Sequence[int], *, n: int, max_tokens: int, **asked: Any
    ) -> Sequence[Completion]:
        lengths = [int(self._draw.lognormvariate(0, SIGMA) * MEDIAN) for _ in range(n)]
        parts = (
            self._client.generate(token_ids, n=1, max_tokens=max(1, min(length, max_tokens)), **asked)
            for length in lengths
        )
        return [part[0] for part in await asyncio.gather(*parts)]


def config_of(model: Path, way: tuple[int, str, int], steps: int) -> RunConfig:
    max_lag, stale, extra = way
    return make_config(
        model={"path": str(model), "init": "random", "max_length": 512},
        task={"name": "tests.bench.bench_actor:Turns"},
        rollout={"group_size": SAMPLES, "max_tokens": LONGEST, "oversample": extra},
        training={"steps": steps, "prompts_per_step": PROMPTS, "max_lag": max_lag, "stale": stale},
        streams={"backend": "files"},
    )


class Loop:
    """One run of the loop, in threads of this process."""

    def __init__(self, config: RunConfig, served: Served, model: Model, folder: Path, stack: ExitStack) -> None:
        self.config, self.served, self.model, self.stack = config, served, model, stack
        self.paths = AttemptPaths(folder, "tails", "a-0")
        self.over = threading.Event()

    def streams(self) -> FileStreams:
        return self.stack.enter_context(FileStreams(self.paths, self.config.streams.budget_bytes))

    async def run(self) -> Found:
        threading.Thread(target=self.prepare, daemon=True).start()
        generating = asyncio.create_task(self.generate())
        try:
            return await asyncio.to_thread(self.train)
        finally:
            self.over.set()
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)

    def prepare(self) -> None:
        Preprocessor(self.streams(), self.config, lambda numbers: None).run(self.over.is_set)

    async def generate(self) -> None:
        streams, task = self.streams(), load_task(self.config.task, 0)
        async with (
            AsyncStreams(streams) as asynchronous,
            InferenceClient([self.served.endpoint], SECRET, 120) as client,
        ):
            builder = GroupBuilder(task, InlineCalls(task), EndlessChat(MODEL), Tailed(client), self.config)
            await IssueLoop(asynchronous, SharedState(streams), builder, client, self.config).run()

    def train(self) -> Found:
        streams, training = self.streams(), self.config.training
        board, ledger = SharedState(streams), Ledger()
        batches = GroupBatches(streams, board, ledger, self.config, lambda: None, 1 << 20)
        with a_sender([self.served], board.post_server) as sender:
            board.post_ledger(ledger.snapshot())
            sender.publish(0, parameters(self.model))
            batches.publish_progress(0)
            for step in range(training.steps):
                if step in (0, WARM):
                    began, before = time.monotonic(), made(self.served)
                    counted, refused, samples, masked = 0, 0, 0, list[float]()
                groups = batches.next(step)
                oldest = step - training.max_lag
                counted += sum(row.counted for row in rows_of(groups, oldest=oldest))
                metrics = batch_metrics(groups, step, oldest)
                masked.append(metrics["staleness/masked"])
                refused += batches.counts["stale"]
                samples += int(metrics["samples"])
                batches.trained(step)
                batches.publish_progress(step + 1)
                sender.publish(step + 1, parameters(self.model))
            seconds, sampled = time.monotonic() - began, made(self.served) - before
        came = refused + (training.steps - WARM) * PROMPTS
        return Found(samples / seconds, counted / seconds, refused / came, statistics.fmean(masked), counted / sampled)


def figures_of(run: Found, first: Found) -> tuple[float, ...]:
    """A run's columns, beside the first of its round."""
    ratios = run.samples / first.samples, run.tokens / first.tokens
    return run.samples, ratios[0], run.tokens, ratios[1], run.refused, run.masked, run.kept


def made(served: Served) -> float:
    """Tokens that the server has sampled."""
    with urlopen(f"http://{served.endpoint}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def found_of_all(folder: Path, steps: int, rounds: int) -> dict[tuple[int, str, int], list[Found]]:
    """What the runs of each way gave, in turns, with one server for all."""
    found: dict[tuple[int, str, int], list[Found]] = {way: [] for way in WAYS}
    directory = model_directory(folder / "model", tied=False)
    model = a_model(directory, seed=0)
    with starting_of(config_of(directory, WAYS[0], steps), "127.0.0.3") as ready:
        served = ready()
        for number, way in product(range(rounds), WAYS):
            with ExitStack() as stack:
                loop = Loop(config_of(directory, way, steps), served, model, folder / f"{number}-{way}", stack)
                found[way].append(asyncio.run(loop.run()))
            print(way, found[way][-1], file=sys.stderr)
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = found_of_all(Path(folder), WARM + given.steps, given.rounds)
    rows = []
    for way, runs in found.items():
        firsts = found[way[0], "refuse", 0]
        figures = [figures_of(run, first) for run, first in zip(runs, firsts, strict=True)]
        rows.append((*way, *map(statistics.median, zip(*figures, strict=True))))
    print(markdown(COLUMNS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
