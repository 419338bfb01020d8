"""Reward functions: what they are called with, what their answers mean, and what is refused before anything starts."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from pipeline.config import RewardConfig, TaskConfig
from pipeline.config.model_directory import BUILT_IN
from pipeline.environments import Completion, Prompt, Task, load_task, user_prompt
from pipeline.environments.agent_report import AgentReport, parse_report
from pipeline.environments.chat_template import ChatTemplate
from pipeline.environments.reward_functions import PartialScore
from pipeline.environments.rewards import Mixture, Score, check_rewards, load_rewards, names_of
from pipeline.environments.task_calls import InProcessCalls
from pipeline.errors import ConfigError
from tests.unit.environments.user_tasks import Unscored

HERE = "tests.unit.environments.user_rewards"
TINY = ChatTemplate(BUILT_IN / "tiny_qwen3")
PROMPT = user_prompt("2+2", answer="4")


def arithmetic() -> Task:
    return load_task(TaskConfig(name="arithmetic"), 0)


def reward(*names: str, **keys: Any) -> RewardConfig:
    return RewardConfig(functions=tuple(name if name == "task" else f"{HERE}:{name}" for name in names), **keys)


def said(text: str, *tokens: int) -> Completion:
    return Completion(text, ({"role": "assistant", "content": text},), tokens)


def scores(
    config: RewardConfig, prompt: Prompt, answers: Sequence[Completion], seconds: float = 60
) -> list[Score | str]:
    """What a worker would say, put together as the pool does."""
    task, mixture = arithmetic(), Mixture(config)
    calls = InProcessCalls(task, TINY, load_rewards(config, task), seconds)
    told: list[list[PartialScore | str]] = []
    with closing(calls):
        for which in range(len(mixture.names)):
            if mixture.whole_groups:
                (parts,) = calls.replies("score_all", (which, prompt), (tuple(answers),))
                told.append([parts] * len(answers) if isinstance(parts, str) else parts)
            else:
                told.append(list(calls.replies("score", (which, prompt), answers)))
    return [mixture.combine(parts) for parts in zip(*told, strict=True)]


def values(config: RewardConfig, prompt: Prompt, *texts: str) -> list[float | str]:
    found = scores(config, prompt, [said(text, *range(len(text))) for text in texts])
    return [score.reward if isinstance(score, Score) else score for score in found]


def test_a_function_of_trl_gets_lists_of_messages_and_the_columns_of_the_prompt() -> None:
    assert values(reward("trl_exact"), PROMPT, "4", "5") == [1.0, 0.0]
    with_column = Prompt(PROMPT.messages, columns={"answer": "5"})
    assert values(reward("trl_exact"), with_column, "4", "5") == [0.0, 1.0]
    assert values(reward("trl_lengths"), PROMPT, "4", "567") == [1.0, 3.0]


def test_a_plain_prompt_and_its_answers_are_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(f"{HERE}.gives", lambda **given: seen.update(given) or [0.0])
    scores(reward("gives"), Prompt(user_prompt("2+2=").messages, columns={"level": 3}, as_text=True), [said("4", 9)])
    assert seen == {"prompts": ["2+2="], "completions": ["4"], "completion_ids": [[9]], "level": [3]}


def test_a_function_of_verl_gets_one_sample_and_its_truth_from_where_verl_keeps_it() -> None:
    assert values(reward("verl_exact"), PROMPT, "4", "5") == [1.0, 0.0]
    nested = Prompt((), columns={"reward_model": {"style": "rule", "ground_truth": "5"}})
    assert values(reward("verl_exact"), nested, "4", "5") == [0.0, 1.0]
    named = Prompt((), answer="9", columns={"ground_truth": "7"})
    assert values(reward("verl_exact"), named, "9", "7") == [0.0, 1.0]


def test_the_numbers_of_a_dict_are_metrics_and_its_score_is_the_score() -> None:
    (score,) = scores(reward("verl_dict"), PROMPT, [said("abc")])
    assert score == Score(2.0, {"rewards/verl_dict": 2.0, "rewards/verl_dict/length": 3.0})


def test_half_an_emoji_in_the_name_of_a_number_is_its_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{HERE}.verl_dict", lambda solution_str: {"score": 1, "half \ud83d": 2})
    (score,) = scores(reward("verl_dict"), PROMPT, [said("abc")])
    assert score == Score(1.0, {"rewards/verl_dict": 1.0, "rewards/verl_dict/half \\ud83d": 2.0})


def test_half_an_emoji_in_an_agents_report_is_its_escape() -> None:
    assert parse_report('{"reward": 1, "metrics": {"\\ud83d": 3}}') == AgentReport(1.0, {"\\ud83d": 3.0})
    assert str(parse_report('{"\\ud83d": 1}')).startswith("the agent's report has the keys \\ud83d: expected")


def test_weights_make_one_reward_of_several_functions_and_the_tasks_own() -> None:
    config = reward("task", "trl_lengths", "verl_async", weights=(1, -0.5, 2), options={"verl_async": {"penalty": 3}})
    (score,) = scores(config, PROMPT, [said("4", 1, 2)])
    assert score == Score(1 - 1 - 6, {"rewards/task": 1.0, "rewards/trl_lengths": 2.0, "rewards/verl_async": -3.0})


def test_none_of_trl_says_nothing_and_is_no_zero() -> None:
    assert values(reward("trl_sometimes", "trl_async"), PROMPT, "skip", "4") == [1.0, 1.5]
    assert values(reward("trl_sometimes"), PROMPT, "skip") == ["no reward function has a score: each gave None"]


def test_a_function_that_compares_samples_sees_all_of_a_prompt() -> None:
    assert values(reward("trl_rank", calls="group"), PROMPT, "b", "c", "a") == [1.0, 2.0, 0.0]
    assert values(reward("trl_rank"), PROMPT, "b", "c", "a") == [0.0, 0.0, 0.0]
    assert values(reward("verl_exact", "trl_async", "task", calls="group"), PROMPT, "4", "raise") == [
        3.0,
        "reward verl_exact raised ValueError: cannot be parsed",
    ]


def test_one_sample_that_a_function_fails_costs_no_other() -> None:
    bad = "reward verl_exact raised ValueError: cannot be parsed"
    assert values(reward("verl_exact", "trl_async"), PROMPT, "4", "raise", "5") == [2.0, bad, 1.0]


def test_an_async_function_awaits_for_all_samples_at_once_and_no_longer_than_the_deadline() -> None:
    config = reward("verl_async", options={"verl_async": {"penalty": 1.0}})
    found = scores(config, PROMPT, [said(text) for text in ("hang", "4", "exit", "cancelled", "hang")], seconds=0.2)
    late = "reward verl_async took too long: it awaited more than 0.18 s"
    assert [getattr(one, "reward", one) for one in found] == [
        late,
        -1.0,
        "reward verl_async raised SystemExit: 2",
        "reward verl_async raised CancelledError: ",
        late,
    ]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (None, "reward gives gave no list TypeError: 'NoneType' object is not iterable"),
        ("4", "reward gives gave no list: str '4'"),
        ({"score": 1}, "reward gives gave no list: dict {'score': 1}"),
        ([1.0, 2.0], "reward gives gave too many or too few: 2 for 1 samples"),
        ([float("inf")], "reward gives is not finite: inf"),
        ([-1e12], "reward is too large: -1e+12, beyond ±16777216"),
        (["1.0"], "reward gives is no number: str '1.0'"),
        ([{"length": 1}], "reward gives is no number: NoneType None"),
        ([np.float32(0.5)], 0.5),
        (np.array([0.25]), 0.25),
        ((True,), 1.0),
    ],
)
def test_only_a_finite_number_for_each_sample_is_a_score(what: Any, reason: str | float) -> None:
    assert values(reward("gives", options={"gives": {"what": what}}), PROMPT, "4") == [reason]


def test_a_tensor_of_one_number_is_a_number() -> None:
    torch = pytest.importorskip("torch")
    what = [torch.tensor(0.5)]
    assert values(reward("gives", options={"gives": {"what": what}}), PROMPT, "4") == [0.5]


def test_an_option_counts_before_a_column_of_its_name() -> None:
    prompt = Prompt(PROMPT.messages, columns={"what": "a column"})
    assert values(reward("gives", options={"gives": {"what": [0.5]}}), prompt, "4") == [0.5]


def test_an_object_that_is_called_is_a_function() -> None:
    assert values(reward("scorer"), PROMPT, "4") == [3.0]


def test_functions_of_one_name_are_told_apart_by_their_modules() -> None:
    assert names_of(["a.b:right", "a.c:right", "a.c:short"]) == ["a.b.right", "a.c.right", "short"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (RewardConfig(functions=("correct",)), "name its module"),
        (RewardConfig(functions=("no_such_module:correct",)), "PYTHONPATH"),
        (reward("trl_exakt"), "has no trl_exakt"),
        (reward("NO_FUNCTION"), "it is no function: int"),
        (reward("of_something_else"), r"prompts, completions, \*\*columns.*it takes \(text\)"),
        (reward("positional"), r"it takes \(completions\)"),
        (reward("generator"), "write a function that returns"),
        (reward("Scorer"), "write a function that returns"),
        (reward("needs_question"), "what prompts have: answer, completion_ids, completions, prompts; it needs difficu"),
        (reward("verl_async"), "it needs penalty; give it in reward.options.verl_async"),
        (reward("trl_exact", options={"trl_exakt": {}}), "did you mean trl_exact"),
        (reward("trl_lengths", options={"trl_lengths": {"a": 1}}), "it takes completion_ids, completions"),
        (reward("trl_exact", options={"trl_exact": {"prompts": 1}}), "that Rollcall does not pass"),
    ],
)
def test_a_function_that_could_not_be_called_is_refused_in_one_line(config: RewardConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        check_rewards(config, arithmetic(), "arithmetic")
    assert caught.value.key.startswith("reward.")
    assert "\n" not in str(caught.value)


def test_a_function_of_verl_needs_prompts_with_a_truth() -> None:
    with pytest.raises(ConfigError, match="a column ground_truth, reward_model or answer"):
        check_rewards(reward("verl_exact"), Unscored(None, 0), "unscored")


def test_a_task_without_a_reward_needs_functions() -> None:
    for config in (RewardConfig(), reward("task", "trl_async")):
        with pytest.raises(ConfigError, match="the task unscored has no reward"):
            check_rewards(config, Unscored(None, 0), "unscored")
    check_rewards(reward("trl_async"), Unscored(None, 0), "unscored")
