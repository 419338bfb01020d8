"""Countdown: every prompt can be solved, held-out ones stay held out, and only whole solutions pay."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import TaskConfig
from pipeline.environments import Prompt, load_task
from pipeline.environments.countdown import Countdown, evaluate
from pipeline.errors import ConfigError


def countdown(seed: int = 0, **options: Any) -> Countdown:
    options = {"numbers": 3, "largest": 12, "held_out": 64, "compact": True} | options
    task = load_task(TaskConfig(name="countdown", options=options), seed)
    assert isinstance(task, Countdown)
    return task


def key(prompt: Prompt) -> tuple[tuple[int, ...], int]:
    return tuple(sorted(prompt.columns["numbers"])), prompt.columns["target"]


@given(
    st.recursive(
        st.integers(0, 99).map(str),
        lambda inner: st.builds("({}{}{})".format, inner, st.sampled_from("+-*"), inner),
        max_leaves=6,
    )
)
def test_an_expression_has_the_value_that_python_gives_it(text: str) -> None:
    assert evaluate(text) == eval(text)


@pytest.mark.parametrize("text", ["", "2**9", "3//2", "1/0", "-", "2+", "__import__('os')", "1" * 300, "(" * 99, "1.5"])
def test_what_is_no_expression_or_has_no_value_has_none(text: str) -> None:
    assert evaluate(text) is None


def test_a_teacher_without_slips_solves_every_puzzle_and_a_careless_one_some() -> None:
    right, careless = countdown(), countdown(demonstration_error_rate=1.0, operators=["+", "-", "*"])
    shown = [right.demonstration(index) for index in range(200)]
    assert [right.reward(each.prompt, each.answer) for each in shown] == [1.0] * 200
    shown = [careless.demonstration(index) for index in range(200)]
    assert 0 < sum(careless.reward(each.prompt, each.answer) for each in shown) < 120


def test_held_out_puzzles_are_the_same_for_every_seed_and_never_trained() -> None:
    task = countdown(seed=3, size=4096)
    assert task.held_out() == countdown(seed=4).held_out()
    held_out = {key(prompt) for prompt in task.held_out()}
    assert len(held_out) == 64
    assert not held_out & {key(task.prompt(index)) for index in range(4096)}
    assert not held_out & {key(task.demonstration(index).prompt) for index in range(4096)}
    assert task.prompt(5) == countdown(seed=3).prompt(5) != countdown(seed=4).prompt(5)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("3*7+5", 1.0),
        ("5+(7*3)", 1.0),
        ("3+5+7", 0.25),
        ("26", 0.0),
        ("3*7+5+0", 0.0),
        ("3*7", 0.0),
        ("3*7+5$", 0.0),
        ("37+5", 0.0),
    ],
)
def test_an_expression_pays_if_it_has_the_numbers_and_the_value(text: str, reward: float) -> None:
    assert countdown(partial_reward=0.25).reward(Prompt((), answer=((7, 5, 3), 26)), text) == reward


def test_in_words_the_answer_stands_between_tags() -> None:
    task = countdown(compact=False)
    prompt = Prompt((), answer=((7, 5, 3), 26))
    assert task.reward(prompt, "It is <answer>5</answer>, no: <answer>\n3*7+5 </answer>.") == 1.0
    assert task.reward(prompt, "3*7+5") == 0.0
    shown = task.demonstration(0)
    assert task.reward(shown.prompt, shown.answer) == 1.0
    assert str(shown.prompt.columns["target"]) in shown.prompt.messages[0]["content"]


def test_too_few_puzzles_to_hold_out_are_refused() -> None:
    with pytest.raises(ConfigError, match="half of about 80 puzzles"):
        countdown(largest=4)
