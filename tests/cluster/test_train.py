"""Runs with trainers only on a real Slurm: the jobs of files, followed, failed, interrupted in every way.

python -m pytest -m "cluster and trial" tests/cluster/test_train.py trains real models there, and waits for requeues.
"""

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.run.paths import RunPaths
from tests.cluster.disturbances import PARTITIONS, PATIENCE, WAYS
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.slurm_run import SlurmRun, launch
from tests.support.models.jobs import STEPS, events, write_job, write_model

pytestmark = [pytest.mark.cluster, pytest.mark.trial, pytest.mark.timeout(2 * PATIENCE)]
LONG, DISTURBED = 1200, 100
"""Steps that take so long that what happens at one of them comes before the last."""


@pytest.fixture
def idle(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    yield cluster
    cluster.clear()


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    """An empty folder of jobs beside their base model."""
    write_model(tmp_path / "base")
    (tmp_path / "queue").mkdir()
    return tmp_path / "queue"


def train(slurm: SlurmCluster, queue: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    root = queue.parent
    own = ("cluster=slurm", f"output={root / 'runs'}", f"model.path={root / 'base'}", "resources.trainer.nodes=2")
    keys = (
        "resources.trainer.processes=1",
        "model.init=pretrained",
        "model.max_length=48",
        "cluster.fs_visibility_seconds=2",
    )
    return launch(slurm, root, "queue", str(queue), *own, *keys, *arguments, script="train.py", seconds=PATIENCE)


def test_jobs_are_done_on_two_nodes_and_followed_here(idle: SlurmCluster, queue: Path) -> None:
    write_job(queue, "sft", "1-sft")
    write_job(queue, "rl", "2-rl", checkpoint="1-sft-model")
    ended = train(idle, queue)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert ended.stdout.splitlines()[:3] == [
        f"queue  the jobs of {queue}",
        "  rank 0: trainer.0",
        "  rank 1: trainer.1",
    ]
    assert f"finished {2 * STEPS} steps" in ended.stdout
    assert [events(queue / f"{name}.jsonl")[-1] for name in ("1-sft", "2-rl")] == ["finished", "finished"]
    assert sorted(path.name for path in (queue / "done").iterdir()) == ["1-sft.json", "2-rl.json"]


def test_a_job_that_fails_there_fails_here_with_its_reason_and_is_not_queued_again(
    idle: SlurmCluster, queue: Path
) -> None:
    write_job(queue, "rl", checkpoint="gone")
    ended = train(idle, queue)
    assert ended.returncode == 1
    assert f"TrainingError: failed: rl.json (see {queue / 'failed'})" in ended.stderr
    assert "no job file is left that another attempt could execute" in ended.stderr
    run = SlurmRun(idle, RunPaths(queue.parent / "runs" / "queue"))
    outcome = run.outcome()
    assert outcome is not None
    assert (outcome.decision, len(run.attempts)) == ("stopped", 1)
    assert "gone" in (queue / "failed" / "rl.error").read_text()
    assert (queue / "rl-data").exists()


@pytest.mark.parametrize("way", ["notice", "signal", "requeue", "grace", "no grace"])
def test_an_interrupted_job_is_queued_again_and_does_each_step_once(way: str, idle: SlurmCluster, queue: Path) -> None:
    schedule = {"steps": LONG, "batch": 5, "optim": {"lr": 1e-4}}
    write_job(queue, "sft", schedule=schedule)
    partition = PARTITIONS.get(way, "low")
    ended = train(idle, queue, "--detach", f"cluster.partition={partition}", "training.checkpoint_every=200")
    assert ended.returncode == 0, ended.stderr
    run = SlurmRun(idle, RunPaths(queue.parent / "runs" / "queue"))
    run.wait_for_step(DISTURBED, PATIENCE, job="sft")
    WAYS[way](idle, run, random.Random(0))
    assert run.wait_for_end(PATIENCE)["JobState"] == "COMPLETED", run.output()
    assert run.fields()["Restarts"] == "1"
    rows = run.rows(job="sft")
    assert [(row["step"], row["done"]) for row in rows] == [(step, step) for step in range(1, LONG + 1)]
    assert len({row["attempt"] for row in rows}) == 2
    assert (queue / "done" / "sft.json").exists()
    assert not (queue / "failed").exists()
