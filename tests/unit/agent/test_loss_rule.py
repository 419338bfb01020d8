"""The rule by which a rank is lost within seconds: what suggests a loss, what confirms it, and what excuses it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.agent.control_link import MAX_WITNESSES, witnesses
from slurm.agent.loss_rule import LOOK_SECONDS, REFUSED_SECONDS, UNREACHABLE_SECONDS, LinkSign, LossRule
from tests.fakes.clock import FakeClock

TOUCHED = 7


class Observer:
    """Looks once a second at a rank that has answered once."""

    def __init__(self, unproven_seconds: float = 0.0) -> None:
        self.clock = FakeClock()
        self.rule = LossRule(self.clock, unproven_seconds)

    def look(self, sign: LinkSign, seconds: float = LOOK_SECONDS, touched: int | None = TOUCHED) -> str:
        """The last result of looks for `seconds`."""
        cause = ""
        for _ in range(round(seconds / LOOK_SECONDS)):
            self.clock.time += LOOK_SECONDS
            cause = self.rule.look(sign, touched)
        return cause

    def seconds_until_lost(self, sign: LinkSign) -> float:
        began = self.clock.now()
        while not self.look(sign):
            assert self.clock.now() < began + 1000
        return self.clock.now() - began


@pytest.fixture
def observer() -> Observer:
    seen = Observer(unproven_seconds=100.0)
    assert seen.look("answers") == ""
    return seen


def test_an_ended_process_is_lost_sooner_than_a_node_that_is_out_of_reach(observer: Observer) -> None:
    assert observer.seconds_until_lost("refuses") == pytest.approx(REFUSED_SECONDS, abs=LOOK_SECONDS)
    assert observer.look("refuses").startswith("its process has ended")
    assert observer.look("answers") == ""
    assert observer.seconds_until_lost("unreachable") == pytest.approx(UNREACHABLE_SECONDS, abs=LOOK_SECONDS)


def test_a_node_that_refuses_and_then_vanishes_has_the_longer_time(observer: Observer) -> None:
    assert observer.look("refuses", REFUSED_SECONDS - LOOK_SECONDS) == ""
    assert observer.look("unreachable", UNREACHABLE_SECONDS - REFUSED_SECONDS) == ""
    assert observer.look("refuses", REFUSED_SECONDS).startswith("its node is unreachable")


@pytest.mark.parametrize("sign", ["accepts", "unknown"])
def test_a_stopped_agent_is_never_lost_by_this_rule_and_begins_a_suspicion_anew(
    observer: Observer, sign: LinkSign
) -> None:
    assert observer.look(sign, 1000) == ""
    assert observer.look("refuses", REFUSED_SECONDS) == ""
    assert observer.look(sign) == ""
    assert observer.look("refuses", REFUSED_SECONDS) == ""
    assert observer.look("refuses")


def test_a_touch_of_the_file_excuses_a_rank_until_it_answers_again(observer: Observer) -> None:
    assert observer.look("refuses", 3) == ""
    assert observer.look("refuses", touched=TOUCHED + 1) == ""
    assert not observer.rule.suspects("refuses"), "its file is not read at each look any more"
    assert observer.look("refuses", 1000, touched=TOUCHED + 1) == ""
    assert observer.look("answers") == ""
    assert observer.look("refuses", REFUSED_SECONDS + LOOK_SECONDS, touched=TOUCHED + 1)


def test_a_file_that_cannot_be_read_here_confirms_nothing(observer: Observer) -> None:
    assert observer.look("refuses", 3) == ""
    assert observer.look("refuses", 1000, touched=None) == ""
    assert observer.look("refuses", REFUSED_SECONDS) == ""
    assert observer.look("refuses")


def test_a_rank_that_never_answered_has_time_for_a_regular_touch() -> None:
    observer = Observer(unproven_seconds=100.0)
    assert observer.seconds_until_lost("refuses") == pytest.approx(100 + REFUSED_SECONDS, abs=LOOK_SECONDS)


def test_time_in_which_the_observer_did_not_run_does_not_count(observer: Observer) -> None:
    assert observer.look("unreachable") == ""
    observer.clock.time += 3600
    assert observer.look("unreachable") == ""
    assert observer.look("unreachable", UNREACHABLE_SECONDS)


@given(st.integers(2, 5000), st.data())
def test_witnesses_are_few_other_ranks(ranks: int, data: st.DataObject) -> None:
    rank, observer = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, ranks - 1))
    others = witnesses(rank, observer, ranks)
    assert len(set(others)) == len(others) == min(MAX_WITNESSES, ranks - len({rank, observer}))
    assert not {rank, observer} & set(others)
    assert all(0 <= other < ranks for other in others)
