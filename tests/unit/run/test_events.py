"""Events: told once, in one order, however late anybody sees them."""

from pathlib import Path

from pipeline.run.events import Events
from pipeline.run.paths import AttemptPaths
from tests.fakes.clock import FakeClock
from tests.fakes.disk import Disk, Faults, View

PATHS = AttemptPaths(Path(), "r", "7-0")


def test_the_first_teller_wins_and_the_order_is_the_order_of_telling(tmp_path: Path) -> None:
    one, other = (Events(AttemptPaths(tmp_path, "r", "7-0")) for _ in range(2))
    assert one.publish("draining", "agent.0", "SIGTERM")
    assert not other.publish("draining", "agent.1", "SIGUSR2")
    assert other.publish("failed", "actor.0", "died")
    assert [(name, event.by) for name, event in one.read_all().items()] == [
        ("draining", "agent.0"),
        ("failed", "actor.0"),
    ]
    assert sorted(path.name for path in (tmp_path / "attempts/7-0/events").iterdir()) == ["1.json", "2.json"]


def test_who_cannot_see_what_was_told_before_does_not_come_before_it() -> None:
    disk = Disk(FakeClock(), Faults(lags={1: 60.0}))
    blind, seeing = Events(PATHS, View(disk, 1)), Events(PATHS, View(disk, 2))
    seeing.publish("draining", "agent.2")
    assert blind.publish("failed", "agent.1")
    assert list(seeing.read_all()) == ["draining", "failed"]


def test_an_event_that_two_told_is_that_of_the_first_for_both() -> None:
    clock = FakeClock()
    disk = Disk(clock, Faults(lags={1: 60.0}))
    blind, seeing = Events(PATHS, View(disk, 1)), Events(PATHS, View(disk, 2))
    seeing.publish("draining", "agent.2")
    assert blind.publish("draining", "agent.1")
    clock.sleep(60.0)
    assert [events.read_all()["draining"].by for events in (blind, seeing)] == ["agent.2", "agent.2"]


def test_what_is_known_is_not_read_again() -> None:
    disk = Disk(FakeClock(), Faults())
    events = Events(PATHS, View(disk, 1))
    events.publish("draining", "agent.2")
    reader = Events(PATHS, View(disk, 2))
    for _ in range(5):
        assert reader.get("draining") is not None
    assert disk.operations["read"] == 1
