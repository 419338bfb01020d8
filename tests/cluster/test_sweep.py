"""A sweep on a real Slurm: one point is preempted, one fails, the same command takes up the rest."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.run.paths import RunPaths
from pipeline.run.run_documents import SubmittedJob
from pipeline.utils import shared_files
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.slurm_run import SlurmRun, launch
from tests.cluster.sweep_task import BROKEN_SEED
from tests.support import forks

STEPS = 40
POINTS = [f"{number}-seed_{number + 1}" for number in range(3)]
BROKEN = POINTS[BROKEN_SEED - 1]
PREEMPTED = POINTS[0]
SWEEP = (
    "seed=range(1,4)",
    "task.name=tests.cluster.sweep_task:BrokenForOneSeed",
    "training.steps=0",
    f"training.sft.steps={STEPS}",
    "training.checkpoint_every=20",
    "cluster.max_failures=1",
    "cluster.exclusive=true",
    "cluster.max_jobs=2",
)
"""SFT alone, on one node a point."""


@pytest.fixture
def overrides() -> tuple[str, ...]:
    """Those of the sweep, whose trainers are forked by the tests' server: four attempts need not import torch again."""
    shared = [f"export {name}={address}" for name, address in forks.of_runs().items()]
    return *SWEEP, f"cluster.setup={json.dumps(shared)}"


def submitted(sweep: Path) -> dict[str, str]:
    """The job of each point, as its run has it on record."""
    records = {name: shared_files.read_document(RunPaths(sweep / name).job, SubmittedJob) for name in POINTS}
    return {name: record.job for name, record in records.items() if record is not None}


def table(cluster: SlurmCluster, sweep: Path) -> dict[str, dict[str, Any]]:
    """What `runs.py` says of each point."""
    told = launch(cluster, sweep.parent, "", f"sweep={sweep}", "--json", script="runs.py")
    assert told.returncode == 0, told.stderr
    document = json.loads(told.stdout)
    assert document["source"] == "the scheduler and files"
    return {line["name"]: line for line in document["runs"]}


@pytest.mark.cluster
@pytest.mark.slow
def test_a_sweep_survives_a_preemption_and_a_failure_and_is_taken_up_again(
    cluster: SlurmCluster, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    sweep = tmp_path / "seeds"
    first = launch(cluster, tmp_path, "seeds", "-m", "--detach", *overrides)
    assert first.returncode == 0, first.stdout + first.stderr
    jobs = submitted(sweep)
    assert sorted(jobs) == POINTS
    assert len(set(jobs.values())) == 3

    points = {name: SlurmRun(cluster, RunPaths(sweep / name)) for name in POINTS}
    assert cluster.job(jobs[POINTS[2]])["Dependency"].startswith(f"afterany:{jobs[PREEMPTED]}")
    points[PREEMPTED].wait_for_step(2, job="sft")
    cluster.run("scontrol", "requeue", jobs[PREEMPTED])
    points[PREEMPTED].wait_for_step(STEPS, job="sft")
    assert points[POINTS[2]].rows(job="sft") == []  # a requeue is no end of the job that it waits for
    ends = {name: point.wait_for_end() for name, point in points.items()}

    assert {name: end["JobState"] for name, end in ends.items()} == {
        name: "FAILED" if name == BROKEN else "COMPLETED" for name in POINTS
    }, points[BROKEN].output()
    assert {name: int(end["Restarts"]) for name, end in ends.items()} == {
        name: int(name == PREEMPTED) for name in POINTS
    }
    for name in POINTS:
        steps = [row["step"] for row in points[name].rows(job="sft")]
        assert steps == ([] if name == BROKEN else list(range(1, STEPS + 1))), points[name].output()

    lines = table(cluster, sweep)
    assert {name: line["state"] for name, line in lines.items()} == {
        name: "failed" if name == BROKEN else "finished" for name in POINTS
    }
    assert "the task is broken" in lines[BROKEN]["failure"]
    assert lines[PREEMPTED]["attempts"] == 2

    again = launch(cluster, tmp_path, "seeds", "-m", "--detach", *overrides)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "3 points, 2 finished, 1 to submit" in again.stdout
    later = submitted(sweep)
    assert [name for name in POINTS if later[name] != jobs[name]] == [BROKEN]

    cancelled = launch(cluster, tmp_path, "", f"sweep={sweep}", script="cancel.py")
    assert cancelled.returncode == 0, cancelled.stderr
    assert f"{BROKEN}: job {later[BROKEN]}" in cancelled.stdout
    assert cluster.job(later[BROKEN])["JobState"] == "CANCELLED"
    assert table(cluster, sweep)[BROKEN]["live"] is False
