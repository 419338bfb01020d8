"""What a user who submits to a real Slurm is told, before a job runs."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.slurm_run import SlurmRun, follow, launch

pytestmark = pytest.mark.cluster

LATER = "cluster.sbatch.begin=now+1hour"


@pytest.fixture
def slurm(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    yield cluster
    cluster.run("scancel", "--quiet", f"--user={os.getuid()}")


def queued(slurm: SlurmCluster) -> list[str]:
    return slurm.run("squeue", "--noheader", "--format=%i").split()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("cluster.partition=lowe", "did you mean low?"),
        ("resources.nodes=5", "resources.nodes"),
        ("cluster.time=2h", "cluster.time='2h'"),
        ("resources.inference.gpus=3", "resources.inference.gpus"),
        ("cluster.sbatch.nodes=2", "cluster.sbatch.nodes=2: expected an option that is not Rollcall's own"),
        ("cluster.sbatch.no_such_option=1", "no-such-option"),
        ("cluster.constraint=no_such_feature", "nvalid feature"),
        ("output=/tmp/50%", "which Slurm reads as its own"),
    ],
)
def test_what_slurm_would_refuse_is_one_line_and_nothing_is_queued(
    arguments: str, said: str, slurm: SlurmCluster, tmp_path: Path
) -> None:
    ended = launch(slurm, tmp_path / "runs", "r", "--detach", *arguments.split())
    assert said in ended.stderr
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert ended.stderr.startswith("error: ")
    assert queued(slurm) == []
    assert not (tmp_path / "runs").exists()


def test_a_job_that_waits_is_live_and_its_run_is_refused(slurm: SlurmCluster, tmp_path: Path) -> None:
    run = SlurmRun.start(slurm, tmp_path, "r", LATER)
    assert queued(slurm) == [run.job]
    refused = launch(slurm, tmp_path, "r", "--detach", LATER)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert f"job {run.job}" in refused.stderr
    slurm.run("scancel", run.job)
    again = SlurmRun.start(slurm, tmp_path, "r", LATER)
    assert queued(slurm) == [again.job] != [run.job]


def test_ctrl_c_leaves_the_job_alone(slurm: SlurmCluster, tmp_path: Path) -> None:
    with follow(slurm, tmp_path, "r", LATER) as (process, run):
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert f"left; job {run.job} continues" in said
    assert run.fields()["JobState"] == "PENDING"


def test_a_job_cancelled_in_the_queue_ends_the_launcher_as_an_interruption(slurm: SlurmCluster, tmp_path: Path) -> None:
    with follow(slurm, tmp_path, "r", LATER) as (process, run):
        slurm.run("scancel", run.job)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 143, said
    assert f"job {run.job} ended before it started (CANCELLED)" in said
