"""Integer arithmetic from a generator.

Owns the built-in task `arithmetic`: expressions such as `37-52`, to be answered by `-15`. Difficulty is the number of
digits, of terms and the operators. Promises that a prompt depends only on options, seed and index; that the held-out
prompts are the same for every seed; and that none of them is ever a training prompt or a demonstration.

Two options make it a task on which a tiny model shows the effect of RL in minutes. `last_digit_first` asks for the
digits in the order in which they are computed, `51-` for −15. `demonstration_error_rate` makes the teacher of the
demonstrations forget to carry, so that SFT imitates a careless teacher and only the reward distinguishes right answers.
"""

from collections.abc import Iterator
from functools import reduce
from itertools import count
from random import Random
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.environments.task_protocol import Demonstration, Prompt, Task, TaskOptions, user_prompt

Operator = Literal["+", "-", "*"]
_HELD_OUT_SEED = "held out"


class ArithmeticOptions(TaskOptions):
    """Difficulty and number of the prompts."""

    operators: tuple[Operator, ...] = Field(("+", "-"), min_length=1, description="Operators to draw from.")
    levels: tuple[Annotated[int, Field(ge=1, le=6)], ...] = Field(
        (2,), min_length=1, description="Digits of the operands: each prompt draws one of these."
    )
    terms: Annotated[int, Field(ge=2, le=6)] = Field(2, description="Operands of an expression.")
    size: Annotated[int, Field(gt=0)] = Field(8192, description="Training prompts in an epoch.")
    held_out: Annotated[int, Field(gt=0)] = Field(256, description="Prompts of an evaluation.")
    last_digit_first: bool = Field(False, description="Write answers backward.")
    demonstration_error_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Fraction of the demonstrations without carrying and borrowing."
    )

    @model_validator(mode="after")
    def _leaves_prompts_to_train(self) -> Self:
        distinct = self.distinct()
        if self.held_out * 2 > distinct:
            raise ValueError(
                f"held_out at most half of the {distinct} expressions; lower it, or add levels or operators"
            )
        return self

    def distinct(self) -> int:
        """The number of different expressions."""
        operator_choices = len(set(self.operators)) ** (self.terms - 1)
        return sum(operator_choices * len(_operands(level)) ** self.terms for level in set(self.levels))


class Arithmetic(Task):
    """Reward 1 for an answer that is exactly the value of the expression, else 0."""

    name = "arithmetic"
    Options = ArithmeticOptions
    options: ArithmeticOptions

    def __init__(self, options: ArithmeticOptions, seed: int) -> None:
        super().__init__(options, seed)
        self._held_out = self._choose_held_out()

    def __len__(self) -> int:
        return self.options.size

    def prompt(self, index: int) -> Prompt:
        return self._new_prompt(f"{self.seed} prompt {index}")

    def demonstration(self, index: int) -> Demonstration:
        prompt = self._new_prompt(f"{self.seed} demonstration {index}")
        careless = Random(f"{self.seed} slip {index}").random() < self.options.demonstration_error_rate
        return Demonstration(prompt, self._written(careless_answer(_expression(prompt))) if careless else prompt.answer)

    def held_out(self) -> list[Prompt]:
        return list(self._held_out.values())

    def reward(self, prompt: Prompt, text: str) -> float:
        return float(text == prompt.answer)

    def _new_prompt(self, seed: str) -> Prompt:
        """The first expression of a seed that is not held out, as a prompt."""
        return next(self._prompt(expression) for expression in self._draws(seed) if expression not in self._held_out)

    def _choose_held_out(self) -> dict[str, Prompt]:
        chosen: dict[str, Prompt] = {}
        draws = self._draws(_HELD_OUT_SEED)
        while len(chosen) < self.options.held_out:
            expression = next(draws)
            chosen[expression] = self._prompt(expression)
        return chosen

    def _prompt(self, expression: str) -> Prompt:
        return user_prompt(expression, answer=self._written(evaluate(expression)))

    def _written(self, value: int) -> str:
        return str(value)[::-1] if self.options.last_digit_first else str(value)

    def _draws(self, seed: str) -> Iterator[str]:
        """Yield random expressions without end."""
        random = Random(seed)
        for _ in count():
            operands = _operands(random.choice(self.options.levels))
            expression = str(random.choice(operands))
            for _ in range(self.options.terms - 1):
                expression += f"{random.choice(self.options.operators)}{random.choice(operands)}"
            yield expression


def evaluate(expression: str) -> int:
    """The value of `7+3*2` and the like: non-negative integers, products first, then from left to right.

    >>> evaluate("7-3*2")
    1
    """
    return sum(_terms(expression))


def careless_answer(expression: str) -> int:
    """The value of an expression if every carry and borrow in sums and differences is forgotten.

    >>> careless_answer("17+25"), careless_answer("52-37")
    (32, 25)
    """
    return reduce(_add_carelessly, _terms(expression))


def _add_carelessly(one: int, other: int) -> int:
    small, large = sorted((one, other), key=abs)
    sign = 1 if (small < 0) == (large < 0) else -1
    above = str(abs(large))
    below = str(abs(small)).zfill(len(above))
    # Digit by digit modulo 10: carries and borrows are dropped.
    digits = [(int(a) + sign * int(b)) % 10 for a, b in zip(above, below, strict=True)]
    value = int("".join(map(str, digits)))
    return -value if large < 0 else value


def _terms(expression: str) -> list[int]:
    """The signed products whose sum is the expression."""
    return [_product(part) for part in expression.replace("-", "+-").split("+")]


def _product(part: str) -> int:
    sign = -1 if part.startswith("-") else 1
    for factor in part.removeprefix("-").split("*"):
        sign *= int(factor)
    return sign


def _expression(prompt: Prompt) -> str:
    return str(prompt.messages[0]["content"])


def _operands(digits: int) -> range:
    """All non-negative integers of that many digits; 0 has one digit."""
    return range(0 if digits == 1 else 10 ** (digits - 1), 10**digits)
