"""Cancelling: the right job is told, and nothing else."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.run.events import LAUNCHER, Events
from pipeline.run.paths import RunPaths, SweepPaths
from pipeline.utils import shared_files
from slurm.registry import run_registry, sweep_manifest
from slurm.registry.file_locks import lock_holder
from slurm.scheduler.scheduler_protocol import RUNNING, JobQueue
from slurm.submission import cancel_runs
from slurm.submission.cancel_runs import cancel, cancel_sweep, main
from tests.fakes.clock import FakeClock
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun
from tests.fakes.scheduler import FakeScheduler

HOLDS = """
import signal, sys
from pathlib import Path
from pipeline.run.paths import RunPaths
from slurm.registry import run_registry as runs
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
with runs.held_by_job(RunPaths(Path(sys.argv[1]))):
    print("held", flush=True)
    signal.sigtimedwait({signal.SIGTERM}, 60)
"""
"""A local job that ends when it is told to."""
SUBMITS = """
import sys, time
from pathlib import Path
from slurm.registry import file_locks as locks
path = Path(sys.argv[1])
with path.open("a+") as lock:
    assert locks.take_lock(lock.fileno(), path)
    print("held", flush=True)
    time.sleep(60)
"""
"""A launcher that submits a sweep."""


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "demo")


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def local_job(run: FakeRun) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDS, str(run.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def no_scheduler(_name: str) -> JobQueue:
    raise AssertionError("a local run asks no scheduler")


def queued(run: FakeRun, scheduler: FakeScheduler, state: str = RUNNING) -> str:
    job = scheduler.submit("demo", comment=f"rollcall {run.identity.run_id}", state=state)
    run_registry.record_job(run.paths, "slurm", job)
    return job


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_job_in_the_queue_is_cancelled_whether_it_runs_or_not(
    run: FakeRun, scheduler: FakeScheduler, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = queued(run, scheduler, state)
    assert cancel([run.paths], lambda _: scheduler) == 0
    assert scheduler.cancelled == [job]
    assert capsys.readouterr().out.splitlines() == [
        f"demo: job {job} ({state}) was cancelled and will not be queued again",
        "demo: over; it had no checkpoint yet",
    ]


def test_it_waits_until_the_job_is_over(run: FakeRun) -> None:
    class Slow(FakeScheduler):
        def cancel(self, job: str) -> None:
            self.set(job, "COMPLETING")
            self.cancelled.append(job)

    class Clock(FakeClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.time > 10:
                slow.set(job, "CANCELLED")

    slow, clock = Slow(), Clock()
    job = queued(run, slow)
    assert cancel([run.paths], lambda _: slow, clock) == 0
    assert 10 < clock.time < 12


def test_a_job_that_does_not_end_is_an_error_in_bounded_time(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    class Deaf(FakeScheduler):
        def cancel(self, job: str) -> None:
            self.cancelled.append(job)

    deaf, clock = Deaf(), FakeClock()
    queued(run, deaf)
    assert cancel([run.paths], lambda _: deaf, clock) == 1
    assert "demo to end" in capsys.readouterr().err
    assert clock.time < 120


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "CANCELLED"])
def test_a_job_that_is_over_leaves_nothing_to_cancel(
    run: FakeRun, scheduler: FakeScheduler, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    queued(run, scheduler, state)
    assert cancel([run.paths], lambda _: scheduler) == 0
    assert scheduler.cancelled == []
    assert capsys.readouterr().out == "nothing to cancel: no job of demo is live\n"


def test_another_job_that_got_the_same_id_is_left_alone(run: FakeRun, scheduler: FakeScheduler) -> None:
    run_registry.record_job(run.paths, "slurm", scheduler.submit("thesis", comment="", state=RUNNING))
    assert cancel([run.paths], lambda _: scheduler) == 0
    assert scheduler.cancelled == []


def test_attached_jobs_that_cannot_be_read_do_not_keep_the_run_from_its_end(
    run: FakeRun, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(owner: RunPaths) -> list[RunPaths]:
        raise OSError(errno.EIO, "Input/output error")

    job = queued(run, scheduler)
    monkeypatch.setattr(cancel_runs, "unfinished_jobs", fail)
    assert cancel([run.paths], lambda _: scheduler) == 1
    assert scheduler.cancelled == [job]
    assert "error: jobs attached to demo: [Errno 5] Input/output error" in capsys.readouterr().err


def test_a_silent_scheduler_is_an_error_and_not_nothing_to_cancel(
    run: FakeRun, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    queued(run, scheduler)
    scheduler.fail("job")
    assert cancel([run.paths], lambda _: scheduler) == 1
    told = capsys.readouterr()
    assert "error: demo: job: Socket timed out" in told.err
    assert "nothing to cancel" not in told.out


def test_a_local_job_is_told_by_a_signal_and_waited_for(
    run: FakeRun, local_job: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_registry.record_job(run.paths, "local", "local1")
    assert cancel([run.paths], no_scheduler) == 0
    assert local_job.wait(10) == 0
    assert f"demo: process {local_job.pid} ({run.root}) was signalled to end" in capsys.readouterr().out


def test_a_run_that_nobody_runs_has_nothing_to_cancel(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert cancel([run.paths], no_scheduler) == 0
    assert "nothing to cancel" in capsys.readouterr().out


def test_a_job_that_is_not_on_record_is_found_and_cancelled(tmp_path: Path, scheduler: FakeScheduler) -> None:
    run = FakeRun(tmp_path / "demo", make_config(cluster={"scheduler": "slurm"}))
    assert cancel([run.paths], lambda _: scheduler) == 0
    assert scheduler.cancelled == []
    job = scheduler.submit("demo", comment=f"rollcall {run.identity.run_id}")
    assert cancel([run.paths], lambda _: scheduler) == 0
    assert scheduler.cancelled == [job]


def test_a_launcher_that_is_submitting_ends_first_and_then_its_job_is_cancelled(
    tmp_path: Path, scheduler: FakeScheduler
) -> None:
    run = FakeRun(tmp_path / "demo", make_config(cluster={"scheduler": "slurm"}))
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(run.root)], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout
        assert launcher.stdout.readline() == "held\n"

        def queue_after_it(_name: str) -> JobQueue:
            launcher.wait(10)  # it sleeps until it is told
            queued(run, scheduler)
            return scheduler

        assert cancel([run.paths], queue_after_it) == 0
    assert scheduler.cancelled == ["1"]


def test_a_process_that_got_the_number_of_a_launcher_is_left_alone(run: FakeRun) -> None:
    lock = run.paths.lock
    lock.write_text(f"pid {os.getpid()} on {os.uname().nodename}\n")
    assert lock_holder(lock) is None


def test_a_held_lock_whose_text_names_another_process_is_an_error(
    run: FakeRun, local_job: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run.paths.job_lock.write_text(f"pid {os.getpid()} on {os.uname().nodename}\n")
    assert cancel([run.paths], no_scheduler) == 1
    assert "held, but not by pid" in capsys.readouterr().err
    assert local_job.poll() is None


def test_a_local_run_of_another_machine_is_cancelled_there(
    run: FakeRun, local_job: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run.paths.job_lock.write_text(f"pid {local_job.pid} on elsewhere\n")
    assert cancel([run.paths], no_scheduler) == 1
    assert "it runs on elsewhere: cancel it there" in capsys.readouterr().err
    assert local_job.poll() is None


def test_a_sweep_is_cancelled_point_by_point(
    tmp_path: Path, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_manifest.extended(None, [], [["seed=1"], ["seed=2"], ["seed=3"]])
    paths = SweepPaths(tmp_path / "seeds")
    jobs = [queued(FakeRun(paths.point(point.name).root), scheduler) for point in sweep.points[:2]]
    shared_files.write_document(paths.manifest, sweep)
    monkeypatch.setattr("slurm.submission.cancel_runs.connect_scheduler", lambda _: scheduler)
    assert main([f"sweep={paths.root}"]) == 0
    assert scheduler.cancelled == jobs
    assert "1-seed_2: over" in capsys.readouterr().out


def test_a_point_that_cannot_be_cancelled_keeps_no_other_from_it(
    tmp_path: Path, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_manifest.extended(None, [], [["seed=1"], ["seed=2"]])
    paths = SweepPaths(tmp_path / "seeds")
    jobs = [queued(FakeRun(paths.point(point.name).root), scheduler) for point in sweep.points]
    shared_files.write_document(paths.manifest, sweep)
    paths.point(sweep.points[0].name).job.write_text("{")
    assert cancel_sweep(paths, lambda _: scheduler) == 1
    assert scheduler.cancelled == jobs[1:]
    assert "error: 0-seed_1: " in capsys.readouterr().err


def test_a_local_run_that_waits_for_its_checkpoint_is_told_to_end_within_its_grace(
    run: FakeRun, local_job: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_registry.record_job(run.paths, "local", "local1")
    attempt = run.attempt("local1-0")
    Events(attempt.paths).publish("draining", LAUNCHER, "interrupted", patient=True)
    assert cancel([run.paths], no_scheduler) == 0
    assert f"process {local_job.pid} ({run.root}) was signalled to end" in capsys.readouterr().out


def test_a_local_run_that_comes_down_already_is_only_waited_for(
    run: FakeRun, local_job: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_registry.record_job(run.paths, "local", "local1")
    run.attempt("local1-0").tell("draining", "agent.0", "SIGTERM")
    assert cancel([run.paths], no_scheduler, FakeClock()) == 1
    assert "is ending already" in capsys.readouterr().out
    assert local_job.poll() is None


def test_whoever_submits_a_sweep_is_told_before_its_points(
    tmp_path: Path, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_manifest.extended(None, [], [["seed=1"]])
    paths = SweepPaths(tmp_path / "seeds")
    job = queued(FakeRun(paths.point(sweep.points[0].name).root), scheduler)
    shared_files.write_document(paths.manifest, sweep)
    command = [sys.executable, "-c", SUBMITS, str(paths.lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        assert cancel_sweep(paths, lambda _: scheduler) == 0
        process.wait(10)  # it would sleep for a minute
    assert scheduler.cancelled == [job]
    assert f"process {process.pid}, which submits it, was signalled to end" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["run=none"], ["sweep=none"], ["sweep="], ["run=a", "run=b"]])
def test_what_cannot_be_found_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_a_point_is_found_below_its_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    FakeRun(tmp_path / "runs" / "seeds" / "0-seed_1")
    assert main(["run=seeds/0-seed_1"]) == 0
    assert main(["run=seeds/0-sed"]) == 2
    assert "found there: seeds/0-seed_1" in capsys.readouterr().err
    shared_files.write_document(
        tmp_path / "runs" / "seeds" / "sweep.json", sweep_manifest.extended(None, [], [["seed=1"]])
    )
    assert main(["run=seeds"]) == 2
    assert "seeds is a sweep: sweep=seeds" in capsys.readouterr().err
