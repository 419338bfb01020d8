"""What a training step saves by computing once what its samples begin with (`training.share_prefixes`).

    python -m tests.bench.bench_sharing [--steps 7]

One process, one thread, the demo's model, float32. A step trains 8 prompts of 8 samples, in micro-batches that hold 8
samples, for several lengths of prompt and completion, and of a system prompt that all begin with. Shared and packed
take turns; the ratio is the median over the rounds of their CPU seconds. Log-probabilities of both must be the
same but for rounding. The rule is that no step takes more than 5 % longer shared, and that one whose samples
are nine tenths prompt takes at most 0.6.
"""

import argparse
import statistics
import sys
import time

import numpy as np

from pipeline.config import LossConfig, ModelConfig, OptimConfig
from pipeline.train.batching.packing import Budget
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.worker_spec import ModelSpec
from tests.bench.tables import judge, markdown
from tests.support.models.jobs import site_of_one

LOSS = LossConfig(name="grpo")
PROMPTS, SAMPLES, WARM_UP, VOCABULARY = 8, 8, 2, 17
CASES = ((0, 7, 4), (0, 16, 200), (0, 100, 100), (0, 200, 50), (0, 360, 40), (200, 40, 60))
"""Tokens of a system prompt, a prompt and a completion."""


def make_batch(system: int, prompt: int, completion: int) -> Batch:
    draw = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return draw.integers(3, VOCABULARY, count).tolist()

    rows, rules = [], tokens(system)
    for position in range(PROMPTS):
        asked = [*rules, *tokens(prompt)]
        for _ in range(SAMPLES):
            row = np.array([*asked, *tokens(completion)], np.int32)
            mask = (np.arange(len(row)) >= len(asked)).astype(np.uint8)
            sampler_logprobs = np.full(len(row), -np.log(VOCABULARY), np.float32)
            rows.append(TrainSequence(row, mask, float(draw.normal()), sampler_logprobs, prompt=position))
    return Batch.of(rows)


def measure(system: int, prompt: int, completion: int, steps: int) -> tuple[object, ...]:
    """A row of the table."""
    batch, budget = make_batch(system, prompt, completion), SAMPLES * (system + prompt + completion)
    spec = ModelSpec("policy", ModelConfig(path="conf/models/tiny_qwen3", init="random"), OptimConfig())
    seconds: dict[str, list[float]] = {"shared": [], "packed": []}
    with site_of_one() as site:
        ways = {name: RankGroup(site, Budget(budget, shared=name == "shared")) for name in seconds}
        for name, dispatch in ways.items():
            dispatch.init_model(name, spec)
        answers = [np.concatenate(dispatch.forward(name, batch)) for name, dispatch in ways.items()]
        for number in range(WARM_UP + steps):
            for name, dispatch in ways.items():
                began = time.process_time()
                dispatch.forward_backward(name, batch, LOSS)
                dispatch.optim_step(name)
                if number >= WARM_UP:
                    seconds[name].append(time.process_time() - began)
        spared = ways["shared"].cut(["shared"], batch).saved_tokens / sum(batch.lengths)
    ratio = statistics.median(one / other for one, other in zip(*seconds.values(), strict=True))
    apart = float(np.abs(answers[0] - answers[1]).max())
    return system, prompt, completion, spared, statistics.median(seconds["packed"]), ratio, apart


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    given = parser.parse_args()
    found = [measure(*case, given.steps) for case in CASES]
    columns = ("system", "prompt", "completion", "saved", "CPU s, packed", "shared, relative", "logprob difference")
    print(f"{PROMPTS} prompts of {SAMPLES} samples a step; tokens of each\n\n{markdown(columns, found)}")
    ratios = [float(str(row[5])) for row in found]
    same = max(float(str(row[6])) for row in found) < 1e-4
    return judge(
        "no step is 5 % slower, and one of nine tenths prompt takes 0.6",
        same and max(ratios) <= 1.05 and ratios[4] <= 0.6,
    )


if __name__ == "__main__":
    sys.exit(main())
