"""Sums in words: every prompt has its value, held-out ones stay held out, and the last number of an answer counts."""

import re
from typing import Any

import pytest

from pipeline.config import TaskConfig
from pipeline.environments import load_task
from pipeline.environments.chain_sum import ChainSum
from pipeline.environments.last_number import is_last_number
from pipeline.errors import ConfigError


def chain_sum(seed: int = 0, **options: Any) -> ChainSum:
    task = load_task(TaskConfig(name="chain_sum", options=options), seed)
    assert isinstance(task, ChainSum)
    return task


def expression_of(question: object) -> str:
    match = re.fullmatch(r"State the final answer to the following arithmetic problem: (.*) =", str(question))
    assert match is not None
    return match[1]


def test_an_answer_is_the_value_of_an_expression_within_the_bounds() -> None:
    task = chain_sum(max_terms=4)
    for prompt in (task.prompt(index) for index in range(500)):
        expression = expression_of(prompt.messages[0]["content"])
        operands = re.findall(r"\d+", expression)
        assert 2 <= len(operands) <= 4
        assert len({len(operand) for operand in operands}) == 1
        assert str(eval(expression)) == prompt.answer
        assert task.reward(prompt, f"The answer is {prompt.answer}.") == 1


def test_held_out_problems_are_the_same_for_every_seed_and_never_trained() -> None:
    task = chain_sum(seed=3, max_terms=2, max_digits=1, held_out=50)
    assert task.held_out() == chain_sum(seed=4, max_terms=2, max_digits=1, held_out=50).held_out()
    held_out = {prompt.messages[0]["content"] for prompt in task.held_out()}
    assert len(held_out) == 50
    assert not held_out & {task.prompt(index).messages[0]["content"] for index in range(2000)}
    assert task.prompt(5) == chain_sum(seed=3, max_terms=2, max_digits=1, held_out=50).prompt(5)
    assert task.demonstration(7).answer == task.demonstration(7).prompt.answer


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("7", True),
        ("12 - 5 = 7.", True),
        ("12-5 is **7**", True),
        ("7.0", True),
        ("7, no: 8", False),
        ("-7", False),
        ("12-7", True),
        ("17", False),
        ("0.7", False),
        ("seven", False),
        ("", False),
    ],
)
def test_the_last_number_of_a_text_counts(text: str, right: bool) -> None:
    assert is_last_number(text, "7") == right


def test_a_negative_answer_keeps_its_sign() -> None:
    assert is_last_number("5 - 12 = -7", "-7")
    assert not is_last_number("5 - 12 = 7", "-7")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_terms": 3, "max_terms": 2}, "min_terms at most max_terms, 2"),
        ({"min_digits": 2, "max_digits": 1}, "min_digits at most max_digits, 1"),
        ({"max_terms": 2, "max_digits": 1, "held_out": 100}, "at most half of about 162 problems"),
    ],
)
def test_options_that_leave_no_problems_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chain_sum(**options)
