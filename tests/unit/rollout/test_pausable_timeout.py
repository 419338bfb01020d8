"""Whose time it is: a sample may fail for what its task does, never because servers are slow or gone."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from pipeline.config import EvalSetConfig
from pipeline.environments import Episode, Policy, Prompt, Task
from pipeline.errors import DeadlineError
from pipeline.rollout.eval_rollouts import Evaluation
from pipeline.rollout.pausable_timeout import CLEAN_UP_SECONDS, PausableTimeout
from pipeline.transport.eval_records import EvalRequest, EvalResult
from pipeline.transport.sample_records import Group
from tests.fakes.inline_calls import InlineCalls
from tests.fakes.jumping_loop import pass_time, run_jumping
from tests.fakes.scripted_server import Script, client_and, works
from tests.unit.environments.test_tasks import Said
from tests.unit.rollout.test_group_rollout import CHAT, Answering, a_builder, a_task
from tests.unit.rollout.test_group_rollout import config as a_config

HOUR = 3600.0


class Slow(Answering):
    """Servers that take an hour for an answer."""

    async def generate(self, token_ids: Any, **sampling: Any) -> list[Said]:
        await pass_time(HOUR)
        return await super().generate(token_ids, **sampling)


async def with_a_tool(self: Task, prompt: Prompt, policy: Policy) -> Episode:
    """The task's own time: 40 s before its turn, and 40 s after it."""
    await pass_time(40)
    turn = await policy.sample(policy.prompt)
    await pass_time(40)
    return Episode.begin(policy.prompt).append_turn(turn, policy.decode(turn.tokens))


def build(seconds: float, **methods: Any) -> Group:
    return run_jumping(a_builder(a_task(**methods), Slow(), episode_seconds=seconds, group_size=2).build(0))


def test_servers_that_take_longer_than_an_episode_may_cost_no_sample() -> None:
    assert len(build(1).samples) == 2


def test_while_no_server_may_be_asked_no_sample_fails() -> None:
    async def story() -> Group:
        async with client_and(script := Script([works])) as client:
            client.update(script.endpoint, None)
            building = asyncio.create_task(a_builder(a_task(), client, episode_seconds=1).build(0))
            await pass_time(250)
            await pass_time(250)  # less than the client's `server_seconds`, and far more than an episode may take
            assert not building.done()
            client.update(script.endpoint, 5)
            return await building

    group = run_jumping(story())
    assert (len(group.samples), group.failures) == (4, ())


@pytest.mark.parametrize(("seconds", "samples"), [(300, 2), (60, 0), (0, 2)])
def test_the_task_has_its_seconds_in_all_for_itself_and_no_bound_with_0(seconds: float, samples: int) -> None:
    """Both rollouts jump: what one does in its 80 s passes for the other too."""
    group = build(seconds, rollout=with_a_tool)
    assert len(group.samples) == samples
    assert all(failure.startswith("rollout took too long") for failure in group.failures)


def limited(work: Awaitable[Any], own_time: PausableTimeout) -> Any:
    return run_jumping(own_time.limit(work))  # type: ignore[arg-type]


def test_of_two_requests_at_once_the_longer_one_counts() -> None:
    own_time = PausableTimeout(10)

    async def asked(seconds: float, order: asyncio.Event | None, then: asyncio.Event | None) -> None:
        with own_time.pause():
            if order is not None:
                await order.wait()
            await pass_time(seconds)
        if then is not None:
            then.set()

    async def both() -> str:
        first = asyncio.Event()
        await asyncio.gather(asked(HOUR, None, first), asked(HOUR, first, None))
        await pass_time(9)
        return "in time"

    assert limited(both(), own_time) == "in time"


def test_what_is_left_after_a_request_is_what_was_left_before_it() -> None:
    own_time = PausableTimeout(10)

    async def work() -> None:
        await pass_time(6)
        with own_time.pause():
            await pass_time(HOUR)
        await pass_time(6)

    with pytest.raises(DeadlineError, match=r"10\.0 s"):
        limited(work(), own_time)


def test_a_request_that_the_task_left_behind_ends_in_peace() -> None:
    own_time = PausableTimeout(10)

    async def left_behind() -> None:
        with own_time.pause():
            await asyncio.sleep(0)

    async def story() -> None:
        async def work() -> asyncio.Task[None]:
            left = asyncio.create_task(left_behind())
            await asyncio.sleep(0)
            return left

        await (await own_time.limit(work()))

    run_jumping(story())


def test_the_tasks_own_timeout_is_its_own() -> None:
    async def work() -> None:
        raise TimeoutError("the tool")

    with pytest.raises(TimeoutError, match="the tool"):
        limited(work(), PausableTimeout(10))


async def hangs_in_its_clean_up(self: Task, prompt: Prompt, policy: Policy) -> Episode:
    try:
        await asyncio.sleep(HOUR)
    finally:
        await asyncio.sleep(HOUR)
    raise AssertionError


def test_an_episode_whose_clean_up_hangs_is_left_and_the_reason_names_the_clean_up() -> None:
    async def story() -> Group:
        builder = a_builder(a_task(rollout=hangs_in_its_clean_up), Answering(), episode_seconds=1, group_size=2)
        building = asyncio.create_task(builder.build(0))
        await pass_time(1)
        assert not building.done()
        await pass_time(CLEAN_UP_SECONDS)
        assert building.done()
        return await building

    expected = "waited 1.0 s for an episode of the task; missing: the end of its clean-up within 5 s"
    assert run_jumping(story()).failures == (f"rollout took too long DeadlineError: {expected}",) * 2


@pytest.mark.parametrize("name", ["", "hard"])
def test_a_clean_up_that_hangs_does_not_hold_an_evaluation(name: str) -> None:
    """By the time of an episode, and by the deadline of a set."""

    async def story() -> EvalResult:
        keys: dict[str, Any] = {"sets": {"hard": EvalSetConfig(seconds=1)}}
        config = a_config(episode_seconds=0 if name else 1)
        config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update=keys)})
        task = a_task(rollout=hangs_in_its_clean_up)
        evaluation = Evaluation(task, InlineCalls(task), CHAT, Answering(), config)
        evaluating = asyncio.create_task(evaluation.run(EvalRequest(id="e", policy_version=5, set=name)))
        await pass_time(1)
        await pass_time(CLEAN_UP_SECONDS)
        assert evaluating.done()
        return await evaluating

    result = run_jumping(story())
    assert (result.failed, result.timed_out, result.accuracy) == (2, 2 if name else 0, None)


def test_an_episode_that_the_caller_cancels_may_clean_up_for_seconds_and_no_longer() -> None:
    cleaned: list[str] = []

    async def work(seconds: float) -> None:
        try:
            await asyncio.sleep(HOUR)
        finally:
            await asyncio.sleep(seconds)
            cleaned.append(f"after {seconds:g} s")

    async def story() -> None:
        callers = [asyncio.create_task(PausableTimeout(0).limit(work(seconds))) for seconds in (4.0, 6.0)]
        await pass_time(1)
        for caller in callers:
            caller.cancel()
        await pass_time(4)
        assert [caller.done() for caller in callers] == [True, False]
        await pass_time(1)
        assert all(caller.cancelled() for caller in callers)
        await pass_time(1)

    run_jumping(story())
    assert cleaned == ["after 4 s", "after 6 s"]


def test_what_a_clean_up_raises_is_the_episodes_error() -> None:
    async def work() -> None:
        try:
            await pass_time(11)
        finally:
            raise ConnectionError("the environment is gone")

    with pytest.raises(ConnectionError, match="the environment is gone"):
        limited(work(), PausableTimeout(10))
