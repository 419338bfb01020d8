"""The ledger: every position once, whatever crashes; and the order of prompts."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pipeline.errors import RecordError
from pipeline.transport.ledger import BatchEntry, Ledger, Settlement, prompt_at

positions = st.lists(st.integers(0, 40), max_size=60)


def settled(among: list[int]) -> Ledger:
    ledger = Ledger()
    for position in among:
        ledger.mark_done(position, "trained", step=1)
    return ledger


def test_a_position_is_settled_once() -> None:
    ledger = Ledger()
    assert ledger.mark_done(3, "trained", step=1)
    assert not ledger.mark_done(3, "failed: late", step=2)
    assert ledger.outcomes == {"trained": 1}


@given(positions)
def test_everything_below_the_watermark_is_settled_and_the_watermark_is_not(order: list[int]) -> None:
    ledger = settled(order)
    assert all(ledger.is_done(position) for position in range(ledger.watermark))
    assert not ledger.is_done(ledger.watermark)
    assert ledger.done_count == len(set(order))


@given(positions, positions)
def test_a_restored_ledger_is_the_one_that_was_saved(order: list[int], later: list[int]) -> None:
    ledger = settled(order)
    restored = Ledger.restore(ledger.snapshot())
    for position in later:
        assert restored.mark_done(position, "trained", 2) == ledger.mark_done(position, "trained", 2)
    assert restored.snapshot() == ledger.snapshot()


@pytest.mark.parametrize("data", [b"", b"\x01", Ledger().snapshot()[:-1]])
def test_bytes_that_are_no_ledger_are_refused(data: bytes) -> None:
    with pytest.raises(RecordError, match="no ledger"):
        Ledger.restore(data)


@given(positions, positions)
def test_holes_and_known_and_settled_positions_are_all_there_is(order: list[int], known: list[int]) -> None:
    ledger = settled(order)
    holes, first_new = ledger.unissued(known)
    assert sorted({*holes, *order, *known}) == list(range(first_new))
    assert not set(holes) & {*order, *known}


def test_news_are_told_once_and_in_order() -> None:
    ledger = settled([1, 0])
    ledger.mark_done(7, "failed: no server", step=3)
    news = [(line.position, line.outcome, line.step) for line in ledger.drain_changes()]
    assert news == [(1, "trained", 1), (0, "trained", 1), (7, "failed: no server", 3)]
    assert ledger.drain_changes() == []


def test_a_line_has_the_place_in_a_batch_and_the_samples_there() -> None:
    ledger = Ledger()
    ledger.mark_done(17, "trained", 4, BatchEntry(order=1, versions=(3, 4), fingerprint="5b0e"))
    ledger.mark_done(18, "filtered: zero advantage", 4)
    lines = [msgspec.json.encode(line) for line in ledger.drain_changes()]
    assert lines == [
        b'{"position":17,"outcome":"trained","step":4,"order":1,"versions":[3,4],"fingerprint":"5b0e"}',
        b'{"position":18,"outcome":"filtered: zero advantage","step":4}',
    ]
    assert msgspec.json.decode(lines[0], type=Settlement).versions == (3, 4)


@given(st.integers(1, 300), st.integers(0, 5), st.integers(0, 1000))
def test_an_epoch_visits_every_prompt_once(size: int, epoch: int, seed: int) -> None:
    visited = [prompt_at(epoch * size + place, size, seed) for place in range(size)]
    assert sorted(visited) == list(range(size))


def test_epochs_and_seeds_have_different_orders() -> None:
    def order(epoch: int, seed: int) -> list[int]:
        return [prompt_at(epoch * 100 + place, 100, seed) for place in range(100)]

    orders = [order(epoch, seed) for epoch in (0, 1) for seed in (0, 1)]
    assert len({tuple(each) for each in orders}) == 4
    assert list(range(100)) not in orders


def test_the_order_of_prompts_never_changes() -> None:
    assert [prompt_at(position, 10, seed=7) for position in range(12)] == [3, 2, 1, 8, 7, 5, 6, 0, 4, 9, 2, 7]


class Crashes(RuleBasedStateMachine):
    """A trainer that reads positions in any order, twice and again, commits when it likes and crashes when it likes.

    `trained` is what happened to the model that exists: it goes back with the ledger, as the checkpoint does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.trained = Ledger(), list[int]()
        self.commit()

    @rule(position=st.integers(0, 12))
    def deliver(self, position: int) -> None:
        if self.ledger.mark_done(position, "trained", step=len(self.trained)):
            self.trained.append(position)

    @rule()
    def commit(self) -> None:
        self.committed = self.ledger.snapshot(), tuple(self.trained)

    @rule()
    def crash(self) -> None:
        snapshot, trained = self.committed
        self.ledger, self.trained = Ledger.restore(snapshot), list(trained)

    @invariant()
    def the_model_has_trained_each_position_once_and_the_ledger_knows_them(self) -> None:
        assert len(self.trained) == len(set(self.trained))
        assert all(self.ledger.is_done(position) == (position in self.trained) for position in range(14))


TestCrashes = Crashes.TestCase
