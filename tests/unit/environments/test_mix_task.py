"""Several tasks in one run: each call reaches the task of its prompt, and each mistake is one line with its key."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import TaskConfig
from pipeline.environments import Completion, Prompt, Task, check_task, load_task, user_prompt
from pipeline.environments.eval_set_checks import check_eval_tasks
from pipeline.environments.frozen_code import modules_named_in
from pipeline.environments.mix_task import MAX_ROUND, shares_of
from pipeline.environments.reward_functions import PartialScore, RewardFunction
from pipeline.errors import ConfigError
from slurm.submission.compose_config import compose_config
from tests.fakes.configs import make_config

SUMS = {"name": "arithmetic", "options": {"held_out": 4, "size": 10}}
WORDS = {"name": "chain_sum", "weight": 2, "options": {"held_out": 2, "size": 7}}


def a_mix(*tasks: Any) -> Task:
    return load_task(TaskConfig(name="mix", tasks=tasks or (SUMS, WORDS)), seed=3)


class Recorded(Task):
    """Remembers its calls; its prompts are numbers."""

    name = "recorded"
    calls: list[tuple[str, str]]

    def __init__(self, options: Any, seed: int) -> None:
        super().__init__(options, seed)
        self.calls = []

    def __len__(self) -> int:
        return 3

    def prompt(self, index: int) -> Prompt:
        return user_prompt(str(index))

    def held_out(self) -> list[Prompt]:
        return [user_prompt("held out")]

    def reward(self, prompt: Prompt, text: str) -> float:
        self.calls.append(("reward", text))
        return 7.0

    def use(self, prompt: Prompt, name: str, arguments: Any) -> str:
        return f"{name} of {arguments}"

    async def rollout(self, prompt: Prompt, policy: Any) -> Any:
        return f"episode of {prompt.messages[0]['content']}"

    def can_replay(self, prompt: Prompt) -> bool:
        return True

    async def aclose(self) -> None:
        self.calls.append(("aclose", ""))


class Emptied(Recorded):
    def __len__(self) -> int:
        return 0


class RunsCode(Recorded):
    @property
    def runs_code(self) -> bool:
        return True


RECORDED = {"name": f"{__name__}:Recorded", "label": "mine"}


def test_prompts_are_those_of_the_tasks_one_after_the_other_with_their_labels() -> None:
    mix, alone = (
        a_mix(),
        [load_task(TaskConfig(name=one["name"], options=one["options"]), 3) for one in (SUMS, WORDS)],
    )
    assert len(mix) == 17
    expected = [(task.name, task.prompt(index).messages) for task in alone for index in range(len(task))]
    assert [(mix.prompt(index).task, mix.prompt(index).messages) for index in range(17)] == expected
    assert [(part.label, part.share, part.size) for part in mix.parts] == [("arithmetic", 1, 10), ("chain_sum", 2, 7)]
    assert [prompt.task for prompt in mix.first_prompts()] == ["arithmetic", "chain_sum"]


def test_held_out_prompts_alternate_until_the_shorter_task_has_no_more() -> None:
    assert [prompt.task for prompt in a_mix().held_out()] == [
        *("arithmetic", "chain_sum", "arithmetic", "chain_sum"),
        *("arithmetic", "arithmetic"),
    ]


def test_each_call_reaches_the_task_that_made_the_prompt() -> None:
    mix = a_mix(SUMS, RECORDED)
    sums, mine = mix.prompt(2), mix.prompt(11)
    assert (sums.task, mine.task, mine.messages[0]["content"]) == ("arithmetic", "mine", "1")
    assert (mix.reward(sums, sums.answer), mix.reward(sums, "?"), mix.reward(mine, "?")) == (1.0, 0.0, 7.0)
    assert mix.use(mine, "tool", 5) == "tool of 5"
    assert asyncio.run(mix.rollout(mine, None)) == "episode of 1"  # type: ignore[arg-type]
    assert (mix.can_replay(sums), mix.can_replay(mine)) == (True, True)
    with pytest.raises(NotImplementedError, match="arithmetic has no tool"):
        mix.use(sums, "tool", 5)
    asyncio.run(mix.aclose())
    assert mix._tasks["mine"].calls == [("reward", "?"), ("aclose", "")]  # type: ignore[attr-defined]


def test_a_mix_runs_code_and_lacks_a_reward_if_one_of_its_tasks_does() -> None:
    assert not a_mix().runs_code
    assert a_mix(SUMS, {"name": f"{__name__}:RunsCode"}).runs_code
    assert a_mix().has_reward


def test_demonstrations_have_the_shares_of_the_tasks_and_repeat_none() -> None:
    mix = a_mix()
    shown = [mix.demonstration(index).prompt for index in range(30)]
    assert [prompt.task for prompt in shown[:3]] == ["arithmetic", "chain_sum", "chain_sum"]
    assert sum(prompt.task == "chain_sum" for prompt in shown) == 20
    alone = load_task(TaskConfig(name="chain_sum", options=WORDS["options"]), 3)
    words = [prompt.messages for prompt in shown if prompt.task == "chain_sum"]
    assert words == [alone.demonstration(index).prompt.messages for index in range(20)]
    with pytest.raises(NotImplementedError, match="recorded has no demonstrations"):
        a_mix(SUMS, RECORDED).demonstration(0)


@given(st.lists(st.floats(min_value=1e-3, max_value=1e3), min_size=1, max_size=6))
def test_shares_are_in_proportion_to_the_weights(weights: list[float]) -> None:
    shares = shares_of(weights)
    assert min(shares) >= 1
    assert sum(shares) <= MAX_ROUND + len(weights)
    for share, weight in zip(shares, weights, strict=True):
        expected = weight / sum(weights)
        assert abs(share / sum(shares) - expected) <= 2 * len(weights) / MAX_ROUND


def checked(*overrides: str) -> None:
    config = compose_config(["experiment=mix", *overrides])
    check_task(load_task(config.task, config.seed), config)
    check_eval_tasks(config)


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        checked(*overrides)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ("[]", "task.tasks=[]: expected at least one task; task.tasks=[{name: arithmetic"),
        ("[{name: arithmetic, weight: 0}]", "task.tasks.0.weight=0: expected greater than 0"),
        ("[{name: arithmetic, weight: -1}]", "task.tasks.0.weight=-1: expected greater than 0"),
        ("[{name: arithmetic, weight: nan}]", "task.tasks.0.weight=nan: expected a finite number"),
        ("[{name: arithmetic, weight: inf}]", "task.tasks.0.weight=inf: expected a finite number"),
        ("[{name: arithmetic, weight: much}]", "task.tasks.0.weight='much': expected a valid number"),
        ("[{name: arithmetic, wieght: 2}]", "did you mean task.tasks.<name>.weight?"),
        ("[arithmetic, arithmetic]", "task.tasks.1.label='arithmetic': expected a label that no other task of the mix"),
        ("[arithmetic, {name: chain_sum, label: arithmetic}]", "task.tasks.1.label='arithmetic': expected a label"),
        ("[{name: arithmetic, label: mean}]", "task.tasks.0.label='mean': expected another label"),
        ("[{name: arithmetic, label: a/b}]", "task.tasks.0.label='a/b': expected at most 63 letters"),
        ("[arithmetic, arithmetik]", "task.tasks.1.name='arithmetik': expected a built-in task"),
        ("[arithmetic, {name: nowhere:Task}]", "task.tasks.1.name='nowhere:Task': expected a built-in task"),
        ("[{name: mix}]", "task.tasks.0.name='mix': expected a task that is no mix"),
        ("[{weight: 2}]", "task.tasks.0.name=None: expected a value"),
        (
            "[{name: arithmetic, options: {term: 3}}]",
            "task.tasks.0.options.term=3: expected a known option; did you mean",
        ),
        ("[{name: arithmetic, options: {held_out: 1000000}}]", "task.tasks.0.options=: expected held_out at most half"),
        (f"[{{name: '{__name__}:Emptied'}}]", "expected a task with training prompts; its __len__ is 0"),
    ],
)
def test_a_mistake_in_a_mix_is_one_line_with_its_key(tasks: str, expected: str) -> None:
    found = refused(f"task.tasks={tasks}")
    head, _, rest = expected.partition("=:")
    assert found.startswith(head) and rest in found if rest else expected in found


def test_a_mix_and_other_keys_that_do_not_fit_are_refused() -> None:
    assert refused("task.options.terms=3").startswith("task.options.terms=3: expected nothing: a mix has no options")
    assert refused("task.name=arithmetic").startswith("task.tasks=['arithmetic', 'countdown']: expected nothing unless")
    expected = "task.tasks.1.label='countdown': expected another label: an evaluation set has this name"
    assert refused("evaluation.sets.countdown.samples=1").startswith(expected)


def test_the_keys_of_a_task_in_the_list_can_be_overridden_one_by_one() -> None:
    overrides = ["task.tasks.1.weight=3", "task.tasks.0.options.terms=3", "task.tasks.1.label=easy"]
    first, second = compose_config(["experiment=mix", *overrides]).task.tasks
    assert (first.title, first.weight, first.options["terms"]) == ("arithmetic", 1, 3)
    assert (second.title, second.weight, second.options["numbers"]) == ("easy", 3, 3)


def test_the_experiment_has_all_that_its_run_needs() -> None:
    checked()


def test_the_modules_of_tasks_in_a_mix_belong_to_the_code_of_the_run() -> None:
    task = {"name": "mix", "tasks": [SUMS, RECORDED]}
    assert modules_named_in(make_config(task=task)) == [__name__]


def test_the_data_source_of_a_reward_function_is_the_label_of_the_task() -> None:
    def compute(data_source: str, solution_str: str, ground_truth: str) -> float:
        return float(data_source == "chain_sum")

    takes = frozenset({"data_source", "solution_str", "ground_truth"})
    function = RewardFunction("compute", compute, "verl", takes, {}, "mix")
    mix = a_mix()
    scores = [function.score(mix.prompt(index), [Completion("4")])[0] for index in (0, 12)]
    assert [score.score for score in scores if isinstance(score, PartialScore)] == [0.0, 1.0]
