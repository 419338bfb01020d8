"""How a job is handed to sbatch when that does not answer: with an sbatch of our own on PATH."""

import errno
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import JobPaths

from pipeline.errors import SchedulerError
from pipeline.run.paths import RunPaths
from pipeline.topology.plan import make_plan
from slurm.batch.executors import BatchExecutor, RunJob
from slurm.scheduler.scheduler_protocol import SchedulerSilent
from slurm.scheduler.scheduler_registry import batch_scheduler
from slurm.scheduler.slurm import slurm_scheduler
from tests.fakes.clock import FakeClock
from tests.fakes.configs import make_config
from tests.fakes.scheduler import FakeScheduler

TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.fixture
def slurm() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "demo")


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script that is sbatch."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setattr(slurm_scheduler, "SUBMIT_SECONDS", 0.3)
    file = tmp_path / "bin" / "sbatch"
    file.parent.mkdir()
    return file


def write(sbatch: Path, script: str) -> None:
    sbatch.write_text(f"#!/bin/sh\n{script}\n")
    sbatch.chmod(0o755)


def submit(run: RunPaths, slurm: FakeScheduler, clock: FakeClock | None = None) -> RunJob:
    config = make_config(cluster={"scheduler": "slurm"})
    nodes = BatchExecutor(
        run,
        config,
        make_plan(config),
        run_id="demo-1",
        scheduler=batch_scheduler("slurm"),
        queue=slurm,
        clock=clock or FakeClock(),
    )
    job = nodes.submit(print)
    assert isinstance(job, RunJob)
    return job


def files_of(run: RunPaths) -> list[str]:
    return sorted(file.name for file in (run.submitit / "slurm").iterdir())


@pytest.mark.parametrize("script", ["exec sleep 60", f"echo '{TIMED_OUT}' >&2; exit 1", "echo welcome"])
def test_a_job_that_is_queued_without_an_answer_is_found_and_can_run(
    script: str, run: RunPaths, slurm: FakeScheduler, sbatch: Path
) -> None:
    write(sbatch, script)
    slurm.submit("demo", comment="rollcall demo-0")
    mine = slurm.submit("demo", comment="rollcall demo-1")
    slurm.fail("jobs_with", times=2)
    job = submit(run, slurm)
    assert job.job_id == mine
    assert job.paths.submitted_pickle.exists()
    assert (run.submitit / "slurm" / f"{mine}_submission.sh").exists()


def test_a_job_that_shows_in_the_queue_late_is_found(run: RunPaths, slurm: FakeScheduler, sbatch: Path) -> None:
    class Clock(FakeClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.time > 30 and not slurm.jobs:
                slurm.submit("demo", comment="rollcall demo-1")

    write(sbatch, "exec sleep 60")
    assert submit(run, slurm, Clock()).job_id == "1"


@pytest.mark.parametrize(
    ("failures", "said"),
    [
        (0, r"no answer in 0.3 s, and the queue shows no such job; the same command submits it, unless .*demo-1"),
        (100, r"and the queue shows no such job \(jobs_with: Socket timed out"),
    ],
)
def test_a_submission_that_nobody_knows_of_says_so_and_leaves_nothing(
    failures: int, said: str, run: RunPaths, slurm: FakeScheduler, sbatch: Path
) -> None:
    write(sbatch, "exec sleep 60")
    slurm.fail("jobs_with", times=failures)
    clock = FakeClock()
    with pytest.raises(SchedulerSilent, match=said):
        submit(run, slurm, clock)
    assert 60 <= clock.time < 80
    assert files_of(run) == []


def test_a_site_s_words_in_another_encoding_cost_no_queued_job(
    run: RunPaths, slurm: FakeScheduler, sbatch: Path
) -> None:
    write(sbatch, r"printf 'sbatch: Gr\374\337e\n' >&2; echo Submitted batch job 7")
    job = submit(run, slurm)
    assert job.job_id == "7"
    assert job.paths.submitted_pickle.exists()


@pytest.mark.parametrize("refused", ["submission_file", "submitted_pickle"])
def test_a_queued_job_whose_files_the_disk_refuses_is_cancelled(
    refused: str, run: RunPaths, slurm: FakeScheduler, sbatch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = slurm.submit("demo", comment="rollcall demo-1")
    write(sbatch, f"echo Submitted batch job {mine}")
    move = JobPaths.move_temporary_file

    def refuse(paths: JobPaths, file: Path, name: str, **options: Any) -> None:
        if name == refused:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        move(paths, file, name, **options)

    monkeypatch.setattr(JobPaths, "move_temporary_file", refuse)
    with pytest.raises(OSError, match="Disk quota exceeded"):
        submit(run, slurm)
    assert not slurm.jobs_with("demo-1")
    assert not [name for name in files_of(run) if name.endswith(".pkl")]


def test_a_refusal_is_believed_at_once_and_leaves_nothing(run: RunPaths, slurm: FakeScheduler, sbatch: Path) -> None:
    write(sbatch, "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1")
    slurm.fail("jobs_with")
    with pytest.raises(SchedulerError, match=r"^sbatch refused the job: .*Invalid account$") as caught:
        submit(run, slurm)
    assert not isinstance(caught.value, SchedulerSilent)
    assert files_of(run) == []


def test_what_an_earlier_job_left_stays(run: RunPaths, slurm: FakeScheduler, sbatch: Path) -> None:
    write(sbatch, "echo Submitted batch job 7")
    submit(run, slurm)
    before = files_of(run)
    write(sbatch, "exit 1")
    with pytest.raises(SchedulerError):
        submit(run, slurm)
    assert before == files_of(run) != []
