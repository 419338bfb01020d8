"""The order of a model's requests."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.tinker.request_queue import GAP_SECONDS, ModelQueue


def drained(queue: ModelQueue, now: float = 0.0) -> list[int]:
    found = []
    while (number := queue.next(now)) is not None:
        found.append(number)
    return found


@given(st.permutations(list(range(8))))
def test_requests_are_done_in_the_order_of_their_numbers_however_they_arrive(arrivals: list[int]) -> None:
    queue, done = ModelQueue(), []
    for number in arrivals:
        queue.add(number, 0.0)
        done += drained(queue)
    assert done == list(range(8))


def test_a_number_that_is_awaited_holds_up_those_after_it_for_a_while_only() -> None:
    queue = ModelQueue(1)
    queue.add(1, 0.0)
    queue.add(3, 0.0)
    assert drained(queue) == [1]
    assert drained(queue, GAP_SECONDS - 1) == []
    assert drained(queue, GAP_SECONDS + 1) == [3]
    assert not queue.takes(2)


def test_a_request_that_is_added_twice_is_done_once() -> None:
    queue = ModelQueue()
    queue.add(0, 0.0)
    queue.add(0, 0.0)
    assert drained(queue) == [0]
    queue.add(0, 0.0)
    assert drained(queue) == []


def test_a_trainer_that_comes_gets_what_it_lacks_again_and_waits_for_no_gap_of_before() -> None:
    queue = ModelQueue()
    for number in (0, 1, 2, 4):
        queue.add(number, 0.0)
    assert drained(queue) == [0, 1, 2]
    assert drained(queue, 1.0) == []
    assert drained(queue, GAP_SECONDS + 2.0) == [4]
    queue.restart(2, [2, 4])
    queue.add(5, 0.0)
    assert drained(queue) == [2, 4, 5]
    assert not queue.takes(3)
