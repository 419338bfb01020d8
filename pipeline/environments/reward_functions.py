"""Calls of reward functions, in the two common signatures.

Owns both signatures: the arguments of a call, and the meaning of the result. Promises one `PartialScore` per sample, or
one line with the reason why there is none: a reward that is no finite number is never a score. Must not know the source
of functions (`pipeline.environments.rewards`), nor processes and deadlines (`pipeline.environments.worker_pool`).

    def short(completions, **columns): return [1.0 - len(text) / 1000 for text in completions]
    def right(data_source, solution_str, ground_truth, extra_info=None): return float(solution_str == ground_truth)

The first is TRL's (`GRPOTrainer`, `reward_funcs`): lists over samples, None for a sample without a score. The second is
verl's (`compute_score`): one sample, and a number or a dict with `score` as result. Both may be `async`.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, Literal

from pipeline.environments.guarded_call import call_guarded, encodable, failure_reason, is_cancelled, reason_line
from pipeline.environments.task_protocol import Completion, Prompt

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True)
class PartialScore:
    """One function's score of one sample, None if the function does not apply; and its further metrics, by name."""

    score: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardFunction:
    """A function with everything that a call needs.

    Attributes:
        name: as in metrics.
        call: the function, `async` or not.
        style: the signature.
        takes: names of the arguments to pass; None: all.
        options: keyword arguments from `reward.options`.
        source: the task's name, for prompts without a column `data_source`; prompts of a mix have a label instead.
    """

    name: str
    call: Callable[..., Any]
    style: Literal["trl", "verl"]
    takes: frozenset[str] | None
    options: Mapping[str, Any]
    source: str

    @property
    def is_async(self) -> bool:
        """Whether a call must be awaited."""
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(type(self.call).__call__)

    def score(self, prompt: Prompt, answers: Sequence[Completion]) -> list[PartialScore | str]:
        """One partial score, or the reason why there is none, per answer to a prompt. Not for `async` functions."""
        return self._parts([self._called(call) for call in self._calls(prompt, answers)], len(answers))

    async def score_async(self, prompt: Prompt, answers: Sequence[Completion]) -> list[PartialScore | str]:
        """One partial score or reason per answer, from an `async` function. All its calls run concurrently."""
        returned = await asyncio.gather(*(self._awaited(call) for call in self._calls(prompt, answers)))
        return self._parts(returned, len(answers))

    def _called(self, call: Callable[[], Any]) -> tuple[Any] | str:
        def returned() -> tuple[Any]:
            return (call(),)

        return call_guarded(self._raised, returned)

    async def _awaited(self, call: Callable[[], Any]) -> tuple[Any] | str:
        try:
            return (await call(),)
        except BaseException as error:  # foreign code: any error becomes the sample's reason
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            return failure_reason(self._raised, error)

    @property
    def _raised(self) -> str:
        return f"reward {self.name} raised"

    def _calls(self, prompt: Prompt, answers: Sequence[Completion]) -> Iterator[Callable[[], Any]]:
        """The calls to make: one for all answers in TRL's style, one per answer in verl's style."""
        if self.style == "verl":
            argument_sets = [verl_arguments(prompt, answer, prompt.task or self.source) for answer in answers]
        else:
            argument_sets = [trl_arguments(prompt, answers)]
        for arguments in argument_sets:
            yield partial(self.call, **{**self._taken(arguments), **self.options})

    def _taken(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        takes = self.takes
        return {name: value for name, value in arguments.items() if takes is None or name in takes}

    def _parts(self, returned: Sequence[tuple[Any] | str], count: int) -> list[PartialScore | str]:
        """The partial score or reason of each of `count` samples, from the calls' results: 1-tuples, or reasons."""
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
        part: PartialScore | str = call_guarded(self._raised, partial(self._parse, value))
        return part

    def _parse(self, value: Any) -> PartialScore | str:
        if value is None and self.style == "trl":
            return PartialScore(None)
        metrics: dict[str, float] = {}
        if isinstance(value, Mapping):
            value, metrics = value.get("score"), _numbers(value)
        score = number(f"reward {self.name}", value)
        return score if isinstance(score, str) else PartialScore(score, metrics)


def number(title: str, value: Any) -> float | str:
    """`value` as a finite number, or the reason why it is none."""
    if not isinstance(value, Real) and not _is_scalar(value):
        return reason_line(f"{title} is no number: {type(value).__name__} {value!r}")
    try:
        score = float(value)
    except OverflowError:
        return f"{title} is too large for a float"
    return score if math.isfinite(score) else f"{title} is not finite: {score}"


def is_finite(value: Any) -> bool:
    """Whether `value` is a finite number as a float: an integer may be too large for one."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def _is_scalar(value: Any) -> bool:
    """A tensor or array of one number, which functions in TRL's style often return."""
    return getattr(value, "ndim", None) == 0 and hasattr(value, "__float__")


def _short_repr(value: Any) -> str:
    return reason_line(f"{type(value).__name__} {value!r}")[:80]


def _numbers(scores: Mapping[Any, Any]) -> dict[str, float]:
    """All finite numbers of verl's dict except `score`, by name."""
    return {
        encodable(str(name)): float(value) for name, value in scores.items() if name != "score" and is_finite(value)
    }


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """The columns of a prompt's row, with its answer as the column `answer` unless the row has one."""
    answer = {} if prompt.answer is None else {"answer": prompt.answer}
    return answer | dict(prompt.columns)


def verl_arguments(prompt: Prompt, answer: Completion, source: str) -> dict[str, Any]:
    """The arguments of verl's `compute_score` for one sample. The truth is the column `ground_truth`, or the
    `ground_truth` within `reward_model`, as in verl's Parquet files, or else `answer`."""
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
    """The arguments of a TRL function for the samples of one prompt: lists of texts if `prompt.as_text`, else lists of
    messages."""
    columns = columns_of(prompt)
    question = prompt.messages[-1]["content"] if prompt.as_text else list(prompt.messages)
    completions = [answer.text if prompt.as_text else list(answer.conversation) for answer in answers]
    repeated = {name: [value] * len(answers) for name, value in columns.items() if name not in TRL}
    return repeated | {
        "prompts": [question] * len(answers),
        "completions": completions,
        "completion_ids": [list(answer.tokens) for answer in answers],
    }
