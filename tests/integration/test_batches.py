"""How the trainer cuts batches: once each, none too old, nothing given up before its commit."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import pytest
from msgspec import structs

from pipeline.config import RunConfig, TeacherConfig
from pipeline.errors import DeadlineError, StreamError
from pipeline.roles.role_context import Status
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.train.loop.actor_watch import ActorReport, ActorWatch
from pipeline.train.loop.group_batches import GroupBatches, Interrupted
from pipeline.train.loop.rl import rows_of
from pipeline.transport import Streams
from pipeline.transport.file_streams import FileStreams
from pipeline.transport.ledger import Ledger
from pipeline.transport.sample_records import FILTERED, SAMPLED_TOKENS, Group, PreparedGroup, Reissue, Sample
from pipeline.transport.shared_state import SharedState
from pipeline.transport.top_tokens import ABSENT, TopTokens
from pipeline.utils import shared_files
from tests.fakes.clock import FakeClock
from tests.fakes.composed_config import compose_cached

TOPIC = "prepared"
VOCABULARY = 17


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[Streams]:
    with FileStreams(AttemptPaths(tmp_path, "r", "a-0"), 1 << 20) as opened:
        yield opened


def config_of(**training: float | str) -> RunConfig:
    overrides = {"prompts_per_step": 2, "max_lag": 1, **training}
    return compose_cached(["experiment=demo", *(f"training.{key}={value}" for key, value in overrides.items())])


def batches_of(
    streams: Streams,
    ledger: Ledger | None = None,
    pulse: Callable[[], None] = lambda: None,
    actor: ActorWatch | None = None,
    **training: float | str,
) -> GroupBatches:
    board, watch = SharedState(streams), actor or ActorWatch()
    return GroupBatches(streams, board, ledger or Ledger(), config_of(**training), pulse, VOCABULARY, actor=watch)


def prepared(position: int, version: int = 0, outcome: str = "train", token: int = 2) -> PreparedGroup:
    sample = Sample(
        tokens=np.array([1, token], "<i4").tobytes(),
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
    assert not batches.ledger.is_done(7)
    lines = batches.ledger.drain_changes()
    found = [(line.position, line.step, line.order, line.versions, line.prompt, line.solved) for line in lines]
    assert found == [(4, 0, 0, (0, 0), 4, 1.0), (0, 0, 1, (0, 0), 0, 1.0)]


def test_the_ledger_has_what_was_solved_also_of_groups_that_are_dropped_for_equal_rewards(streams: Streams) -> None:
    unsolved = structs.replace(prepared(1).group.samples[0], reward=0.5)
    half = structs.replace(prepared(1).group, samples=(unsolved, *prepared(1).group.samples))
    equal, empty = prepared(2, outcome=FILTERED), prepared(3, outcome="failed: x")
    empty = structs.replace(empty, group=structs.replace(empty.group, samples=(), failures=("x",)))
    streams.publish_many(
        TOPIC, [structs.replace(prepared(1), group=half, advantages=(0.0, 0.0)), equal, empty, prepared(4)]
    )
    batches = batches_of(streams)
    batches.next(version=0)
    batches.trained(0)
    solved = {line.position: line.solved for line in batches.ledger.drain_changes()}
    assert solved == {1: 0.5, 2: 1.0, 3: None, 4: 1.0}


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
    assert not batches.ledger.is_done(0)


def test_with_a_mask_a_group_goes_on_as_long_as_one_of_its_tokens_is_young_enough(streams: Streams) -> None:
    """All begin with weights 3, and groups 1 and 2 go on with weights 4 and 5."""
    streams.publish_many(TOPIC, [straddling(position, newest=3 + position) for position in range(3)])
    batches = batches_of(streams, stale="mask")
    groups = batches.next(version=5)
    assert (positions(groups), batches.counts["stale"]) == ([1, 2], 1)
    assert [row.mask.tolist() for row in rows_of(groups, oldest=4)] == [[0, 0, 1]] * 2
    assert [entry.record.position for entry in streams.scan("reissue", Reissue)] == [0]


def straddling(position: int, newest: int) -> PreparedGroup:
    """A sample of two tokens, the first by weights 3."""
    arrays = {"tokens": np.array([1, 2, 2], "<i4").tobytes(), "logprobs": np.zeros(3, "<f4").tobytes()}
    whole = prepared(position, version=3)
    (sample,) = whole.group.samples
    changed = msgspec.structs.replace(
        sample, **arrays, sampled=bytes([0, 1, 1]), version_offsets=bytes([0, 0, newest - 3]), version_max=newest
    )
    return msgspec.structs.replace(whole, group=msgspec.structs.replace(whole.group, samples=(changed,)))


def test_a_group_that_is_too_old_twice_is_awaited_the_next_time(streams: Streams) -> None:
    streams.publish_many(TOPIC, [prepared(0), prepared(1, version=5), prepared(0), prepared(0), prepared(2, version=5)])
    batches = batches_of(streams)
    batches.next(version=5)
    assert [entry.record.awaited for entry in streams.scan("reissue", Reissue)] == [False, True, True]
    streams.publish_many(TOPIC, [prepared(0, version=5), prepared(3, version=5)])
    batches.trained(5)
    batches.next(version=6)
    batches.trained(6)
    assert not batches._overtaken


NAN = float("nan")


@pytest.mark.parametrize(
    "poison",
    [
        {"advantages": (NAN,)},
        {"advantages": (1.0, 1.0)},
        {"advantages": ()},
        {"outcome": "malformed: by the actor"},
        {"group": prepared(0, token=VOCABULARY).group},
    ],
    ids=["advantages not finite", "too many", "none", "seen by the preprocessor", "a foreign token"],
)
def test_a_group_that_makes_no_sense_is_asked_for_again_and_training_goes_on(
    streams: Streams, poison: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    streams.publish_many(TOPIC, [msgspec.structs.replace(prepared(0), **poison), prepared(1), prepared(2)])
    batches = batches_of(streams)
    groups = batches.next(0)
    assert positions(groups) == [1, 2]
    assert len(rows_of(groups)) == 2
    assert batches.counts["malformed"] == 1
    assert [entry.record.position for entry in streams.scan("reissue", Reissue)] == [0]
    assert not batches.ledger.is_done(0)
    assert "position 0 came malformed (1 of 3)" in caplog.text
    streams.publish_many(TOPIC, [prepared(0), prepared(3)])
    batches.trained(0)
    assert positions(batches.next(1)) == [0, 3]


def test_the_last_token_of_the_vocabulary_is_trained(streams: Streams) -> None:
    streams.publish_many(TOPIC, [prepared(0, token=VOCABULARY - 1), prepared(1)])
    assert positions(batches_of(streams).next(0)) == [0, 1]


def test_a_token_that_only_the_teacher_has_is_absent_in_the_batch(streams: Streams) -> None:
    teacher = TeacherConfig(url="http://127.0.0.1:8000/v1", model="wise", top_k=1)
    config = config_of(prompts_per_step=1).model_copy(update={"teacher": teacher})
    likely = TopTokens(np.array([VOCABULARY], "<i4").tobytes(), np.zeros(1, "<f4").tobytes())
    streams.publish(TOPIC, structs.replace(prepared(0), references=(bytes(8),), top_tokens=(likely,)))
    batches = GroupBatches(
        streams, SharedState(streams), Ledger(), config, lambda: None, VOCABULARY, actor=ActorWatch()
    )
    (group,) = batches.next(version=0)
    ids, logprobs = group.top_tokens[0].arrays(1)
    assert (ids.tolist(), logprobs.tolist()) == ([[0]], [[ABSENT]])


def test_a_position_that_is_always_malformed_is_settled_as_failed_in_the_end(streams: Streams) -> None:
    poison = msgspec.structs.replace(prepared(0), advantages=())
    streams.publish_many(TOPIC, [poison, poison, poison, prepared(1), prepared(2)])
    batches = batches_of(streams)
    assert positions(batches.next(0)) == [1, 2]
    assert batches.ledger.outcomes == {"failed: malformed": 1}
    assert len(list(streams.scan("reissue", Reissue))) == 2


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


SMALL_BUDGET = 1 << 16


@pytest.mark.parametrize("size", [8_000, 80_000], ids=["some batches fill the topic", "one group is above its half"])
def test_a_topic_that_only_commits_can_free_never_holds_training_up(tmp_path: Path, size: int) -> None:
    """Checkpoints come early, as the budget asks for them; a batch may take more than the whole budget."""
    total, most, early = 24, 0, 0
    with FileStreams(AttemptPaths(tmp_path, "r", "a-0"), max(SMALL_BUDGET, 2 * size)) as streams:
        groups = [large(position, size) for position in range(total)]
        batches = batches_of(streams, prompts_per_step=3, data_seconds=20)
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(streams.publish_many, TOPIC, groups, seconds=20)
            for step in range(total // 3):
                assert positions(batches.next(step)) == [3 * step, 3 * step + 1, 3 * step + 2]
                batches.trained(step)
                most = max(most, streams.depth(TOPIC).bytes)
                if batches.is_near_budget:
                    early += 1
                    batches.acknowledge(batches.begin_checkpoint())
            publishing.result(20)
        assert most <= streams.budget + 3 * size + 3_000
        assert 0 < early <= total // 3


def large(position: int, size: int) -> PreparedGroup:
    group = prepared(position, version=position // 3)
    return msgspec.structs.replace(group, group=msgspec.structs.replace(group.group, failures=("x" * size,)))


def test_only_what_was_settled_since_the_last_commit_began_asks_for_another(streams: Streams) -> None:
    streams.publish_many(TOPIC, [large(position, 300_000) for position in range(3)])
    batches = batches_of(streams)
    batches.next(0)
    batches.trained(0)
    assert batches.is_near_budget
    assert batches.begin_checkpoint() == batches.covered
    assert not batches.is_near_budget
    assert len(batches.covered) == 2


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


def test_an_entry_that_is_delivered_twice_is_not_given_up_before_it_is_trained(streams: Streams) -> None:
    """As after a restart of the streams' backend."""
    streams.publish(TOPIC, prepared(0))
    entries = list(streams.scan(TOPIC, PreparedGroup))
    batches = batches_of(streams)
    for _ in range(2):
        batches._take(entries[0], 0)
    assert batches.covered == ()
    assert not batches.counts


def test_an_interruption_settles_nothing_of_the_batch_that_was_not_trained(streams: Streams) -> None:
    streams.publish(TOPIC, prepared(0))
    calls = iter([None, None])

    def pulse() -> None:
        if next(calls, "over") == "over":
            raise Interrupted("for the test")

    batches = batches_of(streams, pulse=pulse)
    with pytest.raises(Interrupted):
        batches.next(0)
    assert batches.ledger.done_count == 0
    assert batches.covered == ()
    streams.publish(TOPIC, prepared(1))
    assert positions(batches_of(streams).next(0)) == [0, 1]


@pytest.mark.parametrize("told", [True, False])
def test_an_attempt_that_is_told_to_end_while_streams_are_away_is_interrupted(streams: Streams, told: bool) -> None:
    away = False

    def pulse() -> None:
        if away and told:
            raise Interrupted("draining by agent.0")

    def read(limit: int, seconds: float) -> list[Any]:
        nonlocal away
        away = True
        raise StreamError("redis does not answer")

    batches = batches_of(streams, pulse=pulse)
    batches._reader.read = read  # type: ignore[method-assign]
    with pytest.raises(Interrupted if told else StreamError):
        batches.next(0)


def test_a_batch_that_does_not_come_is_missed_by_its_deadline_with_what_came_instead(streams: Streams) -> None:
    streams.publish_many(TOPIC, [prepared(0), prepared(1, outcome="filtered: zero advantage")])
    with pytest.raises(DeadlineError, match="1 of 2 groups; set aside meanwhile: 1 filtered: zero advantage"):
        batches_of(streams, data_seconds=0.2).next(0)


def test_a_batch_whose_groups_come_slowly_is_waited_for(streams: Streams) -> None:
    clock = FakeClock()
    batches = batches_of(streams, actor=ActorWatch(clock=clock), prompts_per_step=4, data_seconds=10)
    read = batches._reader.read

    def one_in_nine_seconds(limit: int, seconds: float) -> list[Any]:
        streams.publish_many(TOPIC, [prepared(int(clock.time) // 9)])
        clock.time += 9
        return list(read(1, seconds))

    batches._reader.read = one_in_nine_seconds  # type: ignore[method-assign]
    assert positions(batches.next(0)) == [0, 1, 2, 3]
    assert clock.time == 36


class WritesReports:
    """An actor in a thread, which reports as the real one does: to the status file of its role."""

    def __init__(self, folder: Path, advances: bool) -> None:
        self.advances, self.path = advances, folder / "actor.json"
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._report)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def _report(self) -> None:
        for turn in count():
            numbers = {SAMPLED_TOKENS: float(turn if self.advances else 1), "in_flight": 2.0}
            shared_files.write_document(self.path, Status(state="ready", pid=1, time=time.time(), numbers=numbers))
            if self.ended.wait(0.1):
                return

    def read(self) -> ActorReport | None:
        status = shared_files.read_document(self.path, Status)
        return None if status is None else ActorReport(status.time, status.state, status.numbers)


def test_a_batch_of_slow_episodes_is_waited_for_beyond_the_deadline_while_they_advance(
    streams: Streams, tmp_path: Path
) -> None:
    began = time.monotonic()
    with WritesReports(tmp_path, advances=True) as actor:
        batches = batches_of(streams, actor=ActorWatch(actor.read), prompts_per_step=1, data_seconds=1.5)

        def arrive_late() -> None:
            if time.monotonic() - began > 4:
                streams.publish_many(TOPIC, [prepared(0)])

        batches.pulse = arrive_late
        assert positions(batches.next(0)) == [0]
    assert time.monotonic() - began > 4


def test_an_actor_that_runs_but_stands_still_ends_the_wait_with_what_it_does(streams: Streams, tmp_path: Path) -> None:
    with WritesReports(tmp_path, advances=False) as actor:
        batches = batches_of(streams, actor=ActorWatch(actor.read), data_seconds=1.5)
        with pytest.raises(DeadlineError, match="its episodes do not advance: 2 groups are in flight, after 1 sampled"):
            batches.next(0)


def test_an_actor_that_died_ends_the_wait_within_its_deadline(streams: Streams, tmp_path: Path) -> None:
    with WritesReports(tmp_path, advances=True) as actor:
        batches = batches_of(streams, actor=ActorWatch(actor.read), data_seconds=1.5)
        threading.Timer(0.5, actor.ended.set).start()
        began = time.monotonic()
        with pytest.raises(DeadlineError, match="2 of 2 groups"):
            batches.next(0)
    assert 1.5 < time.monotonic() - began < 6


def test_an_actor_whose_groups_are_all_malformed_ends_the_wait_although_it_advances(streams: Streams) -> None:
    clock, reports = FakeClock(), count(1)
    watch = ActorWatch(lambda: ActorReport(turn := float(next(reports)), "ready", {SAMPLED_TOKENS: turn}), clock)
    batches = batches_of(streams, actor=watch, prompts_per_step=2, data_seconds=10)
    read = batches._reader.read

    def another(limit: int, seconds: float) -> list[Any]:
        clock.time += 2
        streams.publish_many(TOPIC, [prepared(int(clock.time), token=VOCABULARY)])
        return list(read(1, seconds))

    batches._reader.read = another  # type: ignore[method-assign]
    with pytest.raises(DeadlineError, match="set aside meanwhile: 6 malformed"):
        batches.next(0)


def undecodable(position: int) -> PreparedGroup:
    odd = structs.replace(prepared(position).group.samples[0], metrics={"won": True})
    return structs.replace(prepared(position), group=structs.replace(prepared(position).group, samples=(odd,)))


def test_a_group_that_cannot_be_decoded_is_issued_again_and_fails_after_three_times(streams: Streams) -> None:
    streams.publish_many(TOPIC, [undecodable(5), prepared(0), undecodable(0), prepared(1)])
    batches = batches_of(streams)
    assert positions(batches.next(0)) == [0, 1]
    again = [entry.record.position for entry in streams.scan("reissue", Reissue)]
    assert (again, batches.counts["malformed"]) == ([5], 1)
    batches.trained(0)
    streams.publish_many(TOPIC, [undecodable(5), undecodable(5), undecodable(0), prepared(2), prepared(3)])
    batches.next(1)
    assert [entry.record.position for entry in streams.scan("reissue", Reissue)] == [5, 5]
    assert batches.ledger.is_done(5)


@pytest.mark.parametrize("odd", [undecodable, lambda position: prepared(position, token=VOCABULARY)])
def test_a_malformed_group_comes_again_after_a_crash_however_it_is_malformed(
    streams: Streams, odd: Callable[[int], PreparedGroup]
) -> None:
    streams.publish_many(TOPIC, [odd(5), odd(5), odd(5), prepared(0), prepared(1)])
    before = batches_of(streams)
    before.next(0)
    assert before.ledger.is_done(5)
    again = batches_of(streams)
    assert positions(again.next(0)) == [0, 1]
    assert again.ledger.is_done(5)
    again.acknowledge(again.begin_checkpoint())
    assert left(streams) == [0, 1]
    assert streams.depth(TOPIC).entries == 2


def test_each_of_many_groups_that_cannot_be_decoded_is_issued_again(streams: Streams) -> None:
    odd = range(100, 1200)
    streams.publish_many(TOPIC, [*map(undecodable, odd), *map(prepared, range(100))])
    batches_of(streams, prompts_per_step=100).next(0)
    assert [entry.record.position for entry in streams.scan("reissue", Reissue)] == list(odd)


def test_entries_that_were_rejected_are_named_where_a_batch_is_missed(streams: Streams) -> None:
    streams.try_append("groups", [b"no group"], None)
    assert streams.reader("groups", Group, "preprocessor").read(1, 0) == []
    streams.publish_many(TOPIC, [undecodable(1), undecodable(2)])
    streams.try_append(TOPIC, [b"no", b"none"], None)
    missed = "set aside meanwhile: 2 malformed; 1 entries of 'groups' rejected, the last: 8 bytes are no Group record"
    with pytest.raises(DeadlineError, match=f"{missed}.*; 2 entries of 'prepared' rejected, the last: 4 bytes"):
        batches_of(streams, data_seconds=0.2).next(0)


def test_a_missed_batch_is_named_although_the_streams_cannot_tell_what_was_rejected(
    streams: Streams, tmp_path: Path
) -> None:
    odd = RunPaths(tmp_path).streams / "groups" / "rejected" / "no-id.json"
    odd.parent.mkdir(parents=True)
    odd.touch()
    with pytest.raises(StreamError):
        streams.rejected("groups")
    streams.try_append(TOPIC, [b"none"], None)
    with pytest.raises(DeadlineError, match="nothing; 1 entries of 'prepared' rejected"):
        batches_of(streams, data_seconds=0.2).next(0)


def test_the_actor_sees_progress_also_when_nothing_is_trained(streams: Streams) -> None:
    streams.publish_many(TOPIC, [prepared(0, outcome="failed: x"), prepared(1), prepared(2)])
    batches = batches_of(streams)
    batches.next(0)
    progress = SharedState(streams).progress()
    assert progress is not None
    assert (progress.version, progress.done) == (0, 1)
    batches.trained(0)
    batches.publish_progress(1)
    progress = SharedState(streams).progress()
    assert progress is not None
    assert (progress.version, progress.done) == (1, 3)


def test_equal_groups_are_replaced_by_others_until_a_step_has_dropped_enough(streams: Streams) -> None:
    ledger = Ledger()
    batches = batches_of(streams, ledger, max_dropped_batches=1)
    outcomes = [FILTERED, FILTERED, FILTERED, "train", FILTERED]
    for position, outcome in enumerate(outcomes):
        streams.publish(TOPIC, prepared(position, outcome=outcome))
    groups = batches.next(0)
    assert positions(groups) == [2, 3]  # two were dropped, the batch of one step; the third fills it
    assert [(group.outcome, group.advantages) for group in groups] == [("train", (0.0,))] * 2
    assert (ledger.is_done(0), ledger.is_done(2), batches.counts[FILTERED]) == (True, False, 2)
