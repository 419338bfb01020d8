"""When an attached agent takes the attempt that it serves for ended, with an invented clock."""

import os
import time
from pathlib import Path

import pytest

from pipeline.roles.world_revisions import WorldRevisions
from pipeline.run.events import Events
from pipeline.run.paths import AttachedPaths, AttemptPaths
from pipeline.run.poll_rates import TOUCH_SECONDS
from pipeline.topology.plan import NodeInfo, NodeLoss, Placement, World
from pipeline.utils import shared_files
from pipeline.utils.shared_dir import FileSharedDir
from slurm.agent.attached_agent import AttemptWatch
from tests.fakes.clock import FakeClock
from tests.fakes.run_directory import FakeRun

SECONDS = 300
"""Longer than any agent may be silent."""


class Watched:
    """An attempt with one rank and a spare, whose heartbeats the test writes."""

    def __init__(self, root: Path) -> None:
        self.run = FakeRun(root)
        self.run.submit("7", kind="local")
        self.attempt: AttemptPaths = self.run.attempt("7-0").paths
        self.attempt.alive.mkdir(parents=True)
        near = {"addresses": ("127.0.0.3",), "probe_port": 0, "ports": (), "gpus": ()}
        spare = NodeInfo(rank=1, attempt="7-0", hostname="", pid=0, boot="", **near)
        self.world = World(
            run_id=self.attempt.run_id, attempt="7-0", epoch=1, leader=0, secret="s", placements=_on(0), spares=(spare,)
        )
        shared_files.write_document(self.attempt.world, self.world)
        self.clock, self._beats = FakeClock(), 0
        job = AttachedPaths(root / "attached" / "1")
        self.watch = AttemptWatch(job, self.attempt, self.run.config, self.clock)

    def end_after(self, seconds: float, *alive: int) -> str:
        """What the watch reports while these ranks write their heartbeats."""
        for _ in range(int(seconds / TOUCH_SECONDS)):
            self.clock.sleep(TOUCH_SECONDS)
            for rank in alive:
                self._beats += 1
                self.attempt.sign_of_life(rank).write_text(str(self._beats))
                _set_time(self.attempt.sign_of_life(rank), self._beats)
            if end := self.watch.end():
                return end
        return ""

    def replace_rank(self) -> None:
        loss = NodeLoss(rank=0, spare=1, cause="away")
        revised = World(
            run_id=self.world.run_id, attempt="7-0", epoch=1, leader=0, secret="s", placements=_on(1), losses=(loss,)
        )
        assert WorldRevisions(self.attempt).publish(revised)


def _on(rank: int) -> tuple[Placement, ...]:
    return (Placement(role="trainer", index=0, rank=rank, address="127.0.0.2", ports=(1,)),)


def _set_time(path: Path, seconds: int) -> None:
    os.utime(path, (time.time() + seconds, time.time() + seconds))


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "run")


def test_an_attempt_whose_agents_write_heartbeats_runs(watched: Watched) -> None:
    assert watched.end_after(SECONDS, 0) == ""


def test_an_attempt_without_heartbeats_has_ended(watched: Watched) -> None:
    watched.end_after(20, 0)
    assert "no sign of life" in watched.end_after(SECONDS)


def test_a_spare_node_that_took_the_place_of_the_only_rank_is_observed_in_its_place(watched: Watched) -> None:
    watched.end_after(20, 0)
    until_lost = watched.run.config.cluster.heartbeat_seconds
    assert watched.end_after(until_lost) == "", "the attempt's own agents find the loss no sooner"
    watched.replace_rank()
    assert watched.end_after(SECONDS, 1) == ""
    assert "no sign of life" in watched.end_after(SECONDS)


def test_an_event_of_the_attempt_is_its_end(watched: Watched) -> None:
    Events(watched.attempt, FileSharedDir(watched.attempt.root)).publish("failed", "trainer.0", "killed")
    assert watched.end_after(20, 0) == "attempt 7-0: killed (trainer.0)"
