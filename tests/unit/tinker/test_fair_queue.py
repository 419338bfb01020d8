"""Which sample is sent to the servers next, and whose model the trainer works for."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pipeline.tinker.fair_queue import FairQueue
from pipeline.tinker.turns import RoundRobin


def queue_of(capacity: int, **samples: int) -> FairQueue:
    """With so many samples of one sequence of each session, in this order."""
    queue = FairQueue()
    queue.capacity = capacity
    for session, count in samples.items():
        for number in range(count):
            queue.add(session, f"{session}{number}", 1)
    return queue


def started(queue: FairQueue) -> list[str]:
    found = []
    while (id := queue.next()) is not None:
        found.append(id)
    return found


def test_one_sample_behind_a_flood_is_next_and_no_more_are_in_flight_than_may_be() -> None:
    queue = queue_of(8, flood=2000)
    assert started(queue) == [f"flood{number}" for number in range(8)]
    queue.add("other", "other0", 1)
    assert queue.next() is None
    queue.remove("flood3")
    assert started(queue) == ["other0"]


def test_sessions_have_equal_shares_of_the_sequences_in_flight() -> None:
    queue = queue_of(64, many=500)
    for number in range(50):
        queue.add("large", f"large{number}", 16)
    assert started(queue)
    in_flight: Counter[str] = Counter()
    for id in queue._running:
        session, size = queue._known[id]
        in_flight[session] += size
    assert in_flight == {"many": 32, "large": 32}


def test_samples_of_a_session_that_is_held_wait_before_its_others_and_others_take_their_place() -> None:
    queue = queue_of(4, gone=5, other=5)
    assert started(queue) == ["gone0", "other0", "gone1", "other1"]
    assert queue.hold("gone") == ["gone0", "gone1"]
    assert started(queue) == ["other2", "other3"]
    for number in range(4):
        queue.remove(f"other{number}")
    assert started(queue) == ["other4"]
    queue.release("gone")
    assert started(queue) == ["gone0", "gone1", "gone2"]


def test_a_session_that_fills_the_queue_leaves_room_for_others() -> None:
    queue = queue_of(1, flood=100)
    assert not queue.has_room("flood", 100)
    assert queue.has_room("other", 100)
    for number in range(50):
        queue.add("other", f"other{number}", 1)
    assert not queue.has_room("other", 100)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "end", "hold", "release"])), max_size=60),
    st.integers(1, 5),
)
def test_every_sample_is_started_once_and_none_of_a_session_that_is_held(
    events: list[tuple[str, str]], capacity: int
) -> None:
    queue, added, done, held = queue_of(capacity), 0, set[str](), set[str]()
    running: list[str] = []
    for session, event in [*events, *((session, "release") for session in "abc")]:
        match event:
            case "add":
                queue.add(session, f"{session}{added}", 1)
                added += 1
            case "end" if running:
                done.add(running[0])
                queue.remove(running.pop(0))
            case "hold":
                held.add(session)
                stopped = queue.hold(session)
                running = [id for id in running if id not in stopped]
            case "release":
                held.discard(session)
                queue.release(session)
        new = started(queue)
        assert not {id[0] for id in new} & held
        running += new
        assert len(running) <= capacity
        assert len(set(running)) == len(running)
    while running:
        done.add(running[0])
        queue.remove(running.pop(0))
        running += started(queue)
    assert (len(done), len(queue)) == (added, 0)


def test_sessions_take_turns_however_many_models_each_has() -> None:
    turns, took = RoundRobin(), []
    for model in ("a:0", "a:1", "a:2", "b:0"):
        turns.add(model[0], model)
    for _ in range(6):
        model = turns.order()[0]
        turns.took(model[0], model)
        took.append(model)
    assert took == ["a:0", "b:0", "a:1", "b:0", "a:2", "b:0"]
    turns.took("a", "a:1", stays=True)
    assert turns.order()[0] == "a:1"
    turns.discard("b", "b:0")
    turns.discard("b", "b:0")
    assert sorted(turns.order()) == ["a:0", "a:1", "a:2"]
