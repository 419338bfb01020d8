"""Whole runs as Slurm jobs, submitted as a user submits them."""

import re
from pathlib import Path

import pytest

from pipeline.report.history import read_history
from pipeline.rundir.paths import RunPaths
from pipeline.world.plan import Placement
from slurm.batch.executors import RunJob
from slurm.scheduler.commands import SlurmCommands
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.slurm_run import SlurmRun, launch
from tests.support.runs.launched import STEPS

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

GPUS = ("resources.trainer.gpus=1", "resources.inference.gpus=2")


def where(run: SlurmRun, attempt: int) -> dict[str, Placement]:
    world = run.world(attempt)
    assert world is not None
    return {place.name: place for place in world.placements}


def assert_whole(run: SlurmRun) -> None:
    """Every step was trained exactly once, on the weights of the step before."""
    assert run.finished is not None, run.output()
    assert run.finished.steps == STEPS
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))


def test_the_demo_runs_to_its_end_as_one_job_of_four_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    shown = launch(cluster, tmp_path, "r", "--dry-run", *GPUS)
    assert shown.returncode == 0, shown.stderr
    assert not (tmp_path / "r").exists()

    followed = launch(cluster, tmp_path, "r", *GPUS, seconds=300)
    assert followed.returncode == 0, followed.stdout + followed.stderr
    assert f"finished {STEPS} steps" in followed.stdout
    run = SlurmRun(cluster, RunPaths(tmp_path / "r"))
    assert f"submitted job {run.job}\n" in followed.stdout
    fields = run.fields()
    assert (fields["JobState"], fields["Restarts"], fields["NumNodes"]) == ("COMPLETED", "0", "4"), run.output()
    assert_whole(run)
    outcome = run.outcome()
    assert outcome is not None
    assert outcome.decision == "finished"

    placed = where(run, 0)
    assert {name: place.gpus for name, place in placed.items() if place.gpus} == {
        "trainer.0": (0, 1),
        "inference.0": (0, 1),
        "inference.1": (0, 1),
    }
    assert len({place.rank for place in placed.values()}) == 4
    planned = re.findall(r"rank (\d): (.*)", shown.stdout)
    told = {int(rank): {word.split()[0] for word in roles.split(", ")} for rank, roles in planned}
    assert told == {rank: {n for n, place in placed.items() if place.rank == rank} for rank in range(4)}

    folder = run.run.submitit / "slurm"
    batch = (folder / f"{run.job}_submission.sh").read_text()
    identity = read_history(run.run.root).identity
    assert identity is not None
    assert shown.stdout.partition("#!")[2].replace("r-????????", identity.run_id) == batch.partition("#!")[2]
    job = RunJob(folder, run.job, range(4), run=run.run, scheduler=SlurmCommands())
    assert all("Job completed successfully" in (job.task(rank).stdout() or "") for rank in range(4))


def test_a_heterogeneous_job_that_is_requeued_goes_on_where_it_was(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = SlurmRun.start(cluster, tmp_path, "het", "resources.layout=het", "resources.inference.nodes=1", *GPUS)
    run.wait_for_step(7)
    cluster.run("scontrol", "requeue", run.job)
    fields = run.wait_for_end()
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), run.output()
    assert_whole(run)
    assert [attempt.attempt for attempt in run.attempts] == [f"{run.job}-0", f"{run.job}-1"]
    first = run.outcome(0)
    assert first is not None
    assert first.decision == "left"
    for attempt in (0, 1):
        placed = where(run, attempt)
        assert {placed[name].rank for name in ("redis.0", "actor.0", "preprocessor.0")} == {0}
        assert run.cards(attempt)[0].gpus == ()
        assert [len(card.gpus) for card in run.cards(attempt)[1:]] == [2, 2]
    resumed = [row["step"] for row in run.rows() if row["attempt"] == f"{run.job}-1"]
    assert resumed[0] >= 7
