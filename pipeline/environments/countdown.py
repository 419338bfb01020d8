"""Countdown: an expression of given numbers with a given value.

Owns the built-in task `countdown`: some numbers and a target, which an expression that uses each number exactly once
must reach. Promises that every prompt has a solution; that a prompt depends only on options, seed and index; that the
held-out prompts are the same for every seed; and that none of them is ever a training prompt or a demonstration, in any
order of its numbers.

`compact` is the format for tiny models: `3 5 7=26`, with the answer `3*7+5`. Otherwise the question is in words, and
the answer stands between `<answer>` and `</answer>`. `demonstration_error_rate` makes the teacher of the demonstrations
answer with an arbitrary expression of the numbers, so that only the reward distinguishes right answers.
"""

import ast
import re
from collections.abc import Iterator
from itertools import count
from math import comb
from random import Random
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.environments.task_protocol import Demonstration, Prompt, Task, TaskOptions, user_prompt

Operator = Literal["+", "-", "*", "/"]
Puzzle = tuple[tuple[int, ...], int]
QUESTION = (
    "Using the numbers {numbers}, write an arithmetic expression that equals {target}. Use each number exactly once, "
    "and only {operators} and parentheses. Think first, then give the expression between <answer> and </answer>."
)
_ALLOWED = re.compile(r"[\d+\-*/() ]{1,200}")
_HELD_OUT_SEED = "countdown held out"


class CountdownOptions(TaskOptions):
    """Difficulty and number of the puzzles."""

    numbers: Annotated[int, Field(ge=2, le=6)] = Field(4, description="Numbers of a puzzle.")
    largest: Annotated[int, Field(ge=4)] = Field(99, description="Largest number; the smallest is 1.")
    operators: tuple[Operator, ...] = Field(("+", "-", "*", "/"), min_length=1, description="Operators to draw from.")
    size: Annotated[int, Field(gt=0)] = Field(8192, description="Training prompts in an epoch.")
    held_out: Annotated[int, Field(gt=0)] = Field(256, description="Prompts of an evaluation.")
    compact: bool = Field(
        False, description="Compact format: the prompt is `3 5 7=26`, and the response is only the answer."
    )
    partial_reward: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Reward of an expression that uses the numbers correctly but has another value."
    )
    demonstration_error_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Fraction of the demonstrations whose expression has an arbitrary value."
    )

    @model_validator(mode="after")
    def _leaves_prompts_to_train(self) -> Self:
        distinct = comb(self.largest + self.numbers - 1, self.numbers) * len(set(self.operators))
        if self.held_out * 2 > distinct:
            raise ValueError(
                f"held_out at most half of about {distinct} puzzles; lower it, or raise largest or numbers"
            )
        return self


class Countdown(Task):
    """Reward 1 for an expression that uses each number once and has the value."""

    name = "countdown"
    Options = CountdownOptions
    options: CountdownOptions

    def __init__(self, options: CountdownOptions, seed: int) -> None:
        super().__init__(options, seed)
        self._held_out = self._choose_held_out()

    def __len__(self) -> int:
        return self.options.size

    def prompt(self, index: int) -> Prompt:
        return self._render(self._draw(f"{self.seed} prompt {index}")[0])

    def demonstration(self, index: int) -> Demonstration:
        puzzle, expression = self._draw(f"{self.seed} demonstration {index}")
        random = Random(f"{self.seed} slip {index}")
        if random.random() < self.options.demonstration_error_rate:
            expression = self._expression(random, puzzle[0])
        answer = expression if self.options.compact else f"<answer>{expression}</answer>"
        return Demonstration(self._render(puzzle), answer)

    def held_out(self) -> list[Prompt]:
        return [self._render(puzzle) for puzzle in self._held_out.values()]

    def reward(self, prompt: Prompt, text: str) -> float:
        numbers, target = prompt.answer
        expression = text if self.options.compact else _answer_in(text)
        if sorted(map(int, re.findall(r"\d+", expression))) != sorted(numbers):
            return 0.0
        value = evaluate(expression)
        if value is None:
            return 0.0
        return 1.0 if value == target else self.options.partial_reward

    def _render(self, puzzle: Puzzle) -> Prompt:
        numbers, target = puzzle
        if self.options.compact:
            question = f"{' '.join(map(str, numbers))}={target}"
        else:
            listed, operators = ", ".join(map(str, numbers)), ", ".join(self.options.operators)
            question = QUESTION.format(numbers=listed, target=target, operators=operators)
        prompt = user_prompt(question, answer=puzzle)
        return Prompt(prompt.messages, puzzle, {"numbers": list(numbers), "target": target})

    def _draw(self, seed: str) -> tuple[Puzzle, str]:
        """The first puzzle of a seed that is not held out, with a solution."""
        return next(drawn for drawn in self._draws(seed) if _key(drawn[0]) not in self._held_out)

    def _choose_held_out(self) -> dict[Puzzle, Puzzle]:
        chosen: dict[Puzzle, Puzzle] = {}
        draws = self._draws(_HELD_OUT_SEED)
        while len(chosen) < self.options.held_out:
            puzzle, _ = next(draws)
            chosen.setdefault(_key(puzzle), puzzle)
        return chosen

    def _draws(self, seed: str) -> Iterator[tuple[Puzzle, str]]:
        """Yield puzzles without end, each from a solving expression whose value is a natural number."""
        random = Random(seed)
        for _ in count():
            numbers = tuple(random.randint(1, self.options.largest) for _ in range(self.options.numbers))
            expression = self._expression(random, numbers)
            value = evaluate(expression)
            if value is not None and value >= 0 and value == int(value):
                yield (tuple(random.sample(numbers, len(numbers))), int(value)), expression

    def _expression(self, random: Random, numbers: tuple[int, ...]) -> str:
        first, *rest = random.sample(numbers, len(numbers))
        return str(first) + "".join(f"{random.choice(self.options.operators)}{number}" for number in rest)


def evaluate(expression: str) -> float | None:
    """The value of an expression of non-negative integers, `+ - * /` and parentheses; None if the text is no such
    expression, or has no value.

    >>> evaluate("(3+4)*2"), evaluate("6/4"), evaluate("3//4"), evaluate("1/0"), evaluate("2**9")
    (14, 1.5, None, None, None)
    """
    if not _ALLOWED.fullmatch(expression):
        return None
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, ValueError, RecursionError, MemoryError, OverflowError):
        return None


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            above, below = _value(left), _value(right)
            whole = isinstance(above, int) and isinstance(below, int) and above % below == 0
            return above // below if whole else above / below
    raise ValueError("no such expression")


def _answer_in(text: str) -> str:
    """The text in the last pair of answer tags."""
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return str(answers[-1]).strip() if answers else ""


def _key(puzzle: Puzzle) -> Puzzle:
    return tuple(sorted(puzzle[0])), puzzle[1]
