"""The election's rules, without files: one rank at a time, told what happened."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InvalidTransitionError
from slurm.rendezvous.election import (
    ACTIONS,
    TRANSITIONS,
    Action,
    ElectionEvent,
    Member,
    Phase,
    begin_election,
    step,
    transition,
)

LEASE = 2.0


def watching(rank: int = 1, now: float = 100.0) -> Member:
    """A rank of four that has joined at `now`."""
    member, _ = begin_election(rank, 4, LEASE, now)
    return step(member, ElectionEvent("joined"), now)[0]


def leading(now: float = 100.0) -> Member:
    """Rank 0 that has won epoch 1 and renewed."""
    member = watching(0, now)
    for event in (ElectionEvent("observed"), ElectionEvent("won", 1), ElectionEvent("renewed")):
        member, _ = step(member, event, now)
    return member


def test_rank_zero_opens_the_first_epoch_at_once():
    assert step(watching(0), ElectionEvent("observed"), 100.0)[1] == Action("claim", 1, -1)


def test_other_ranks_leave_the_first_epoch_to_rank_zero_for_a_lease():
    assert step(watching(1), ElectionEvent("observed"), 100.0 + LEASE)[1].name == "sleep"
    assert step(watching(1), ElectionEvent("observed"), 100.0 + 1.25 * LEASE)[1].name == "claim"


def test_low_ranks_lose_patience_first():
    assert [watching(rank).patience() for rank in range(4)] == [0.0, 2.5, 3.0, 3.5]


def test_a_moving_lease_is_followed_however_long_it_takes():
    member, now = watching(), 100.0
    for beat in range(50):
        now += LEASE * 1.2
        member, action = step(member, ElectionEvent("observed", 1, beat), now)
        assert action.name == "sleep"
        member, _ = step(member, ElectionEvent("backoff_done"), now)


def test_a_lease_that_stands_still_is_taken_over_in_the_next_epoch():
    member, _ = step(watching(), ElectionEvent("observed", 1, 7), 101.0)
    member, _ = step(member, ElectionEvent("backoff_done"), 101.0)
    member, action = step(member, ElectionEvent("observed", 1, 7), 101.0 + 1.25 * LEASE)
    assert (member.phase, action.name, action.epoch) == (Phase.CLAIMING, "claim", 2)


def test_a_claim_without_a_lease_is_taken_over_too():
    member, _ = step(watching(), ElectionEvent("observed", 1, -1), 100.0)
    member, _ = step(member, ElectionEvent("backoff_done"), 100.0)
    assert step(member, ElectionEvent("observed", 1, -1), 100.0 + 1.25 * LEASE)[1].epoch == 2


def test_an_old_listing_does_not_turn_back_what_a_rank_knows():
    member, _ = step(watching(), ElectionEvent("observed", 2, 5), 101.0)
    member, _ = step(member, ElectionEvent("backoff_done"), 101.0)
    member, _ = step(member, ElectionEvent("observed", 1, 9), 102.0)
    assert (member.epoch, member.beat, member.moved) == (2, 5, 101.0)


def test_who_loses_a_claim_watches_the_winner_for_a_whole_lease():
    member, _ = step(watching(), ElectionEvent("observed"), 110.0)
    member, action = step(member, ElectionEvent("lost", 1), 110.0)
    assert (member.phase, member.epoch, action.name) == (Phase.WATCHING, 1, "look")
    assert step(member, ElectionEvent("observed", 0, -1), 111.0)[1].name == "sleep"


def test_a_new_leader_writes_its_lease_before_it_reads_node_records():
    member, _ = step(watching(0), ElectionEvent("observed"), 100.0)
    member, action = step(member, ElectionEvent("won", 1), 100.0)
    assert action.name == "renew"
    assert step(member, ElectionEvent("renewed"), 100.0)[1].name == "gather"


def test_a_leader_renews_in_time_and_never_repeats_a_beat():
    member, beats = leading(), set()
    for second in range(1, 6):
        member, action = step(member, ElectionEvent("observed", 1, member.beat), 100.0 + second)
        assert action.name == "renew"
        assert action.beat not in beats
        beats.add(action.beat)
        member, _ = step(member, ElectionEvent("renewed"), 100.0 + second)


def test_a_leader_that_sees_a_later_epoch_steps_down():
    member, action = step(leading(), ElectionEvent("observed", 2, 0), 100.1)
    assert (member.phase, member.epoch, action.name) == (Phase.WATCHING, 2, "sleep")


def test_a_verdict_settles_leaders_and_observers_alike():
    for member in (leading(), watching()):
        after, action = step(member, ElectionEvent("world_published"), 101.0)
        assert (after.phase, action.name) == (Phase.FINISHED, "finish")


def test_a_rank_whose_node_record_cannot_be_read_yet_joins_again():
    member, _ = begin_election(3, 4, LEASE, 0.0)
    member, action = step(member, ElectionEvent("record_conflict"), 0.0)
    assert action.name == "sleep"
    assert step(member, ElectionEvent("backoff_done"), 0.1)[1] == Action("join")


@pytest.mark.parametrize("event", ["won", "renewed", "published", "joined"])
def test_an_impossible_event_is_refused_by_name(event):
    with pytest.raises(InvalidTransitionError, match=f"'{event}' is not allowed in state") as caught:
        step(watching(), ElectionEvent(event), 100.0)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_nothing_follows_the_end():
    for signal in ACTIONS:
        with pytest.raises(InvalidTransitionError):
            transition(Phase.FINISHED, signal)


def test_every_signal_of_the_table_has_its_action_and_every_phase_a_way_out():
    assert {signal for _, signal in TRANSITIONS} == set(ACTIONS)
    for phase in set(Phase) - {Phase.FINISHED}:
        assert any(start is phase and end is not phase for (start, _), end in TRANSITIONS.items())


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 5), st.floats(0, 3)), max_size=30))
def test_what_a_rank_knows_only_grows(sights):
    member, now = watching(), 100.0
    for epoch, beat, seconds in sights:
        now += seconds
        before = (member.epoch, member.beat)
        member, action = step(member, ElectionEvent("observed", epoch, beat), now)
        assert (member.epoch, member.beat) >= before
        if action.name == "claim":
            assert action.epoch == member.epoch + 1
            return
        member, _ = step(member, ElectionEvent("backoff_done"), now)
