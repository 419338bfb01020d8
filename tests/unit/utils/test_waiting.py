"""Waiting with a deadline, on a clock that only the test moves."""

import asyncio
import pickle
from itertools import islice

import pytest

from pipeline.errors import DeadlineError
from pipeline.utils.waiting import Deadline, exponential_pauses, run_within, wait_for
from tests.fakes.clock import FakeClock


def test_the_first_value_ends_the_wait_without_a_pause():
    clock = FakeClock()
    assert wait_for("a card", lambda: 0, 1.0, clock=clock) == 0
    assert clock.slept == []


def test_none_and_false_mean_not_yet():
    answers = iter([None, False, "there"])
    assert wait_for("a card", lambda: next(answers), 1.0, clock=FakeClock()) == "there"


def test_pauses_grow_to_the_longest_and_never_pass_the_deadline():
    clock = FakeClock()
    with pytest.raises(DeadlineError):
        wait_for("a card", lambda: None, 10.0, pause=0.5, longest_pause=2.0, clock=clock)
    assert clock.slept[:4] == [0.5, 0.75, 1.125, 1.6875]
    assert max(clock.slept) == 2.0
    assert clock.time == pytest.approx(10.0)


def test_a_last_look_is_taken_at_the_deadline():
    clock = FakeClock()
    assert wait_for("a card", lambda: clock.time >= 1.0, 1.0, clock=clock) is True


def test_who_was_stopped_while_it_looked_looks_once_more():
    clock, looks = FakeClock(), list[float]()

    def probe():
        looks.append(clock.time)
        clock.time += 100.0 if len(looks) == 1 else 0.0
        return len(looks) == 2

    assert wait_for("a card", probe, 1.0, clock=clock) is True
    with pytest.raises(DeadlineError):
        wait_for("a card", lambda: looks.append(clock.time), 1.0, pause=1.0, clock=clock)
    assert looks[2:] == [100.0, 101.0]


def test_the_deadline_names_what_was_awaited_and_who_is_missing():
    with pytest.raises(DeadlineError) as caught:
        wait_for("all cards", lambda: None, 2.0, missing=lambda: "rank 3", clock=FakeClock())
    assert str(caught.value) == "waited 2.0 s for all cards; missing: rank 3"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_exception_of_the_probe_ends_the_wait():
    def probe():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        wait_for("a card", probe, 1.0, clock=FakeClock())


def test_a_deadline_counts_down_and_stops_at_zero():
    clock = FakeClock(50.0)
    deadline = Deadline("the end", 2.0, clock)
    clock.sleep(1.5)
    assert (deadline.left, deadline.passed) == (0.5, False)
    clock.sleep(5.0)
    assert (deadline.left, deadline.passed) == (0.0, True)


def test_asynchronous_work_gets_the_same_error():
    async def never():
        await asyncio.Event().wait()

    with pytest.raises(DeadlineError, match=r"waited 0\.0 s for a reply"):
        asyncio.run(run_within("a reply", never(), 0.01))


def test_asynchronous_work_in_time_gives_its_result():
    async def answer():
        return 7

    assert asyncio.run(run_within("a reply", answer(), 5.0)) == 7


def test_a_timeout_of_the_work_itself_is_not_taken_for_the_deadline() -> None:
    async def fails() -> None:
        raise TimeoutError("the work's own")

    with pytest.raises(TimeoutError, match="the work's own"):
        asyncio.run(run_within("a reply", fails(), 5.0))


def test_pauses_grow_to_the_longest_and_stay() -> None:
    found = list(islice(exponential_pauses(0.2, 0.5), 5))
    assert found == pytest.approx([0.2, 0.3, 0.45, 0.5, 0.5])
