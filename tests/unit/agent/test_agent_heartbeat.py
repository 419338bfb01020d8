"""Heartbeat files that are touched and read rarely, answers in their place, and waits for one marker of many."""

from pathlib import Path

import pytest

from pipeline.run.paths import AttemptPaths
from pipeline.run.poll_rates import MAX_LISTINGS_PER_SECOND, listing_interval
from pipeline.topology.plan import Placement
from pipeline.utils.shared_dir import FileSharedDir
from slurm.agent.agent_heartbeat import FRESH_TOUCHES, ExitMarkers, HeartbeatFile, OtherAgents, mark_down
from slurm.agent.loss_rule import LATE_SECONDS, LATE_TOUCHES, UNREACHABLE_SECONDS, LinkSign
from slurm.agent.neighbor_watch import NeighborCheck
from tests.fakes.clock import FakeClock
from tests.fakes.disk import Disk, Faults, View

RANKS = 5


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def paths(tmp_path: Path) -> AttemptPaths:
    return AttemptPaths(tmp_path, "r", "a-0")


@pytest.fixture
def disk(clock: FakeClock) -> Disk:
    return Disk(clock, Faults())


class Link:
    """What the link to the neighbor shows, and whether another rank reaches it."""

    sign: LinkSign = "answers"
    reached = False

    def look(self, rank: int) -> LinkSign:
        assert rank == 3
        return self.sign

    def is_reached(self, rank: int) -> bool:
        return self.reached


def look(neighbor: NeighborCheck, clock: FakeClock, seconds: float) -> str:
    """What the watch of the neighbor returns last, looking every five seconds."""
    lost = ""
    for _ in range(0, int(seconds), 5):
        clock.sleep(5)
        lost = neighbor.look()
    return lost


def test_a_neighbor_that_answers_is_alive_whatever_its_file_says(paths: AttemptPaths, clock: FakeClock) -> None:
    link = Link()
    neighbor = NeighborCheck(paths, 3, 60.0, clock, peers=link, touch_seconds=20)
    assert look(neighbor, clock, 1000) == ""
    link.sign = "accepts"
    assert look(neighbor, clock, 60) == ""
    assert look(neighbor, clock, 20).startswith("no sign of life for ")


def test_a_neighbor_that_only_the_network_lost_is_alive_by_its_file(paths: AttemptPaths, clock: FakeClock) -> None:
    link, heartbeat = Link(), HeartbeatFile(paths, 3, 20.0, clock)
    link.sign = "accepts"
    neighbor = NeighborCheck(paths, 3, 60.0, clock, peers=link, touch_seconds=20)
    for _ in range(20):
        heartbeat.touch()
        assert look(neighbor, clock, 20) == ""
    assert look(neighbor, clock, 100).startswith("no sign of life for ")


def test_a_neighbor_that_cannot_be_connected_is_lost_unless_another_rank_reaches_it(
    paths: AttemptPaths, clock: FakeClock
) -> None:
    link = Link()
    neighbor = NeighborCheck(paths, 3, 60.0, clock, peers=link, touch_seconds=20)
    assert look(neighbor, clock, 10) == ""
    link.sign, link.reached = "unreachable", True
    assert look(neighbor, clock, UNREACHABLE_SECONDS + 5) == ""
    link.reached = False
    assert look(neighbor, clock, UNREACHABLE_SECONDS) == "", "it was reached, so only its heartbeat counts"
    assert look(neighbor, clock, 30).startswith("no sign of life for ")
    link.sign = "answers"
    assert look(neighbor, clock, 5) == ""
    link.sign = "unreachable"
    assert look(neighbor, clock, UNREACHABLE_SECONDS) == ""
    assert look(neighbor, clock, 5).startswith("its node is unreachable, no connection for 20 s")


def test_an_agent_touches_its_file_when_questions_stay_away_and_not_while_they_come(
    paths: AttemptPaths, clock: FakeClock
) -> None:
    heartbeat, touches, step = HeartbeatFile(paths, 0, 1000.0, clock), list[float](), 0.5

    def live(seconds: float, *, asked: bool) -> None:
        for _ in range(int(seconds / step)):
            clock.sleep(step)
            if asked:
                heartbeat.vouch()
            if paths.sign_of_life(0).exists():
                paths.sign_of_life(0).unlink()
            heartbeat.touch_if_due()
            touches.extend([clock.now()] if paths.sign_of_life(0).exists() else [])

    live(500, asked=False)
    assert touches == [step], "nobody has asked yet"
    live(100, asked=True)
    assert len(touches) == 1
    last = clock.now()
    live(100, asked=False)
    assert touches[1:] == [last + LATE_SECONDS * number for number in range(1, LATE_TOUCHES + 1)]


def test_the_file_is_read_no_more_often_than_it_is_touched(paths: AttemptPaths, clock: FakeClock) -> None:
    link, heartbeat = Link(), HeartbeatFile(paths, 3, 20.0, clock)
    link.sign = "accepts"
    neighbor = NeighborCheck(paths, 3, 60.0, clock, peers=link, touch_seconds=1000)
    heartbeat.touch()
    assert look(neighbor, clock, 55) == ""
    heartbeat.touch()
    assert look(neighbor, clock, 20).startswith("no sign of life for "), "the second touch was not read"


def test_an_agent_is_fresh_only_while_it_reaches_the_shared_file_system(paths: AttemptPaths, clock: FakeClock) -> None:
    heartbeat = HeartbeatFile(paths, 0, 5.0, clock)
    assert not heartbeat.is_fresh(), "it was never touched"
    heartbeat.touch()
    assert heartbeat.is_fresh()
    paths.alive.rename(paths.alive.with_name("away"))
    paths.alive.write_text("in the way: the disk fails")
    clock.sleep(FRESH_TOUCHES * 5.0)
    heartbeat.touch()
    assert not heartbeat.is_fresh()
    paths.alive.unlink()
    heartbeat.touch()
    assert heartbeat.is_fresh()


def test_an_agent_that_waits_for_the_last_one_lists_the_markers_rarely(disk: Disk, clock: FakeClock) -> None:
    ranks = 10 * MAX_LISTINGS_PER_SECOND
    others = OtherAgents(View(disk, 0), ranks, clock)
    for _ in range(100):
        assert not others.have_exited()
        clock.sleep(1.0)
    assert disk.operations["list"] <= 2 * (100 / listing_interval(ranks) + 1), "the folder above is listed too"


def test_what_one_agent_finds_in_the_markers_the_others_learn_without_a_listing(disk: Disk, clock: FakeClock) -> None:
    view, waiting = View(disk, 1), [OtherAgents(View(disk, rank), RANKS, clock) for rank in range(RANKS)]
    for rank in range(RANKS):
        clock.sleep(1.0)
        assert not any(others.have_exited() for others in waiting)
        mark_down(view, rank)
    clock.sleep(1.0)
    assert waiting[0].have_exited()
    lists = disk.operations["list"]
    assert all(others.have_exited() for others in waiting)
    assert disk.operations["list"] == lists


def test_a_failing_disk_is_no_reason_to_leave_before_the_others(clock: FakeClock) -> None:
    disk = Disk(clock, Faults(outages={0: (10.0, 20.0)}))
    others = OtherAgents(View(disk, 0), 1, clock)
    mark_down(View(disk, 1), 0)
    clock.time = 15.0
    assert not others.have_exited()
    clock.time = 25.0
    assert others.have_exited()


def placed(rank: int) -> Placement:
    return Placement(role="inference", index=rank, rank=rank, address="10.0.0.1")


def test_roles_are_down_by_their_own_markers_or_those_of_their_agents(disk: Disk, clock: FakeClock) -> None:
    markers, view = ExitMarkers(View(disk, 9), 1.0, clock), View(disk, 1)
    roles = [placed(rank) for rank in range(RANKS)]
    assert markers.are_down([])
    for rank in range(RANKS):
        clock.sleep(1.0)
        assert not markers.are_down(roles)
        if rank % 2:
            mark_down(view, rank)
        else:
            view.replace(f"down/inference.{rank}", "stopped")
    assert not markers.are_down(roles), "one look in a second"
    clock.sleep(1.0)
    assert markers.are_down(roles)
    assert disk.operations["list"] <= RANKS


def test_a_name_is_there_if_a_listing_has_it(tmp_path: Path) -> None:
    directory = FileSharedDir(tmp_path)
    assert not directory.has("down/agent.0"), "there is no folder"
    (tmp_path / "down").mkdir()
    assert not directory.has("down/agent.0")
    directory.create("down/agent.0", "left")
    assert directory.has("down/agent.0")
