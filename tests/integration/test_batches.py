"""How the trainer cuts batches: once each, none too old, nothing given up before its commit."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.board import Board
from pipeline.config import RunConfig
from pipeline.errors import DeadlineError
from pipeline.ledger import Ledger
from pipeline.paths import AttemptPaths
from pipeline.records import Group, PreparedGroup, Reissue, Sample
from pipeline.streams import Streams
from pipeline.streams.files import FileStreams
from pipeline.training.batches import GroupBatches, Interrupted
from slurm.compose import compose_config

TOPIC = "prepared"


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[Streams]:
    with FileStreams(AttemptPaths(tmp_path, "r", "a-0"), 1 << 20) as opened:
        yield opened


def config_of(**training: float) -> RunConfig:
    overrides = {"prompts_per_step": 2, "max_lag": 1, **training}
    return compose_config(["experiment=demo", *(f"training.{key}={value}" for key, value in overrides.items())])


def batches_of(
    streams: Streams, ledger: Ledger | None = None, pulse: Callable[[], None] = lambda: None, **training: float
) -> GroupBatches:
    return GroupBatches(streams, Board(streams), ledger or Ledger(), config_of(**training), pulse)


def prepared(position: int, version: int = 0, outcome: str = "train") -> PreparedGroup:
    sample = Sample(
        tokens=np.array([1, 2], "<i4").tobytes(),
        sampled=bytes([0, 1]),
        logprobs=np.zeros(2, "<f4").tobytes(),
        reward=1.0,
        version_min=version,
        version_max=version,
        finish="stop",
    )
    return PreparedGroup(
        group=Group(position=position, prompt=position, samples=(sample,)), advantages=(0.0,), outcome=outcome
    )


def positions(groups: list[PreparedGroup]) -> list[int]:
    return [each.group.position for each in groups]


def left(streams: Streams) -> list[int]:
    return [entry.record.group.position for entry in streams.scan(TOPIC, PreparedGroup)]


def test_a_batch_has_exactly_its_groups_in_the_order_they_came(streams: Streams) -> None:
    streams.publish_many(TOPIC, [prepared(position) for position in (4, 0, 7)])
    batches = batches_of(streams)
    assert positions(batches.next(version=0)) == [4, 0]
    batches.trained(0)
    assert not batches.ledger.is_settled(7)


def test_a_position_is_trained_once_however_often_it_comes(streams: Streams) -> None:
    streams.publish_many(TOPIC, [prepared(position) for position in (0, 0, 1, 1, 0, 2, 3)])
    batches = batches_of(streams)
    assert positions(batches.next(0)) == [0, 1]
    batches.trained(0)
    assert positions(batches.next(1)) == [2, 3]
    assert batches.counts["duplicate"] == 2


def test_a_group_older_than_max_lag_is_asked_for_again_and_not_trained(streams: Streams) -> None:
    streams.publish_many(TOPIC, [prepared(0, version=3), prepared(1, version=4), prepared(2, version=5)])
    batches = batches_of(streams)
    assert positions(batches.next(version=5)) == [1, 2]
    assert batches.counts["stale"] == 1
    assert [entry.record.position for entry in streams.scan("reissue", Reissue)] == [0]
    assert not batches.ledger.is_settled(0)


def test_a_group_that_cannot_be_trained_is_settled_with_its_reason(streams: Streams) -> None:
    streams.publish_many(TOPIC, [prepared(0, outcome="failed: no reward"), prepared(1), prepared(2)])
    batches = batches_of(streams)
    assert positions(batches.next(0)) == [1, 2]
    batches.trained(0)
    assert batches.ledger.outcomes == {"failed: no reward": 1, "trained": 2}


def test_nothing_is_given_up_before_the_commit(streams: Streams) -> None:
    streams.publish_many(TOPIC, [prepared(position) for position in range(4)])
    batches = batches_of(streams)
    batches.next(0)
    batches.trained(0)
    assert left(streams) == [0, 1, 2, 3]
    batches.acknowledge(batches.covered)
    assert left(streams) == [2, 3]


def test_only_what_the_durable_commit_covers_is_given_up(streams: Streams) -> None:
    streams.publish_many(TOPIC, [prepared(position) for position in range(6)])
    batches = batches_of(streams)
    batches.next(0)
    batches.trained(0)
    covered = batches.covered
    batches.next(1)
    batches.trained(1)
    batches.acknowledge(covered)
    assert left(streams) == [2, 3, 4, 5]
    assert len(batches.covered) == 2
    batches.acknowledge(batches.covered)
    assert left(streams) == [4, 5]
    assert batches.covered == ()


def test_after_a_crash_the_same_batches_come_again_in_the_same_order(streams: Streams) -> None:
    streams.publish_many(TOPIC, [prepared(position) for position in (3, 1, 0, 2)])
    before = batches_of(streams)
    first, second = positions(before.next(0)), []
    before.trained(0)
    second = positions(before.next(1))
    again = batches_of(streams)
    assert positions(again.next(0)) == first
    again.trained(0)
    assert positions(again.next(1)) == second


def test_what_a_commit_covered_is_not_trained_again_although_it_was_not_acknowledged(streams: Streams) -> None:
    streams.publish_many(TOPIC, [prepared(position) for position in range(4)])
    before = batches_of(streams)
    before.next(0)
    before.trained(0)
    committed = Ledger.restore(before.ledger.snapshot())
    assert positions(batches_of(streams, committed).next(1)) == [2, 3]


def test_an_interruption_settles_nothing_of_the_batch_that_was_not_trained(streams: Streams) -> None:
    streams.publish(TOPIC, prepared(0))
    calls = iter([None, None])

    def pulse() -> None:
        if next(calls, "over") == "over":
            raise Interrupted("for the test")

    batches = batches_of(streams, pulse=pulse)
    with pytest.raises(Interrupted):
        batches.next(0)
    assert batches.ledger.settled == 0
    assert batches.covered == ()
    streams.publish(TOPIC, prepared(1))
    assert positions(batches_of(streams).next(0)) == [0, 1]


def test_a_batch_that_does_not_come_is_missed_by_its_deadline_with_what_came_instead(streams: Streams) -> None:
    streams.publish_many(TOPIC, [prepared(0), prepared(1, outcome="filtered: zero advantage")])
    with pytest.raises(DeadlineError, match="1 of 2 groups; set aside meanwhile: 1 filtered: zero advantage"):
        batches_of(streams, data_seconds=0.2).next(0)


def test_the_actor_sees_progress_also_when_nothing_is_trained(streams: Streams) -> None:
    streams.publish_many(TOPIC, [prepared(0, outcome="failed: x"), prepared(1), prepared(2)])
    batches = batches_of(streams)
    batches.next(0)
    progress = Board(streams).progress()
    assert progress is not None
    assert (progress.version, progress.settled) == (0, 1)
    batches.trained(0)
    batches.tell_progress(1)
    progress = Board(streams).progress()
    assert progress is not None
    assert (progress.version, progress.settled) == (1, 3)
