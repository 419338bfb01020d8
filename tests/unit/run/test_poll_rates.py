"""The rates at which a run accesses the shared file system, for any number of ranks."""

import pytest

from pipeline.observability.run_status import SILENT_SECONDS
from pipeline.run import poll_rates
from pipeline.run.poll_rates import ReadSchedule, linked_poll_interval, listing_interval, poll_interval, touch_interval
from tests.fakes.clock import FakeClock

SIZES = (1, 16, 256, 1024, 4096, 16384)


@pytest.mark.parametrize(
    ("interval", "limit", "ranks"),
    [
        (poll_interval, poll_rates.MAX_POLLS_PER_SECOND, 999),
        (lambda ranks: linked_poll_interval(ranks) / 2, poll_rates.MAX_LINKED_POLLS_PER_SECOND, 3000),
        (touch_interval, poll_rates.MAX_TOUCHES_PER_SECOND, 4000),
        (listing_interval, poll_rates.MAX_LISTINGS_PER_SECOND, 10_000),
    ],
)
def test_the_rate_of_all_ranks_together_is_bounded_up_to_thousands(interval, limit, ranks):
    assert all(number / interval(number) <= limit * 1.001 for number in range(1, ranks + 1))
    assert [interval(size) for size in SIZES] == sorted(interval(size) for size in SIZES)


def test_a_heartbeat_file_is_always_young_enough_for_its_readers():
    assert max(map(touch_interval, SIZES)) <= SILENT_SECONDS / 3


def test_a_schedule_is_due_at_first_and_again_after_the_interval():
    clock = FakeClock()
    schedule = ReadSchedule(1024, clock)
    assert schedule.is_due()
    schedule.begin()
    clock.sleep(poll_interval(1024) - 0.01)
    assert not schedule.is_due()
    clock.sleep(0.01)
    assert schedule.is_due()
