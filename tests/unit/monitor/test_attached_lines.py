"""What the view of a run and the table of runs show of attached servers."""

import time

import pytest

from pipeline.run.paths import AttachedPaths
from slurm.monitor.run_snapshot import RoleLine
from slurm.monitor.run_watcher import read_snapshot
from slurm.monitor.runs_overview import Overview
from slurm.monitor.runs_table import cells_of
from slurm.registry import attached_jobs
from tests.fakes.run_directory import FakeAttempt, FakeRun
from tests.fakes.terminal import shown


class FakeNode(FakeAttempt):
    """A node of an attached job: one server."""

    def __init__(self, run: FakeRun, job: AttachedPaths, served: FakeAttempt, name: str) -> None:
        super().__init__(run, job.attempt("attached", f"{served.paths.attempt}.9-0.0"))
        self.role(name, 0, "ready")
        self.live(1, time.time())


@pytest.fixture
def served(attempt: FakeAttempt) -> FakeAttempt:
    attempt.meet()
    attempt.all_roles("starting", "ready")
    attempt.train("rl", range(1, 4))
    return attempt


def attached_roles(run: FakeRun) -> list[RoleLine]:
    return [role for role in read_snapshot(run.root).roles if role.attached]


def test_attached_servers_are_shown_while_their_node_serves(run: FakeRun, served: FakeAttempt) -> None:
    jobs = [attached_jobs.create_attached(run.paths, number, run.config) for number in (1, 2)]
    nodes = [FakeNode(run, job, served, f"inference.{job.number}") for job in jobs]
    assert [(role.name, role.attached, role.state) for role in attached_roles(run)] == [
        ("inference.1", 1, "ready"),
        ("inference.2", 2, "ready"),
    ]
    panel = shown(read_snapshot(run.root))
    assert "inference.2 +2" in " ".join(panel.split())
    (line,) = Overview(run.root.parent).look()
    assert line.attached == 2
    assert cells_of(line)[3] == "training +2"
    nodes[0].leave(0)
    assert [role.name for role in attached_roles(run)] == ["inference.2"]
    nodes[1].live(1, time.time() - 1000)
    assert not attached_roles(run), "a node that was killed is not shown"


def test_servers_of_an_earlier_attempt_are_not_shown(run: FakeRun, served: FakeAttempt) -> None:
    job = attached_jobs.create_attached(run.paths, 1, run.config)
    FakeNode(run, job, served, "inference.1")
    run.now += 10
    later = run.attempt("local2-0")
    later.meet()
    later.all_roles("starting")
    assert not attached_roles(run)
