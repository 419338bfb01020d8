"""Whose time it is: a sample may fail for what its task does, never because servers are slow or gone."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from pipeline.environments import Episode, Policy, Prompt, Task
from pipeline.errors import DeadlineError
from pipeline.rollout.pausable_timeout import PausableTimeout
from pipeline.transport.sample_records import Group
from tests.fakes.jumping_loop import pass_time, run_jumping
from tests.fakes.scripted_server import Script, client_and, works
from tests.unit.environments.test_tasks import Said
from tests.unit.rollout.test_group_rollout import Answering, a_builder, a_task

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
