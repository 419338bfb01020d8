"""The reward function for mathematical answers."""

import importlib
import signal
import sys
from typing import Any

import pytest

from pipeline.config import RewardConfig
from pipeline.environments.math_verifier import correct
from pipeline.environments.rewards import check_rewards
from pipeline.environments.user_imports import import_object
from pipeline.errors import ConfigError
from tests.unit.environments.test_tasks import arithmetic

NAME = "pipeline.environments.math_verifier:correct"


@pytest.mark.parametrize(
    ("said", "truth", "reward"),
    [
        (r"The answer is $\boxed{\frac{1}{2}}$.", "0.5", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        ("So she has 42 apples left.", "He ate 3 * 2 = 6. So 42.\n#### 42", 1.0),
        ("So she has 41 apples left.", "#### 42", 0.0),
        ("1,234", "1234", 1.0),
        (r"\boxed{3}, no: it cannot be", "4", 0.0),
        ("", "3", 0.0),
    ],
)
def test_equal_expressions_are_equal_however_they_are_written(said: str, truth: str, reward: float) -> None:
    assert correct("gsm8k", said, truth) == reward


def test_a_truth_that_says_nothing_is_no_wrong_answer() -> None:
    with pytest.raises(ValueError, match="no expression"):
        correct("gsm8k", "3", "It is hard to say.\n####")


def test_no_alarm_is_set_for_the_librarys_own_time_outs(monkeypatch: pytest.MonkeyPatch) -> None:
    alarms: list[Any] = []
    monkeypatch.setattr(signal, "alarm", alarms.append)
    monkeypatch.setattr(signal, "setitimer", lambda *arguments: alarms.append(arguments))
    assert correct("gsm8k", "41", "42") == 0.0
    assert alarms == []


def test_it_is_a_function_for_any_task_with_answers() -> None:
    check_rewards(RewardConfig(functions=(NAME,)), arithmetic(), "arithmetic")


def test_without_the_library_the_error_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "pipeline.environments.math_verifier")
    with pytest.raises(ConfigError, match=r"-m pip install 'math-verify"):
        import_object("reward.functions", NAME, "a function", "")
    monkeypatch.undo()
    importlib.import_module("pipeline.environments.math_verifier")
