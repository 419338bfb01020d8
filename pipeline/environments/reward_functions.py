"""Reward functions as people have them.

Owns the two signatures of functions: what one is called with, and what its answer means. Promises one `PartialScore`
for each sample, or one line that says why there is none: a reward that is no finite number is never a score. Must not
know where functions come from (`pipeline.environments.rewards`), nor processes and deadlines
(`pipeline.environments.worker_pool`).

    def short(completions, **columns): return [1.0 - len(text) / 1000 for text in completions]
    def right(data_source, solution_str, ground_truth, extra_info=None): return float(solution_str == ground_truth)

The first is TRL's (`GRPOTrainer`, `reward_funcs`): lists over samples, None for a sample that it has nothing to say
about. The second is verl's (`compute_score`): one sample, a number or a dict with `score`. Both may be `async`.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, Literal

from pipeline.environments.guarded_call import REASON_LENGTH, call_guarded, failure_reason
from pipeline.environments.task_protocol import Completion, Prompt

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True)
class PartialScore:
    """What one function says of one sample: its score, None for nothing; and further numbers, by name."""

    score: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardFunction:
    """A function with what is needed to call it.

    Attributes:
        name: as in metrics.
        call: the function, `async` or not.
        style: whose signature it has.
        takes: the names that it is given; None: all there are.
        options: keywords from `reward.options`.
        source: the task's name, where the prompts have no column `data_source`.
    """

    name: str
    call: Callable[..., Any]
    style: Literal["trl", "verl"]
    takes: frozenset[str] | None
    options: Mapping[str, Any]
    source: str

    @property
    def is_async(self) -> bool:
        """Whether a call of it is awaited."""
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(type(self.call).__call__)

    def score(self, prompt: Prompt, answers: Sequence[Completion]) -> list[PartialScore | str]:
        """One part, or the reason why there is none, for each of the answers to a prompt. Not for `async` ones."""
        return self._parts([self._called(call) for call in self._calls(prompt, answers)], len(answers))

    async def score_async(self, prompt: Prompt, answers: Sequence[Completion]) -> list[PartialScore | str]:
        """The same of an `async` function; all its calls run at once."""
        returned = await asyncio.gather(*(self._awaited(call) for call in self._calls(prompt, answers)))
        return self._parts(returned, len(answers))

    def _called(self, call: Callable[[], Any]) -> tuple[Any] | str:
        def returned() -> tuple[Any]:
            return (call(),)

        return call_guarded(self._raised, returned)

    async def _awaited(self, call: Callable[[], Any]) -> tuple[Any] | str:
        try:
            return (await call(),)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 foreign code: whatever it raises is the sample's reason
            return failure_reason(self._raised, error)

    @property
    def _raised(self) -> str:
        return f"reward {self.name} raised"

    def _calls(self, prompt: Prompt, answers: Sequence[Completion]) -> Iterator[Callable[[], Any]]:
        """Calls that are to be made: of TRL's form one for all answers, of verl's one for each."""
        if self.style == "verl":
            given = [verl_arguments(prompt, answer, self.source) for answer in answers]
        else:
            given = [trl_arguments(prompt, answers)]
        for arguments in given:
            yield partial(self.call, **{**self._taken(arguments), **self.options})

    def _taken(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        takes = self.takes
        return {name: value for name, value in arguments.items() if takes is None or name in takes}

    def _parts(self, returned: Sequence[tuple[Any] | str], count: int) -> list[PartialScore | str]:
        """What each of `count` samples gets of what the calls gave: 1-tuples, or reasons."""
        if self.style == "verl":
            return [one if isinstance(one, str) else self._part(one[0]) for one in returned]
        (one,) = returned
        if isinstance(one, str):
            return [one] * count
        values = self._list(one[0], count)
        return [values] * count if isinstance(values, str) else [self._part(value) for value in values]

    def _list(self, value: Any, count: int) -> list[Any] | str:
        if isinstance(value, str | Mapping):
            return f"reward {self.name} gave no list: {_short_repr(value)}"
        values = call_guarded(f"reward {self.name} gave no list", lambda: list(value))
        if isinstance(values, str) or len(values) == count:
            return values
        return f"reward {self.name} gave too many or too few: {len(values)} for {count} samples"

    def _part(self, value: Any) -> PartialScore | str:
        made: PartialScore | str = call_guarded(self._raised, partial(self._made, value))
        return made

    def _made(self, value: Any) -> PartialScore | str:
        if value is None and self.style == "trl":
            return PartialScore(None)
        metrics: dict[str, float] = {}
        if isinstance(value, Mapping):
            value, metrics = value.get("score"), _numbers(value)
        score = number(f"reward {self.name}", value)
        return score if isinstance(score, str) else PartialScore(score, metrics)


def number(title: str, value: Any) -> float | str:
    """The finite number that `value` is, or why it is none."""
    if not isinstance(value, Real) and not _is_scalar(value):
        return f"{title} is no number: {type(value).__name__} {value!r}"[:REASON_LENGTH]
    score = float(value)
    return score if math.isfinite(score) else f"{title} is not finite: {score}"


def _is_scalar(value: Any) -> bool:
    """A tensor or array of one number, which functions of TRL's form often give."""
    return getattr(value, "ndim", None) == 0 and hasattr(value, "__float__")


def _short_repr(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:80]


def _numbers(found: Mapping[Any, Any]) -> dict[str, float]:
    """What else verl's dict says in numbers."""
    return {
        str(name): float(value)
        for name, value in found.items()
        if name != "score" and isinstance(value, Real) and math.isfinite(value)
    }


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """What a prompt's row says, and its answer as the column `answer` unless it has one."""
    answer = {} if prompt.answer is None else {"answer": prompt.answer}
    return answer | dict(prompt.columns)


def verl_arguments(prompt: Prompt, answer: Completion, source: str) -> dict[str, Any]:
    """One sample as verl's `compute_score` is given it; the truth is the column `ground_truth`, the one in
    `reward_model`, as in verl's Parquet files, or `answer`."""
    columns = columns_of(prompt)
    return {
        "data_source": columns.get("data_source", source),
        "solution_str": answer.text,
        "ground_truth": _truth(columns),
        "extra_info": columns.get("extra_info"),
    }


def _truth(columns: Mapping[str, Any]) -> Any:
    inside = columns.get("reward_model")
    nested = inside.get("ground_truth") if isinstance(inside, Mapping) else None
    return columns.get("ground_truth", columns.get("answer") if nested is None else nested)


def trl_arguments(prompt: Prompt, answers: Sequence[Completion]) -> dict[str, Any]:
    """Samples of one prompt as TRL gives them: lists, of texts for a plain prompt, of messages otherwise."""
    columns = columns_of(prompt)
    asked = prompt.messages[-1]["content"] if prompt.as_text else list(prompt.messages)
    told = [answer.text if prompt.as_text else list(answer.conversation) for answer in answers]
    repeated = {name: [value] * len(answers) for name, value in columns.items() if name not in TRL}
    return repeated | {
        "prompts": [asked] * len(answers),
        "completions": told,
        "completion_ids": [list(answer.tokens) for answer in answers],
    }
