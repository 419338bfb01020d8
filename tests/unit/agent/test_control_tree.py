"""The tree of agents: who follows whom, what counts as a hint, and when an agent reads."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.run.poll_rates import ROOT_SECONDS, linked_poll_interval, poll_interval
from slurm.agent.control_tree import FANOUT, STALE_SECONDS, ChangeBoard, ChangeCounts, LinkedSchedule, ancestors
from tests.fakes.clock import FakeClock

RANKS = 4096


@given(st.integers(0, 10**6))
def test_every_rank_follows_lower_ranks_only_down_to_rank_0(rank: int) -> None:
    path = (rank, *ancestors(rank))
    assert all(lower < higher for higher, lower in pairwise(path))
    assert path[-1] == 0


def test_no_rank_has_more_followers_than_the_fanout_and_three_links_reach_4096_ranks() -> None:
    followers = Counter(ancestors(rank)[0] for rank in range(1, RANKS))
    assert max(followers.values()) == FANOUT
    assert max(len(ancestors(rank)) for rank in range(RANKS)) == 3


counts = st.builds(ChangeCounts, events=st.integers(0, 3), revisions=st.integers(0, 3))


@given(counts, counts)
def test_joined_counts_are_the_least_that_neither_exceeds(one: ChangeCounts, other: ChangeCounts) -> None:
    both = one.join(other)
    assert not one.exceeds(both)
    assert not other.exceeds(both)
    assert both.events in (one.events, other.events)
    assert both.revisions in (one.revisions, other.revisions)


def reads(schedule: LinkedSchedule, clock: FakeClock, seconds: float, found: int) -> int:
    """The number of reads within `seconds`, each of which finds so many documents."""
    number, end = 0, clock.now() + seconds
    while clock.now() < end:
        if schedule.is_due():
            schedule.begin()
            schedule.finish(found)
            number += 1
        clock.time += 0.05
    return number


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_rank_0_reads_often_a_rank_without_a_link_less_and_one_with_a_link_rarely(clock: FakeClock) -> None:
    root, other = ChangeBoard(0, RANKS, clock), ChangeBoard(5, RANKS, clock)
    schedule = LinkedSchedule(other, "events", clock)
    assert root.interval("events") == ROOT_SECONDS
    assert reads(schedule, clock, 60, 0) == 60 / poll_interval(RANKS)
    other.note_report(ChangeCounts())
    rarely = other.interval("events")
    assert linked_poll_interval(RANKS) / 2 <= rarely <= linked_poll_interval(RANKS)
    assert reads(schedule, clock, 3 * rarely, 0) == 3


def test_agents_that_read_together_at_a_hint_do_not_read_together_later() -> None:
    intervals = {ChangeBoard(rank, RANKS).interval("events") for rank in range(1, 20)}
    assert intervals == {poll_interval(RANKS)}, "without a link"
    boards = [ChangeBoard(rank, RANKS) for rank in range(1, 20)]
    for board in boards:
        board.note_report(ChangeCounts())
    assert len({board.interval("events") for board in boards}) == len(boards)


def test_a_hint_causes_a_read_at_once_and_then_none_until_the_next(clock: FakeClock) -> None:
    board = ChangeBoard(5, RANKS, clock)
    schedule = LinkedSchedule(board, "events", clock)
    board.note_report(ChangeCounts())
    assert reads(schedule, clock, 1, 0) == 1
    board.note_report(ChangeCounts(events=1))
    assert schedule.is_due()
    assert reads(schedule, clock, 30, 1) == 1
    board.note_report(ChangeCounts(events=1, revisions=1))
    assert not schedule.is_due(), "a hint of another kind"


def test_a_file_that_is_not_visible_yet_is_looked_for_until_it_is(clock: FakeClock) -> None:
    board = ChangeBoard(5, RANKS, clock)
    schedule = LinkedSchedule(board, "events", clock)
    board.note_report(ChangeCounts(events=1))
    assert reads(schedule, clock, 20, 0) == 20 / poll_interval(RANKS)
    assert reads(schedule, clock, 20, 1) == 1


def test_a_hint_that_comes_during_a_read_causes_another(clock: FakeClock) -> None:
    board = ChangeBoard(5, RANKS, clock)
    schedule = LinkedSchedule(board, "events", clock)
    board.note_report(ChangeCounts())
    schedule.begin()
    board.note_report(ChangeCounts(events=1))
    schedule.finish(0)
    assert schedule.is_due()


def test_a_lost_link_causes_a_read_at_once(clock: FakeClock) -> None:
    board = ChangeBoard(5, RANKS, clock)
    schedule = LinkedSchedule(board, "revisions", clock, min_seconds=1.0)
    board.note_report(ChangeCounts())
    assert reads(schedule, clock, 10, 0) == 1
    board.note_link_lost()
    assert schedule.is_due()
    assert reads(schedule, clock, 1, 0) == 1
    board.note_link_lost()
    assert not schedule.is_due(), "there was no link to lose"


def test_an_agent_passes_on_what_it_heard_before_it_has_read_it(clock: FakeClock) -> None:
    board = ChangeBoard(1, RANKS, clock)
    board.note_report(ChangeCounts(events=2))
    assert board.wait_for_more(ChangeCounts(), 0) == ChangeCounts(events=2)


def test_an_agent_without_a_link_that_reads_nothing_any_more_gives_no_hints(clock: FakeClock) -> None:
    board = ChangeBoard(0, RANKS, clock)
    board.note_read("events", 1)
    assert board.wait_for_more(ChangeCounts(), 0) == ChangeCounts(events=1)
    clock.time += STALE_SECONDS
    assert board.wait_for_more(ChangeCounts(), 0) is None
    board.note_read("events", 1)
    assert board.wait_for_more(ChangeCounts(), 0) is not None
