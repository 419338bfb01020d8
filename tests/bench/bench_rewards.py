"""What rewards in processes of their own cost: `python -m tests.bench.bench_rewards [--groups N] [--rounds N]`.

Scores groups of 8 answers as the actor does, in the actor itself and in the pool of worker processes, with the task's
own reward and with functions of both forms, none of which takes time; then with one that takes 2 ms. Prints samples/s,
the actor's CPU time for each group, and the ratio to the same reward in the actor in the same run. Each figure is the
median of the rounds, which take turns. Exits with 1 when the pool is slower than the actor for a reward of 2 ms, where
there are processes to share it: then there would be nothing for its price.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import RewardConfig, TaskConfig
from pipeline.config.model_directory import BUILT_IN
from pipeline.environments import Completion, load_task
from pipeline.environments.chat_template import ChatTemplate
from pipeline.environments.rewards import Mixture, Score, load_rewards
from pipeline.environments.task_calls import InProcessCalls, TaskCalls
from pipeline.environments.task_protocol import user_prompt
from pipeline.environments.task_worker import Setup
from pipeline.environments.worker_pool import WorkerPool
from tests.bench.tables import judge, markdown

SAMPLES, IN_FLIGHT = 8, 64
MODEL = BUILT_IN / "tiny_qwen3"
TASK = TaskConfig(name="arithmetic", processes=4)
PROMPT = user_prompt("2+2", answer="4")
ANSWERS = [Completion("4" * 16, ({"role": "assistant", "content": "4" * 16},), tuple(range(200)))] * SAMPLES
MIN_RATIO = 1.0
_HERE = "tests.bench.bench_rewards"
REWARDS = {
    "the task's own": RewardConfig(),
    "verl's form": RewardConfig(functions=(f"{_HERE}:verl",)),
    "TRL's form": RewardConfig(functions=(f"{_HERE}:trl",)),
    "TRL's form, a group a call": RewardConfig(functions=(f"{_HERE}:trl",), calls="group"),
    "two functions": RewardConfig(functions=(f"{_HERE}:trl", f"{_HERE}:verl")),
    "2 ms": RewardConfig(functions=(f"{_HERE}:slow",)),
}
COLUMNS = ("reward", "where", "samples/s", "actor's ms/group", "of in the actor")
IN_ACTOR, IN_POOL = "in the actor", "in processes"
Way = tuple[str, str]


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    return float(solution_str == ground_truth)


def trl(completions: Sequence[object], answer: Sequence[str], **columns: object) -> list[float]:
    return [1.0] * len(answer)


def slow(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    until = time.perf_counter() + 0.002
    while time.perf_counter() < until:
        pass
    return 0.0


class InActor:
    """Rewards made where they are asked for."""

    def __init__(self, config: RewardConfig) -> None:
        task = load_task(TASK, 0)
        self._calls = InProcessCalls(task, ChatTemplate(MODEL), load_rewards(config, task))
        self._mixture = Mixture(config)

    async def rewards(self, answers: Sequence[Completion]) -> list[Score | str]:
        told = [
            self._calls.score_all(which, PROMPT, answers)
            if self._mixture.whole_groups
            else [self._calls.score(which, PROMPT, answer) for answer in answers]
            for which in range(len(self._mixture.names))
        ]
        return [self._mixture.combine(parts) for parts in zip(*told, strict=True)]


async def timed(calls: TaskCalls | InActor, groups: int) -> tuple[float, float]:
    """Wall seconds and the actor's CPU seconds for so many groups."""
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def one() -> None:
        async with slots:
            scores = await (calls.rewards(ANSWERS) if isinstance(calls, InActor) else calls.rewards(PROMPT, ANSWERS))
            assert all(isinstance(score, Score) for score in scores), scores

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one() for _ in range(groups)))
    return time.perf_counter() - wall, time.process_time() - cpu


async def measure(groups: int, rounds: int) -> dict[Way, tuple[float, float]]:
    times: dict[Way, list[tuple[float, float]]] = {}
    for name, config in REWARDS.items():
        count = max(8, groups // 20) if name == "2 ms" else groups
        async with WorkerPool(Setup(TASK, 0, MODEL, config), 120) as pool:
            ways: list[tuple[str, WorkerPool | InActor]] = [(IN_ACTOR, InActor(config)), (IN_POOL, pool)]
            for _, calls in ways:
                await timed(calls, count)  # processes start when calls have to wait
            for _ in range(rounds):
                for where, calls in ways:
                    wall, cpu = await timed(calls, count)
                    times.setdefault((name, where), []).append((count * SAMPLES / wall, 1000 * cpu / count))
    return {
        way: (statistics.median(speed for speed, _ in found), statistics.median(cpu for _, cpu in found))
        for way, found in times.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path.cwd()))
    found = asyncio.run(measure(arguments.groups, arguments.rounds))
    ratios = {way: speed / found[(way[0], IN_ACTOR)][0] for way, (speed, _) in found.items()}
    print(markdown(COLUMNS, [(*way, speed, cpu, ratios[way]) for way, (speed, cpu) in found.items()]))
    return judge("rewards of 2 ms are faster in processes", ratios[("2 ms", IN_POOL)] >= MIN_RATIO)


if __name__ == "__main__":
    sys.exit(main())
