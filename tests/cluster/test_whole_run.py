"""Whole runs as Slurm jobs, submitted as a user submits them."""

import re
from pathlib import Path

import pytest

from pipeline.observability.run_history import read_history
from pipeline.topology.plan import Placement
from slurm.batch.executors import RunJob
from slurm.scheduler.slurm.slurm_commands import SlurmCommands
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.slurm_run import SlurmRun, follow, launch
from tests.patience import WAIT_SECONDS
from tests.support.runs.launched import STEPS, TWO_RANKS

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SHAPE = (
    "resources.hetjob=true",
    "resources.inference.nodes=1",
    "resources.trainer.gpus=1",
    "resources.inference.gpus=2",
    TWO_RANKS,
)


def where(run: SlurmRun, attempt: int) -> dict[str, Placement]:
    world = run.world(attempt)
    assert world is not None
    return {place.name: place for place in world.placements}


def test_a_heterogeneous_job_that_is_requeued_goes_on_to_its_end(cluster: SlurmCluster, tmp_path: Path) -> None:
    shown = launch(cluster, tmp_path, "r", "--dry-run", *SHAPE)
    assert shown.returncode == 0, shown.stderr
    assert not (tmp_path / "r").exists()

    with follow(cluster, tmp_path, "r", *SHAPE) as (launcher, run):
        run.wait_for_step(7)
        cluster.run("scontrol", "requeue", run.job)
        fields = run.wait_for_end()
        followed, _ = launcher.communicate(timeout=WAIT_SECONDS)
    assert launcher.returncode == 0, followed
    assert f"submitted job {run.job}\n" in followed
    assert f"finished {STEPS} steps" in followed
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), run.output()
    assert run.finished is not None, run.output()
    assert run.finished.steps == STEPS
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1)), "each once, on the weights before"
    assert [attempt.attempt for attempt in run.attempts] == [f"{run.job}-0", f"{run.job}-1"]
    outcomes = [run.outcome(attempt) for attempt in (0, 1)]
    assert [outcome.decision for outcome in outcomes if outcome is not None] == ["left", "finished"]
    resumed = [row["step"] for row in run.rows() if row["attempt"] == f"{run.job}-1"]
    assert resumed[0] >= 7

    planned = re.findall(r"rank (\d): (.*)", shown.stdout)
    told = {int(rank): {word.split()[0] for word in roles.split(", ")} for rank, roles in planned}
    for attempt in (0, 1):
        placed = where(run, attempt)
        gpus = {name: place.gpus for name, place in placed.items() if place.gpus}
        assert gpus == {"trainer.0": (0, 1), "inference.0": (0, 1)}
        assert told == {rank: {n for n, place in placed.items() if place.rank == rank} for rank in range(3)}
        assert {placed[name].rank for name in ("redis.0", "actor.0", "preprocessor.0")} == {0}
        assert run.node_infos(attempt)[0].gpus == ()
        assert [len(node_info.gpus) for node_info in run.node_infos(attempt)[1:]] == [2, 2]

    folder = run.run.submitit / "slurm"
    batch = (folder / f"{run.job}_submission.sh").read_text()
    identity = read_history(run.run.root).identity
    assert identity is not None
    assert shown.stdout.partition("#!")[2].replace("r-????????", identity.run_id) == batch.partition("#!")[2]
    job = RunJob(folder, run.job, range(3), run=run.run, queue=SlurmCommands())
    assert all("Job completed successfully" in (job.task(rank).stdout() or "") for rank in range(3))
