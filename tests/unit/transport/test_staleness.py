"""The staleness gate: lag stays bounded and nothing stands still, in any run of a small world."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pipeline.transport.sample_records import Branch, Group, Sample
from pipeline.transport.staleness import Stale, StalenessGate, is_fresh, is_refused, lag


def gate_at(version: int, slowest: int | None, *, prompts: int = 32, max_lag: int = 1) -> StalenessGate:
    gate = StalenessGate(prompts, max_lag)
    gate.advance(version, slowest)
    return gate


def test_the_worked_example_of_the_docstring_holds() -> None:
    assert gate_at(5, 5).room(outstanding=40) == 24
    assert gate_at(6, 5).room(outstanding=32) == 0
    assert gate_at(6, 6).room(outstanding=32) == 32


def test_the_worked_example_of_a_group_that_is_awaited_holds() -> None:
    gate = gate_at(5, 5)
    gate.wait_for(7)
    assert gate.room(outstanding=41) == 23
    gate.advance(6, 6)
    assert gate.room(outstanding=32) == 0
    gate.arrived(7)
    assert gate.room(outstanding=32) == 32


def test_without_a_server_nothing_is_issued() -> None:
    assert StalenessGate(32, 1).room(0) == 0
    assert gate_at(5, None).room(0) == 0


def test_on_policy_training_issues_one_batch_and_waits() -> None:
    assert gate_at(3, 3, max_lag=0).room(0) == 32
    assert gate_at(3, 3, max_lag=0).room(32) == 0
    assert gate_at(3, 2, max_lag=0).room(0) == 0


def test_a_server_ahead_of_a_restarted_trainer_gives_no_more_room() -> None:
    assert gate_at(3, 5).limit == gate_at(3, 3).limit


@pytest.mark.parametrize(("versions", "expected"), [((4, 6), 3), ((7,), 0), ((9,), -2), ((), 0)])
def test_the_lag_of_a_group_is_that_of_its_oldest_sample(versions: tuple[int, ...], expected: int) -> None:
    samples = tuple(
        Sample(tokens=b"", sampled=b"", logprobs=b"", reward=0, version_min=v, version_max=v + 1, finish="stop")
        for v in versions
    )
    assert lag(7, Group(position=0, prompt=0, samples=samples)) == expected


def a_sample(*versions: int) -> Sample:
    """A prompt of one token, and tokens that these weights sampled, of which the last makes a branch."""
    oldest = min(versions)
    newer = [0, *(version - oldest for version in versions)]

    def packed(places: slice) -> dict[str, Any]:
        sampled = [0, *(1 for _ in versions)][places]
        tokens, logprobs = (np.zeros(len(sampled), kind).tobytes() for kind in ("<i4", "<f4"))
        return {
            "tokens": tokens,
            "sampled": bytes(sampled),
            "logprobs": logprobs,
            "version_offsets": bytes(newer[places]),
        }

    branch = Branch(of=0, shared=2, **packed(slice(-1, None)))
    sample = Sample(
        **packed(slice(-1)),
        reward=0,
        version_min=oldest,
        version_max=max(versions),
        finish="stop",
        branches=(branch,),
    )
    sample.check()
    return sample


def test_the_tokens_of_weights_that_are_not_too_old_are_young() -> None:
    own, branch = a_sample(3, 4, 5, 5).rows()
    assert own.versions.tolist() == [3, 3, 4, 5]
    assert [is_fresh(own, oldest).tolist() for oldest in (3, 4, 6)] == [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]]
    assert (branch.sampled.tolist(), is_fresh(branch, 4).tolist()) == ([0, 0, 1], [0, 0, 1]), (
        "what it shares counts once"
    )


@pytest.mark.parametrize(
    ("version", "stale", "refused"),
    [(4, "refuse", False), (5, "refuse", True), (5, "mask", False), (6, "mask", False), (7, "mask", True)],
)
def test_with_a_mask_a_group_is_refused_when_no_token_of_it_is_young(version: int, stale: Stale, refused: bool) -> None:
    group = Group(position=0, prompt=0, samples=(a_sample(3, 3), a_sample(3, 4, 5)))
    assert is_refused(version, group, max_lag=1, stale=stale) is refused


def test_with_a_mask_young_tokens_of_a_sample_that_was_cut_off_may_not_count() -> None:
    cut_off = structs.replace(a_sample(3, 4, 5), finish="length")
    group = Group(position=0, prompt=0, samples=(a_sample(3, 3), cut_off))
    assert [is_refused(6, group, 1, "mask", masked) for masked in (None, "length")] == [False, True]


def test_without_the_version_of_each_token_the_oldest_of_its_sample_counts() -> None:
    sample = a_sample(3, 5)
    silent = structs.replace(
        sample,
        version_offsets=b"",
        branches=tuple(structs.replace(one, version_offsets=b"") for one in sample.branches),
    )
    refused = [is_refused(6, Group(position=0, prompt=0, samples=(each,)), 1, "mask") for each in (sample, silent)]
    assert refused == [False, True]


class World:
    """A trainer, servers and an actor in miniature: groups are trained in the order of issue."""

    def __init__(self, prompts: int, servers: int, gate: StalenessGate) -> None:
        self.prompts, self.gate = prompts, gate
        self.version, self.settled = 0, 0
        self.servers = [0] * servers
        self.queue: list[int] = []
        self.lags: list[int] = []

    def issue(self, server: int, count: int) -> None:
        self.gate.advance(self.version, min(self.servers))
        for _ in range(min(count, self.gate.room(len(self.queue)))):
            self.queue.append(self.servers[server % len(self.servers)])

    def update(self, server: int) -> None:
        self.servers[server % len(self.servers)] = self.version

    def train(self) -> None:
        """One step, when a batch is there; the servers hear of it later, one by one."""
        if len(self.queue) >= self.prompts:
            batch, self.queue = self.queue[: self.prompts], self.queue[self.prompts :]
            self.lags += [self.version - sampled for sampled in batch]
            self.version += 1

    def settle_without_training(self) -> None:
        if self.queue:
            self.queue.pop(0)


Script = list[tuple[str, int, int]]

scripts = st.lists(
    st.one_of(
        st.tuples(st.just("issue"), st.integers(0, 3), st.integers(1, 12)),
        st.tuples(st.just("update"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("train"), st.just(0), st.just(0)),
        st.tuples(st.just("filter"), st.just(0), st.just(0)),
    ),
    max_size=120,
)


def play(world: World, script: Script) -> None:
    for what, server, count in script:
        match what:
            case "issue":
                world.issue(server, count)
            case "update":
                world.update(server)
            case "train":
                world.train()
            case "filter":
                world.settle_without_training()


@given(st.integers(1, 4), st.integers(0, 3), st.integers(1, 4), scripts)
def test_groups_trained_in_order_never_exceed_max_lag(prompts: int, max_lag: int, servers: int, script: Script) -> None:
    world = World(prompts, servers, StalenessGate(prompts, max_lag))
    play(world, script)
    assert max(world.lags, default=0) <= max_lag


@given(st.integers(1, 4), st.integers(0, 3), st.integers(1, 4), scripts)
def test_training_goes_on_from_every_state_that_can_be_reached(
    prompts: int, max_lag: int, servers: int, script: Script
) -> None:
    world = World(prompts, servers, StalenessGate(prompts, max_lag))
    play(world, script)
    before = world.version
    for server in range(servers):
        world.update(server)
    world.issue(0, count=10 * prompts)
    world.train()
    assert world.version == before + 1


class LaxGate(StalenessGate):
    """The gate as it would be if it forgot that servers are updated after the trainer."""

    @property
    def limit(self) -> int:
        return self.prompts_per_step * (self.max_lag + 1)


def test_the_bound_would_fail_if_the_gate_forgot_the_servers() -> None:
    world = World(prompts=1, servers=1, gate=LaxGate(1, 0))
    play(world, [("issue", 0, 1), ("train", 0, 0), ("issue", 0, 1), ("train", 0, 0)])
    assert max(world.lags) > 0
