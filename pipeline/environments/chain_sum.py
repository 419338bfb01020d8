"""Sums and differences in words, for chat models.

Owns the built-in task `chain_sum`: a question such as `State the final answer to the following arithmetic problem:
4 + 31 - 7 =`, in the words of reasoning-gym's generator of this name. The last number of an answer counts, so a model
may explain itself. Promises that a prompt depends only on options, seed and index; that the held-out prompts are the
same for every seed; and that none of them is ever a training prompt.
"""

from collections.abc import Iterator
from random import Random
from typing import Annotated, Self

from pydantic import Field, model_validator

from pipeline.environments.arithmetic import evaluate
from pipeline.environments.last_number import is_last_number
from pipeline.environments.task_protocol import Demonstration, Prompt, Task, TaskOptions, user_prompt

QUESTION = "State the final answer to the following arithmetic problem: {} ="
_HELD_OUT_SEED = "chain_sum held out"


class ChainSumOptions(TaskOptions):
    """Difficulty and number of the prompts."""

    min_terms: Annotated[int, Field(ge=2, le=8)] = Field(2, description="Fewest operands of a problem.")
    max_terms: Annotated[int, Field(ge=2, le=8)] = Field(3, description="Most operands of a problem.")
    min_digits: Annotated[int, Field(ge=1, le=6)] = Field(1, description="Fewest digits of a problem's operands.")
    max_digits: Annotated[int, Field(ge=1, le=6)] = Field(2, description="Most digits of a problem's operands.")
    size: Annotated[int, Field(gt=0)] = Field(8192, description="Training prompts in an epoch.")
    held_out: Annotated[int, Field(gt=0)] = Field(256, description="Prompts of an evaluation.")

    @model_validator(mode="after")
    def _has_problems(self) -> Self:
        for name in ("terms", "digits"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least > most:
                raise ValueError(f"min_{name} at most max_{name}, {most}; found {least}")
        distinct = 2 ** (self.max_terms - 1) * (9 * 10 ** (self.max_digits - 1)) ** self.max_terms
        if self.held_out * 2 > distinct:
            raise ValueError(f"held_out at most half of about {distinct} problems; lower it, or raise max_terms")
        return self


class ChainSum(Task):
    """Reward 1 if the last number of the answer is the value, else 0."""

    name = "chain_sum"
    Options = ChainSumOptions
    options: ChainSumOptions

    def __init__(self, options: ChainSumOptions, seed: int) -> None:
        super().__init__(options, seed)
        self._held_out: dict[str, Prompt] = {}
        for expression in self._draws(_HELD_OUT_SEED):
            self._held_out.setdefault(expression, _prompt(expression))
            if len(self._held_out) == options.held_out:
                break

    def __len__(self) -> int:
        return self.options.size

    def prompt(self, index: int) -> Prompt:
        return _prompt(self._draw(f"{self.seed} prompt {index}"))

    def demonstration(self, index: int) -> Demonstration:
        prompt = _prompt(self._draw(f"{self.seed} demonstration {index}"))
        return Demonstration(prompt, prompt.answer)

    def held_out(self) -> list[Prompt]:
        return list(self._held_out.values())

    def reward(self, prompt: Prompt, text: str) -> float:
        return float(is_last_number(text, prompt.answer))

    def _draw(self, seed: str) -> str:
        """The first problem of a seed that is not held out."""
        return next(expression for expression in self._draws(seed) if expression not in self._held_out)

    def _draws(self, seed: str) -> Iterator[str]:
        """Yield random problems without end, such as `4 + 31 - 7`."""
        random, options = Random(seed), self.options
        while True:
            digits = random.randint(options.min_digits, options.max_digits)
            operands = range(0 if digits == 1 else 10 ** (digits - 1), 10**digits)
            problem = str(random.choice(operands))
            for _ in range(random.randint(options.min_terms, options.max_terms) - 1):
                problem += f" {random.choice('+-')} {random.choice(operands)}"
            yield problem


def _prompt(expression: str) -> Prompt:
    return user_prompt(QUESTION.format(expression), answer=str(evaluate(expression)))
