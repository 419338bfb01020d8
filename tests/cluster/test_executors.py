"""Jobs of `BatchExecutor` on a real Slurm, with a small function in place of the agent."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.errors import SchedulerError
from pipeline.run.paths import RunPaths
from pipeline.run.run_documents import Finished, RunIdentity
from pipeline.topology.plan import make_plan
from pipeline.utils import shared_files
from pipeline.utils.waiting import wait_for
from slurm.batch.executors import BatchExecutor, RunJob
from slurm.scheduler.scheduler_registry import batch_scheduler, connect_scheduler, detect_environment
from tests.cluster.slurm_cluster import SlurmCluster
from tests.fakes.configs import make_config
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.cluster

RANKS = 4
HET = {"hetjob": True, "inference": {"nodes": 2, "gpus": 2}, "trainer": {"gpus": 1}}
ONE = HET | {"hetjob": False}


@pytest.fixture
def slurm(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """The cluster, as a user finds it who is inside of another job."""
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    monkeypatch.setenv("SLURM_RESTART_COUNT", "5")
    monkeypatch.setenv("SLURM_NTASKS", "17")
    monkeypatch.setenv("SBATCH_PARTITION", "no-such-partition")
    return cluster


def submit(folder: Path, function: Callable[[], Any], resources: dict[str, Any], **cluster: Any) -> RunJob:
    """A job of a run that is finished already, so that its epilogue ends it."""
    run = RunPaths(folder / "it's a run")
    config = make_config(
        cluster={"scheduler": "slurm", **cluster}, resources=resources, task={"name": "arithmetic", "processes": 1}
    )
    shared_files.write_document(run.config, config.model_dump(mode="json"))
    shared_files.write_document(run.run, RunIdentity(run_id="test-1", created=0.0))
    shared_files.write_document(run.finished, Finished(time=0.0, steps=1, attempt=""))
    job = nodes_of(run, config).submit(function)
    assert isinstance(job, RunJob)
    return job


def nodes_of(run: RunPaths, config: RunConfig) -> BatchExecutor:
    return BatchExecutor(
        run,
        config,
        make_plan(config),
        run_id="test-1",
        scheduler=batch_scheduler("slurm"),
        queue=connect_scheduler("slurm"),
    )


def lines(job: RunJob, rank: int) -> list[str]:
    """What a rank printed, without submitit's own words."""
    said = job.task(rank).stdout() or ""
    return [line for line in said.splitlines() if line.startswith("> ")]


def wait_for_line(job: RunJob, line: str) -> None:
    """Until every rank's last line is this one."""

    def reached() -> bool:
        return all(lines(job, rank)[-1:] == [line] for rank in range(RANKS))

    wait_for(f"all ranks to say {line}", reached, WAIT_SECONDS, missing=lambda: str(job.stdout()))


def say_who_i_am() -> Callable[[], None]:
    def function() -> None:
        mine = detect_environment()
        print(">", mine.attempt, mine.rank, mine.ranks, mine.visible_gpus or "none")
        print("> error", file=sys.stderr)

    return function


def wait_for_a_signal() -> Callable[[], None]:
    def function() -> None:
        heard: list[str] = []
        for expected in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(expected, lambda number, _: heard.append(signal.Signals(number).name))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR2, signal.SIGTERM))
        print("> ready", os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
        end = time.monotonic() + 100
        while not heard and time.monotonic() < end:
            time.sleep(0.1)
        print(">", *heard[:1], flush=True)

    return function


@pytest.mark.parametrize(
    ("resources", "gpus"), [(ONE, ["0,1"] * RANKS), (HET, ["none", "0,1", "0,1", "0,1"])], ids=["one", "het"]
)
def test_each_node_has_one_rank_with_its_gpus_and_its_own_log(
    resources: dict[str, Any], gpus: list[str], slurm: SlurmCluster, tmp_path: Path
) -> None:
    job = submit(tmp_path, say_who_i_am(), resources, sbatch={"export": "NONE"})
    wait_for("the job to end", job.done, WAIT_SECONDS, missing=lambda: str(job.stdout()))
    assert job.state == "COMPLETED", job.stdout()
    said = [f"> {job.job_id}-0 {rank} {RANKS} {gpus[rank]}" for rank in range(RANKS)]
    assert [lines(job, rank) for rank in range(RANKS)] == [[line, "> error"] for line in said]
    assert job.results() == [None] * RANKS
    assert job.submission()._timeout_countdown < 0, "submitit would requeue the job by itself"
    assert slurm.job(job.job_id)["Comment"].strip() == "rollcall test-1"


@pytest.mark.parametrize("resources", [ONE, HET], ids=["one", "het"])
def test_a_requeued_job_starts_on_all_nodes_again_and_keeps_its_logs(
    resources: dict[str, Any], slurm: SlurmCluster, tmp_path: Path
) -> None:
    job = submit(tmp_path, wait_for_a_signal(), resources)
    wait_for_line(job, "> ready 0")
    slurm.run("scontrol", "requeue", job.job_id)
    wait_for_line(job, "> ready 1")
    assert not job.done(force_check=True)
    slurm.run("scancel", "--signal=USR2", job.job_id)
    wait_for("the job to end", job.done, WAIT_SECONDS, missing=lambda: str(job.stdout()))
    story = ["> ready 0", "> SIGTERM", "> ready 1", "> SIGUSR2"]
    assert [lines(job, rank) for rank in range(RANKS)] == [story] * RANKS
    assert job.state == "COMPLETED"


@pytest.mark.slow
def test_both_components_hear_that_the_time_limit_is_near(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = submit(tmp_path, wait_for_a_signal(), HET, time="1", notice_seconds=30)
    wait_for("the job to end", job.done, WAIT_SECONDS, missing=lambda: str(job.stdout()))
    assert [lines(job, rank) for rank in range(RANKS)] == [["> ready 0", "> SIGUSR2"]] * RANKS
    assert job.state == "COMPLETED"


def test_a_job_that_slurm_refuses_is_one_line_and_leaves_no_file(slurm: SlurmCluster, tmp_path: Path) -> None:
    with pytest.raises(SchedulerError) as caught:
        submit(tmp_path, say_who_i_am(), ONE, constraint="no_such_feature")
    assert str(caught.value) == ("sbatch refused the job: Batch job submission failed: Invalid feature specification")
    assert list(tmp_path.rglob("*_submission.sh")) == []


def test_a_cancelled_job_is_done(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = submit(tmp_path, wait_for_a_signal(), HET)
    wait_for_line(job, "> ready 0")
    job.cancel()
    wait_for("the job to end", lambda: job.done(force_check=True), WAIT_SECONDS, missing=lambda: str(job.stdout()))
    assert job.state == "CANCELLED"
    assert [lines(job, rank) for rank in range(RANKS)] == [["> ready 0", "> SIGTERM"]] * RANKS
