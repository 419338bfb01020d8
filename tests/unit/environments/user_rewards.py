"""Reward functions as users may write them, good and bad, for `reward.functions`."""

import asyncio
from collections.abc import Iterator
from typing import Any

NO_FUNCTION = 3


def trl_exact(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
    return [float(said[-1]["content"] == right) for said, right in zip(completions, answer, strict=True)]


def trl_lengths(completion_ids: Any, completions: Any) -> list[float]:
    return [float(len(tokens)) for tokens in completion_ids]


def trl_rank(completions: Any, **columns: Any) -> list[float]:
    """What compares the samples of a prompt."""
    said = [one[-1]["content"] for one in completions]
    return [float(sorted(said).index(text)) for text in said]


def trl_sometimes(completions: Any, **columns: Any) -> list[float | None]:
    return [None if one[-1]["content"] == "skip" else 0.5 for one in completions]


async def trl_async(completions: Any, **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return [1.0 for _ in completions]


def verl_exact(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    if solution_str == "raise":
        raise ValueError("cannot be parsed")
    return float(solution_str == ground_truth)


def verl_dict(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    return {"score": 2.0, "length": len(solution_str), "pred": solution_str, "nan": float("nan")}


async def verl_async(solution_str: str, ground_truth: str, penalty: float, **rest: Any) -> float:
    if solution_str == "hang":
        await asyncio.sleep(600)
    if solution_str == "exit":
        raise SystemExit(2)
    if solution_str == "cancelled":
        raise asyncio.CancelledError
    return -penalty


def gives(completions: Any, what: Any = None) -> Any:
    """Whatever its option says."""
    return what


def needs_question(completions: Any, question: Any, difficulty: Any) -> list[float]:
    return [0.0 for _ in completions]


def of_something_else(text: str) -> float:
    return 0.0


def positional(completions: Any, /) -> list[float]:
    return [0.0]


def generator(completions: Any) -> Iterator[float]:
    yield 0.0


class Scorer:
    """An object that is called."""

    def __call__(self, completions: Any, **columns: Any) -> list[float]:
        return [3.0 for _ in completions]


scorer = Scorer()
