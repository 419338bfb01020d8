"""Whether the trainer waits for the actor is a matter of progress, not of time."""

import pytest

from pipeline.train.loop.actor_watch import LOOK_SECONDS, SILENT_SECONDS, ActorReport, ActorWatch
from pipeline.transport.eval_records import EVALUATED
from pipeline.transport.sample_records import SAMPLED_TOKENS, TASK_CALLS
from tests.fakes.clock import FakeClock


class FakeActor:
    """An actor's report, which a test replaces."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.report: ActorReport | None = None
        self.reads = 0
        self.watch = ActorWatch(self._read, self.clock)
        self.watch.begin()

    def _read(self) -> ActorReport | None:
        self.reads += 1
        return self.report

    def write(self, **numbers: float) -> None:
        # The clock of the actor's node is a year behind: only that stamps change matters.
        self.report = ActorReport(self.clock.now() - 3e7, "ready", numbers)

    def stalled_after(self, seconds: float) -> float:
        self.clock.time += seconds
        return self.watch.stalled_seconds()


@pytest.mark.parametrize("counter", [SAMPLED_TOKENS, TASK_CALLS, EVALUATED])
def test_an_episode_of_hours_is_no_stall_while_any_counter_grows(counter: str) -> None:
    actor = FakeActor()
    for minute in range(600):
        actor.write(**{counter: float(minute + 1), "in_flight": 8.0})
        assert actor.stalled_after(60) == 0


def test_reports_of_an_actor_whose_episodes_stand_still_are_no_progress() -> None:
    actor = FakeActor()
    actor.write(**{SAMPLED_TOKENS: 500.0, TASK_CALLS: 7.0, "in_flight": 8.0})
    assert actor.stalled_after(10) == 0
    for second in range(100):
        actor.write(**{SAMPLED_TOKENS: 500.0, TASK_CALLS: 7.0, "in_flight": 8.0, "gate_blocked": second / 100})
        assert actor.stalled_after(6) == 6 * (second + 1)
    expected = "runs, but its episodes do not advance: 8 groups are in flight, after 500 sampled tokens and 7 calls"
    assert expected in actor.watch.describe()


def test_an_actor_that_writes_no_more_reports_is_gone() -> None:
    actor = FakeActor()
    assert (actor.stalled_after(5), actor.watch.describe()) == (5, "the actor has written no report")
    actor.write(**{SAMPLED_TOKENS: 500.0})
    assert actor.stalled_after(5) == 0
    assert actor.stalled_after(SILENT_SECONDS + 10) == SILENT_SECONDS + 10
    assert actor.watch.describe() == "the actor is gone or hangs: its last report (ready) came 40 s ago"


def test_counters_of_an_actor_that_is_restarted_again_and_again_are_no_progress() -> None:
    actor = FakeActor()
    actor.write(**{SAMPLED_TOKENS: 500.0})
    assert actor.stalled_after(10) == 0
    for restart in range(5):
        actor.report = ActorReport(float(restart), "starting")
        assert actor.stalled_after(10) == 10 * (restart + 1)
    actor.write(**{SAMPLED_TOKENS: 1.0})
    assert actor.stalled_after(10) == 0


def test_an_arrival_is_progress_whatever_the_actor_reports() -> None:
    actor = FakeActor()
    assert actor.stalled_after(50) == 50
    actor.watch.arrived()
    assert (actor.stalled_after(4), actor.watch.seconds_without_arrival()) == (4, 4)
    actor.write(**{TASK_CALLS: 1.0})
    assert (actor.stalled_after(4), actor.watch.seconds_without_arrival()) == (0, 8)


def test_the_report_is_read_at_most_once_in_a_while() -> None:
    actor = FakeActor()
    for _ in range(100):
        actor.stalled_after(LOOK_SECONDS / 10)
    assert actor.reads <= 11
