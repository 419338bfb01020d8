"""Heartbeat files that are touched and read rarely, answers in their place, and waits for one marker of many."""

from pathlib import Path

import pytest

from pipeline.run.paths import AttemptPaths
from pipeline.run.poll_rates import MAX_LISTINGS_PER_SECOND, listing_interval
from pipeline.topology.plan import Placement
from pipeline.utils.shared_dir import FileSharedDir
from slurm.agent.agent_heartbeat import (
    FRESH_TOUCHES,
    ExitMarkers,
    HeartbeatFile,
    NeighborCheck,
    OtherAgents,
    mark_down,
)
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


class Answers:
    """Whether the neighbor's agent answers."""

    def __init__(self) -> None:
        self.now = True

    def __call__(self, rank: int) -> bool:
        assert rank == 3
        return self.now


def look(neighbor: NeighborCheck, clock: FakeClock, seconds: float) -> str:
    """What the watch of the neighbor returns last, looking every five seconds."""
    lost = ""
    for _ in range(0, int(seconds), 5):
        clock.sleep(5)
        lost = neighbor.look()
    return lost


def test_a_neighbor_that_answers_is_alive_whatever_its_file_says(paths: AttemptPaths, clock: FakeClock) -> None:
    answers = Answers()
    neighbor = NeighborCheck(paths, 3, 60.0, clock, answers=answers, read_seconds=20)
    assert look(neighbor, clock, 1000) == ""
    answers.now = False
    assert look(neighbor, clock, 60) == ""
    assert look(neighbor, clock, 20).startswith("no sign of life for ")


def test_a_neighbor_that_only_the_network_lost_is_alive_by_its_file(paths: AttemptPaths, clock: FakeClock) -> None:
    answers, heartbeat = Answers(), HeartbeatFile(paths, 3, 20.0, clock)
    answers.now = False
    neighbor = NeighborCheck(paths, 3, 60.0, clock, answers=answers, read_seconds=20)
    for _ in range(20):
        heartbeat.touch()
        assert look(neighbor, clock, 20) == ""
    assert look(neighbor, clock, 100).startswith("no sign of life for ")


def test_the_file_is_read_no_more_often_than_it_is_touched(paths: AttemptPaths, clock: FakeClock) -> None:
    answers, heartbeat = Answers(), HeartbeatFile(paths, 3, 20.0, clock)
    answers.now = False
    neighbor = NeighborCheck(paths, 3, 60.0, clock, answers=answers, read_seconds=1000)
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
