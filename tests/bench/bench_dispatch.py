"""What the dispatch costs, and what it saves: models that answer at the same time, and rows that are sent once.

    torchrun --nproc-per-node 2 -m tests.bench.bench_dispatch [--rows 256] [--rounds 9] [--device cuda]

Prints median wall seconds of each way over the rounds, in which the ways take turns, and as the last column how many
times as fast as the way above it in its pair it is. That both ways of a pair answer the same is checked, to the last
bit on the CPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from pipeline.config import LossConfig, ModelConfig, OptimConfig
from pipeline.train.batching.packing import Budget
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.lead_or_serve import run_controller_or_worker
from pipeline.train.controller.rank_group import Answers, RankGroup
from pipeline.train.worker_spec import ModelSpec
from tests.bench.tables import markdown

LOSS = LossConfig(name="grpo")
NAMES = ("policy", "reference", "critic")
TOKENS = 16384
Way = Callable[[], object]


def make_batch(rows: int, vocabulary: int, longest: int) -> Batch:
    """Ragged rows, up to `longest` tokens each, of which all but the first quarter count."""
    draw = np.random.default_rng(0)
    made = []
    for length in draw.integers(longest // 4, longest + 1, rows).tolist():
        mask = np.ones(length, np.uint8)
        mask[: max(1, length // 4)] = 0
        tokens = draw.integers(0, vocabulary, length).astype(np.int32)
        made.append(TrainSequence(tokens, mask, float(draw.normal()), np.full(length, -np.log(vocabulary), np.float32)))
    return Batch.of(made)


def init_models(dispatch: RankGroup, path: str, dtype: str) -> None:
    model = ModelConfig.model_validate({"path": path, "init": "random", "dtype": dtype})
    dispatch.init_model("policy", ModelSpec("policy", model, OptimConfig()))
    dispatch.init_model("reference", ModelSpec("policy", model, seed=1))
    dispatch.init_model("critic", ModelSpec("critic", model, OptimConfig()))


def measure(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """Median seconds of each; the first two rounds do not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 2):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds[2:]) for name, seconds in times.items()}


def check(exact: bool, one: dict[str, Answers], other: dict[str, Answers]) -> None:
    for name in NAMES:
        for a, b in zip(one[name], other[name], strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=0 if exact else 1e-4, err_msg=name)


def report(given: argparse.Namespace, dispatch: RankGroup) -> None:
    """Measure both pairs and print the table."""
    init_models(dispatch, given.model, given.dtype)
    batch = make_batch(given.rows, dispatch.models["policy"].vocabulary, given.longest)
    staged = dispatch.stage([batch])

    def in_turn() -> dict[str, Answers]:
        return {name: dispatch.forward(name, staged[0]) for name in NAMES}

    check(given.device == "cpu", in_turn(), dispatch.forward_models(NAMES, staged[0]))
    pairs: list[dict[str, Way]] = [
        {"models in turn": in_turn, "models at once": lambda: dispatch.forward_models(NAMES, staged[0])},
        {
            "rows sent": lambda: dispatch.forward_backward("policy", batch, LOSS),
            "rows staged": lambda: dispatch.forward_backward("policy", staged[0], LOSS),
        },
    ]
    rows = []
    for pair in pairs:
        found = measure(pair, given.rounds)
        first = next(iter(found.values()))
        rows += [(name, seconds, first / seconds) for name, seconds in found.items()]
    print(f"{sum(batch.lengths)} tokens in {given.rows} rows, {dispatch._site.ranks} ranks, {given.device}\n")
    print(markdown(("way", "s", "times as fast"), rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--longest", type=int, default=18)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", default="conf/models/tiny_qwen3")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run_controller_or_worker(lambda dispatch: report(given, dispatch), Budget(TOKENS), device=given.device)


if __name__ == "__main__":
    main()
