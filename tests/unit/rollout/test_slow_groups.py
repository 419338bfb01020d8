"""Groups that take longer than `max_lag` steps, in a small world of actor, servers and trainer on the real gate."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.rollout.issue_queue import IssueQueue
from pipeline.transport.staleness import StalenessGate


class World:
    """Groups overtake each other: each takes its own ticks. The trainer steps on whatever comes, once a tick."""

    def __init__(self, gate: StalenessGate, slow: dict[int, int], *, slots: int = 64, seed: int | None = None) -> None:
        """`slow`: the ticks of some positions; others take 1, or 1 to 3 when there is a `seed`."""
        self.gate, self.slow, self.slots = gate, slow, slots
        self.draw = Random(seed) if seed is not None else None
        self.issue = IssueQueue([], 0)
        self.now = self.version = self.server = 0
        self.flying: dict[int, tuple[int, int]] = {}
        self.published: list[tuple[int, int]] = []
        self.lags: dict[int, int] = {}
        self.refusals: Counter[int] = Counter()

    def tick(self) -> None:
        self.now += 1
        self.gate.advance(self.version, self.server)
        while len(self.flying) < self.slots and self.gate.room(self.issue.outstanding(len(self.lags))):
            self.start(self.issue.take())
        for position in [position for position, (end, _) in self.flying.items() if end <= self.now]:
            self.published.append((position, self.flying.pop(position)[1]))
            self.gate.arrived(position)
        self.train()
        if self.draw is None or self.draw.random() < 0.7:
            self.server = self.version

    def start(self, position: int) -> None:
        if self.refusals[position] > 1:
            self.gate.wait_for(position)
        usual = self.draw.randint(1, 3) if self.draw else 1
        self.flying[position] = self.now + self.slow.get(position, usual), self.server

    def train(self) -> None:
        stale = [(position, made) for position, made in self.published if self.version - made > self.gate.max_lag]
        self.published = [entry for entry in self.published if entry not in stale]
        for position, _ in stale:
            self.refusals[position] += 1
            self.issue.again(position)
        if len(self.published) >= self.gate.prompts_per_step:
            batch = self.published[: self.gate.prompts_per_step]
            self.published = self.published[self.gate.prompts_per_step :]
            self.lags |= {position: self.version - made for position, made in batch}
            self.version += 1

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            self.tick()


@given(
    prompts=st.integers(1, 5),
    max_lag=st.integers(0, 3),
    slow=st.dictionaries(st.integers(0, 30), st.integers(5, 60), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_a_group_is_trained_after_at_most_two_refusals_however_slow_it_is(
    prompts: int, max_lag: int, slow: dict[int, int], seed: int
) -> None:
    world = World(StalenessGate(prompts, max_lag), slow, seed=seed)
    world.run(500 + 3 * sum(slow.values()))
    assert slow.keys() <= world.lags.keys(), "a slow group was not trained"
    assert max(world.refusals.values(), default=0) <= 2
    assert max(world.lags.values()) <= max_lag


class ForgetfulGate(StalenessGate):
    """The gate as it was: it lets refused groups be overtaken again."""

    def wait_for(self, position: int) -> None:
        pass


@pytest.mark.parametrize(("gate", "trained"), [(StalenessGate, True), (ForgetfulGate, False)])
def test_without_waiting_for_it_a_slow_group_would_be_refused_for_ever(
    gate: type[StalenessGate], trained: bool
) -> None:
    world = World(gate(4, 1), slow={3: 10})
    world.run(400)
    assert (3 in world.lags) == trained
    assert (world.refusals[3] > 10) != trained


def test_once_a_slow_group_came_the_others_are_as_fast_as_before() -> None:
    world, undisturbed = World(StalenessGate(4, 1), slow={3: 10}), World(StalenessGate(4, 1), slow={})
    world.run(100)
    undisturbed.run(100)
    assert world.refusals == {3: 2}
    before = world.version, undisturbed.version
    world.run(40)
    undisturbed.run(40)
    assert world.version - before[0] == undisturbed.version - before[1]


def test_a_group_that_was_refused_once_is_overtaken_and_holds_up_nobody() -> None:
    world, forgetful = World(StalenessGate(4, 1), slow={3: 10}), World(ForgetfulGate(4, 1), slow={3: 10})
    world.run(19)
    forgetful.run(19)
    assert (3 in world.flying, world.refusals[3]) == (True, 1)
    assert world.version == forgetful.version > world.gate.max_lag
