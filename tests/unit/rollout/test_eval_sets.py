"""Evaluation sets: sampling, pass@k, deadlines, and a task of their own."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import psutil
import pytest
from msgspec.structs import replace as replace_struct

from pipeline.config import RunConfig
from pipeline.environments import Task
from pipeline.environments.eval_set_checks import check_eval_tasks
from pipeline.environments.task_protocol import TaskPart
from pipeline.errors import ConfigError, TaskError
from pipeline.rollout.eval_rollouts import TIMED_OUT, Evaluation
from pipeline.train.loop.evaluations import metrics_of
from pipeline.transport.eval_records import ASKED, EVALUATED, EvalRequest, EvalResult
from tests.fakes.configs import make_config
from tests.fakes.inline_calls import InlineCalls
from tests.fakes.scripted_server import Script, client_and, with_status
from tests.unit.rollout.test_group_rollout import CHAT, FOUR, TINY, Said, Sums

FIVE = tuple(CHAT.encode("5$"))


class Scripted:
    """Servers that answer the n samples of a prompt by a list of turns; `pause` seconds each."""

    def __init__(self, *turns: tuple[int, ...], pause: float = 0.0) -> None:
        self.turns, self.pause = turns, pause
        self.asked: list[dict[str, Any]] = []

    async def generate(self, token_ids: Sequence[int], *, n: int, **sampling: Any) -> list[Said]:
        self.asked.append({"n": n, **sampling})
        await asyncio.sleep(self.pause)
        return [Said(turn, 5, 5) for turn in self.turns[:n]]


def config(**sets: dict[str, Any]) -> RunConfig:
    model = {"path": str(TINY), "max_length": 32}
    return make_config(model=model, rollout={"group_size": 4, "max_tokens": 8}, evaluation={"sets": sets})


def evaluate(
    servers: Scripted, task: Task | None = None, own: Any = None, max_failed: float = 0.25, **wanted: Any
) -> EvalResult:
    """Of a set that asks the run's `task`, or one of its `own`."""
    task = task or Sums(None, 0)
    chosen = config(hard={"task": own, **wanted})
    bounded = chosen.evaluation.model_copy(update={"max_failed_fraction": max_failed})
    chosen = chosen.model_copy(update={"evaluation": bounded})
    evaluation = Evaluation(task, InlineCalls(task), CHAT, servers, chosen)
    return asyncio.run(evaluation.run(EvalRequest(id="e", policy_version=5, set="hard")))


def test_a_set_is_sampled_as_it_says() -> None:
    servers = Scripted(*[FOUR] * 4)
    evaluate(servers, samples=4, temperature=0.7, top_p=0.9, top_k=3, max_tokens=5)
    (first, _) = servers.asked
    sampling = {name: first[name] for name in ("n", "temperature", "top_p", "top_k", "max_tokens")}
    assert sampling == {"n": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 3, "max_tokens": 5}


def test_only_so_many_prompts_are_asked() -> None:
    servers = Scripted(FOUR)
    assert (evaluate(servers, prompts=1).prompts, len(servers.asked)) == (1, 1)


def test_the_accuracy_is_the_mean_over_prompts_and_pass_at_k_is_what_subsets_of_the_samples_say() -> None:
    result = evaluate(Scripted(FOUR, FIVE, FIVE, FIVE, FIVE), samples=5, temperature=1.0, pass_at=[1, 2, 5])
    # 2+2 has one of five right; 2+3 has four of five.
    right = {"2+2": [True, False, False, False, False], "2+3": [False, True, True, True, True]}

    def by_hand(k: int) -> float:
        shares = [[any(chosen) for chosen in combinations(each, k)] for each in right.values()]
        return sum(sum(share) / len(share) for share in shares) / 2

    assert result.accuracy == pytest.approx((1 / 5 + 4 / 5) / 2)
    assert result.error == pytest.approx(0.3)
    assert result.pass_at == pytest.approx({k: by_hand(k) for k in (1, 2, 5)})


def test_a_correct_answer_is_one_of_enough_reward() -> None:
    class Halves(Sums):
        def reward(self, prompt: Any, text: str) -> float:
            return 0.5

    assert evaluate(Scripted(FOUR), Halves(None, 0), pass_at=[1]).pass_at == {1: 0.0}
    assert evaluate(Scripted(FOUR), Halves(None, 0), pass_at=[1], correct=0.5).pass_at == {1: 1.0}


def test_an_evaluation_of_failed_samples_has_no_accuracy_but_one_error(caplog: pytest.LogCaptureFixture) -> None:
    result = evaluate(Scripted(FOUR, pause=60), seconds=0.2, pass_at=[1])
    assert (result.prompts, result.failed, result.timed_out, result.accuracy) == (2, 2, 2, None)
    assert (result.error, result.pass_at, result.metrics) == (None, {}, {})
    assert (result.version_min, result.version_max) == (-1, -1)
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    expected = f"2 of 2 samples failed; the first: {TIMED_OUT}; it has no accuracy"
    assert expected in error.message
    assert "evaluation.max_failed_fraction=0.25" in error.message
    numbers = metrics_of(result)
    assert (numbers["eval/hard/failed"], numbers["eval/hard/prompts"]) == (2, 2)
    assert numbers.keys().isdisjoint({"eval/hard/accuracy", "eval/hard/stderr"})


class FailsAt(Sums):
    """Rewards 1 for the prompt 2+2 and 0 for 2+3, but the judge is down for the calls `down`, counted from 0."""

    def __init__(self, *down: int) -> None:
        super().__init__(None, 0)
        self.down, self.calls = down, 0

    def reward(self, prompt: Any, text: str) -> float:
        self.calls += 1
        if self.calls - 1 in self.down:
            raise ConnectionError("the judge is down")
        return super().reward(prompt, text)


@pytest.mark.parametrize("down", [(), (0,), (1, 5), (4, 6), (0, 1, 2)])
def test_failed_samples_change_the_number_of_samples_and_not_their_mean(
    down: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    task = FailsAt(*down)
    result = evaluate(Scripted(*[FOUR] * 4), task, samples=4, temperature=1.0, pass_at=[1], max_failed=0.5)
    assert (result.failed, result.accuracy, result.pass_at) == (len(down), 0.5, {1: 0.5})
    assert result.error == pytest.approx(0.5)
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [f"{len(down)} of 8 samples failed" in line for line in warned] == [True] * bool(down)


def test_a_prompt_without_a_sample_is_left_out_and_pass_at_k_needs_k_samples() -> None:
    result = evaluate(
        Scripted(FOUR, FIVE, FIVE, FIVE),
        FailsAt(0, 4, 5, 6, 7),
        samples=4,
        temperature=1.0,
        pass_at=[3, 4],
        max_failed=0.7,
    )
    # 2+2 keeps three wrong samples of four, 2+3 none.
    assert (result.failed, result.accuracy, result.error, result.pass_at) == (5, 0.0, None, {3: 0.0})


class TwoSums(Sums):
    """A mix of 2+2 and 2+3, whose judge is down for 2+3 if `down`."""

    def __init__(self, down: bool = False) -> None:
        super().__init__(None, 0)
        self.down = down

    @property
    def parts(self) -> tuple[TaskPart, ...]:
        return (TaskPart("four", 1, 4), TaskPart("five", 1, 4))

    def held_out(self) -> list[Any]:
        return [replace(one, task="four" if one.answer == "4" else "five") for one in super().held_out()]

    def reward(self, prompt: Any, text: str) -> float:
        if self.down and prompt.task == "five":
            raise ConnectionError("the judge is down")
        return super().reward(prompt, text)


def test_each_task_of_a_mix_has_its_own_result_in_the_evaluation() -> None:
    result = evaluate(Scripted(FOUR), TwoSums())
    numbers = metrics_of(result)
    assert numbers["eval/hard/accuracy"] == 0.5
    assert (numbers["eval/hard/four/accuracy"], numbers["eval/hard/five/accuracy"]) == (1, 0)
    assert (numbers["eval/hard/four/prompts"], numbers["eval/hard/four/failed"]) == (1, 0)
    own = replace_struct(result, set="")
    assert metrics_of(own)["eval/four/accuracy"] == 1


def test_a_judge_of_one_task_that_is_down_leaves_the_results_of_the_others() -> None:
    result = evaluate(Scripted(FOUR), TwoSums(down=True))
    assert (result.accuracy, result.parts["four"].accuracy, result.parts["five"].accuracy) == (None, 1, None)
    assert (result.parts["five"].failed, result.parts["four"].failed) == (1, 0)


def test_the_largest_fraction_of_failed_samples_is_a_key() -> None:
    four = Scripted(*[FOUR] * 4)
    accuracies = [
        evaluate(four, FailsAt(0, 1), samples=4, temperature=1.0, max_failed=bound).accuracy
        for bound in (0.0, 0.24, 0.25)
    ]
    assert accuracies == [None, None, 0.5]


def test_what_was_done_before_the_deadline_counts() -> None:
    class SlowForFive(Sums):
        async def rollout(self, prompt: Any, policy: Any) -> Any:
            await asyncio.sleep(60 if prompt.answer == "5" else 0)
            return await super().rollout(prompt, policy)

    result = evaluate(Scripted(FOUR), SlowForFive(None, 0), seconds=0.5, max_failed=0.5)
    assert (result.failed, result.timed_out, result.accuracy) == (1, 1, 1.0)


def test_a_timeout_of_the_task_is_its_samples_failure_and_not_the_deadline() -> None:
    class Impatient(Sums):
        async def rollout(self, prompt: Any, policy: Any) -> Any:
            raise TimeoutError("its own")

    result = evaluate(Scripted(FOUR), Impatient(None, 0))
    assert (result.failed, result.timed_out) == (2, 0)


def test_a_set_with_a_task_of_its_own_is_made_in_processes_that_end_with_the_evaluation() -> None:
    before = set(psutil.Process().children(recursive=True))  # of other tests in the same process
    result = evaluate(Scripted(FOUR), own={"name": "arithmetic", "options": {"held_out": 3}}, prompts=2)
    assert (result.prompts, result.failed) == (2, 0)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_task_whose_processes_cannot_be_started_costs_its_samples_and_not_the_actor() -> None:
    Unloadable.loads = True  # in this process
    result = evaluate(Scripted(FOUR), own={"name": f"{__name__}:Unloadable"})
    assert (result.prompts, result.failed, result.timed_out, result.accuracy) == (2, 2, 0, None)


def test_an_evaluation_whose_processes_end_leaves_no_rollout_behind() -> None:
    class Ended(InlineCalls):
        async def rewards(self, prompt: Any, answers: Sequence[Any]) -> list[Any]:
            raise TaskError("no process is left")

    class OneIsFast(Scripted):
        async def generate(self, token_ids: Sequence[int], *, n: int, **sampling: Any) -> list[Said]:
            self.pause = 60.0 if self.asked else 0.0
            return await super().generate(token_ids, n=n, **sampling)

    async def left() -> tuple[EvalResult, int]:
        task = Sums(None, 0)
        evaluation = Evaluation(task, Ended(task), CHAT, OneIsFast(FOUR), config(hard={"task": None}))
        result = await evaluation.run(EvalRequest(id="e", policy_version=5, set="hard"))
        return result, len(asyncio.all_tasks()) - 1

    result, tasks = asyncio.run(left())
    assert (result.failed, tasks) == (2, 0)


class Unloadable(Sums):
    """Loads only where somebody said so before."""

    loads = False

    def __init__(self, options: Any, seed: int) -> None:
        if not self.loads:
            raise ValueError("not here")
        super().__init__(options, seed)


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"task": {"name": "nothing"}}, "evaluation.sets.hard.task.name='nothing': expected a built-in task"),
        ({"task": {"name": "arithmetic", "options": {"held": 3}}}, "evaluation.sets.hard.task.options.held=3"),
        (
            {"task": {"name": "arithmetic"}, "reward": {"functions": ["nowhere:f"]}},
            "evaluation.sets.hard.reward.functions='nowhere:f'",
        ),
    ],
)
def test_what_is_wrong_with_a_sets_task_is_told_with_its_key_before_anything_starts(
    wanted: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        check_eval_tasks(config(hard=wanted))
    assert told in str(raised.value)


def test_how_far_an_evaluation_is_can_be_reported_while_it_goes_on() -> None:
    seen: list[tuple[str, dict[str, float]]] = []

    class Looking(Sums):
        async def rollout(self, prompt: Any, policy: Any) -> Any:
            if prompt.answer == "5":
                await asyncio.sleep(0.1)  # after the other one
            seen.append((evaluation.detail, evaluation.numbers()))
            return await super().rollout(prompt, policy)

    task = Looking(None, 0)
    evaluation = Evaluation(task, InlineCalls(task), CHAT, Scripted(FOUR), config(hard={}))
    asyncio.run(evaluation.run(EvalRequest(id="e", policy_version=0, set="hard")))
    assert seen == [
        ("evaluating hard: 0 of 2 prompts", {EVALUATED: 0.0, ASKED: 2.0}),
        ("evaluating hard: 1 of 2 prompts", {EVALUATED: 1.0, ASKED: 2.0}),
    ]
    assert (evaluation.detail, evaluation.numbers()) == ("", {})


def test_a_live_server_that_always_answers_with_an_error_ends_the_evaluation_without_an_accuracy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The built-in set has no deadline."""

    async def story() -> EvalResult:
        async with client_and(Script([with_status(500, "nan")]), server_seconds=0.3, fixed=True) as client:
            task = Sums(None, 0)
            evaluation = Evaluation(task, InlineCalls(task), CHAT, client, config())
            return await asyncio.wait_for(evaluation.run(EvalRequest(id="e", policy_version=5, set="")), 20)

    result = asyncio.run(story())
    assert (result.failed, result.timed_out, result.accuracy) == (2, 0, None)
    assert "request refused RolloutError: live servers answered with errors for 0.3 s" in caplog.text
