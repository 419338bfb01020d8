"""What the launcher says when a job is over, its exit code, and what interrupts it."""

import errno
import os
import signal
from pathlib import Path
from typing import Literal

import pytest
from msgspec import Struct

from pipeline.errors import SchedulerError
from pipeline.observability.run_history import read_attempt
from pipeline.run.events import LAUNCHER, Events
from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.run.run_documents import Finished, Outcome, RunIdentity
from pipeline.utils import shared_files
from pipeline.utils.shared_dir import FileSharedDir
from slurm.batch.executors import RunJob
from slurm.registry import run_registry
from slurm.scheduler.scheduler_protocol import PENDING, RUNNING
from slurm.submission.launcher_signals import describe
from slurm.submission.tail_job import conclude_job, conclude_run, follow_job, run_title
from tests.fakes.clock import FakeClock
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun
from tests.fakes.scheduler import FakeScheduler


@pytest.fixture
def ended(tmp_path: Path) -> tuple[RunPaths, AttemptPaths]:
    run = RunPaths(tmp_path / "run")
    run.root.mkdir()
    return run, run.attempt("r", "a-0")


def test_the_end_is_told_before_the_report_is_tried(
    ended: tuple[RunPaths, AttemptPaths], capsys: pytest.CaptureFixture[str]
) -> None:
    run, attempt = ended
    shared_files.write_document(run.finished, Finished(time=0.0, steps=3, attempt="a-0"))
    run.report.mkdir()
    assert conclude_run(run, attempt, []) == 0
    said = capsys.readouterr()
    assert said.out.startswith("finished 3 steps")
    assert said.err.startswith("warning: the report could not be written: IsADirectoryError")
    run.report.rmdir()
    assert conclude_run(run, attempt, []) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"  report      {run.report}"


def test_at_the_end_of_a_run_it_is_told_what_its_numbers_say_should_be_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = {"steps": 40, "prompts_per_step": 4, "max_lag": 4}
    loss = {"name": "grpo", "old_logprobs": "sampler", "tis": "none"}
    run = FakeRun(tmp_path / "run", make_config(training=training, loss=loss))
    attempt = run.attempt("a-0")
    attempt.train("rl", range(1, 41), clip_fraction=0.27)
    run.finish(40)
    assert conclude_run(run.paths, attempt.paths, []) == 0
    *_, report, first, second, third = capsys.readouterr().out.splitlines()
    assert report == f"  report      {run.paths.report}"
    assert first.startswith("  to change   The clip holds 27% of the tokens")
    assert "loss.old_logprobs=recompute" in second
    assert third.startswith(" " * 14)
    assert third.endswith(" docs/algorithms.md#lag")
    assert "<b>Set loss.old_logprobs=recompute" in run.paths.report.read_text()


def test_no_checkpoint_is_promised_where_there_is_none(
    ended: tuple[RunPaths, AttemptPaths], capsys: pytest.CaptureFixture[str]
) -> None:
    assert conclude_run(*ended, [signal.SIGINT]) == 130
    assert "starts it over, since it had no checkpoint yet" in capsys.readouterr().err


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "demo")
    shared_files.write_document(paths.run, RunIdentity(run_id="demo-1", created=0.0))
    return paths


@pytest.fixture
def slurm() -> FakeScheduler:
    return FakeScheduler()


def job_of(run: RunPaths, slurm: FakeScheduler, clock: FakeClock | None = None) -> RunJob:
    return RunJob(run.submitit / "slurm", slurm.submit(), [0, 1], run=run, queue=slurm, clock=clock or FakeClock())


def begin(run: RunPaths, name: str) -> AttemptPaths:
    attempt = run.attempt("demo-1", name)
    attempt.root.mkdir(parents=True)
    return attempt


def test_a_job_that_was_requeued_is_told_by_its_newest_attempt(run: RunPaths) -> None:
    for name in ("7-9", "7-10", "17-11", "70-12", "7-x", "7-11-old"):
        begin(run, name)
    newest = run_registry.last_attempt(run, "7")
    assert newest is not None
    assert newest.attempt == "7-10"
    assert run_registry.last_attempt(run, "1") is None


def test_a_job_cancelled_in_the_queue_can_be_submitted_again(
    run: RunPaths, slurm: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(run, slurm)
    slurm.cancel(job.job_id)
    assert follow_job(job, []) == 143
    assert f"job {job.job_id} ended before it started (CANCELLED)" in capsys.readouterr().err


def test_a_job_that_never_came_to_run_has_failed(run: RunPaths, slurm: FakeScheduler) -> None:
    job = job_of(run, slurm)
    slurm.set(job.job_id, "BOOT_FAIL")
    assert conclude_job(job) == 1


def test_a_cancelled_job_is_an_interruption_though_nobody_drained(
    run: RunPaths, slurm: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(run, slurm)
    begin(run, f"{job.job_id}-0")
    slurm.set(job.job_id, "CANCELLED")
    assert conclude_job(job) == 143
    assert "interrupted: the job was cancelled; the same command starts it over" in capsys.readouterr().err


def test_a_job_that_stopped_says_what_failed_and_why_it_is_not_requeued(
    run: RunPaths, slurm: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(run, slurm)
    attempt = begin(run, f"{job.job_id}-0")
    failure = FirstFailure(role="trainer.0", rank=1, cause="killed by SIGKILL", time=0.0, log="", exit_code=-9)
    shared_files.write_document(attempt.first_failure, failure)
    shared_files.write_document(attempt.outcome, Outcome(decision="stopped", reason="3 failed attempts", time=0.0))
    slurm.set(job.job_id, "FAILED")
    assert conclude_job(job) == 1
    said = capsys.readouterr().err
    assert "failed: trainer.0 on rank 1: killed by SIGKILL" in said
    assert "stopped: 3 failed attempts" in said


def test_a_job_that_stopped_after_a_lost_rank_has_failed_though_its_agents_were_told_to_end(
    run: RunPaths, slurm: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(run, slurm)
    attempt = begin(run, f"{job.job_id}-0")
    Events(attempt).publish("draining", "agent.1", "SIGTERM")
    shared_files.write_document(
        attempt.outcome, Outcome(decision="stopped", reason="rank 0 ended without an exit marker", time=0.0)
    )
    slurm.set(job.job_id, "FAILED")
    assert conclude_job(job) == 1
    said = capsys.readouterr().err
    assert said.startswith("failed: rank 0 ended without an exit marker\n")
    assert "interrupted" not in said


@pytest.mark.parametrize("decision", ["left", "requeued"])
def test_a_job_that_was_cancelled_while_it_drained_is_an_interruption(
    decision: Literal["left", "requeued"], run: RunPaths, slurm: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(run, slurm)
    attempt = begin(run, f"{job.job_id}-0")
    Events(attempt).publish("draining", "agent.1", "SIGTERM")
    shared_files.write_document(
        attempt.outcome, Outcome(decision=decision, reason="the scheduler ends the job", time=0.0)
    )
    slurm.set(job.job_id, "CANCELLED")
    assert conclude_job(job) == 143
    assert "interrupted: agent.1 received an end request (SIGTERM)" in capsys.readouterr().err


def test_an_interruption_at_the_launcher_is_told_as_what_it_was(
    ended: tuple[RunPaths, AttemptPaths], capsys: pytest.CaptureFixture[str]
) -> None:
    """By whoever tells the end: the launcher itself, one that waited for a run of another, and the report."""
    run, attempt = ended
    Events(attempt).publish("draining", LAUNCHER, describe(signal.SIGINT), patient=True)
    for interrupted in ([signal.SIGINT], []):
        conclude_run(run, attempt, interrupted)
        assert capsys.readouterr().err.startswith("interrupted by Ctrl-C (SIGINT) at the launcher; the same command ")
    Path(attempt.timeline).mkdir(parents=True)
    line = '{"time": 1.0, "role": "trainer.0", "rank": 0, "state": "stopped"}'
    attempt.timeline_of(0).write_text(f"{line}\n")
    assert read_attempt(attempt).end == ("interrupted", "interrupted by Ctrl-C (SIGINT) at the launcher")


def test_who_leaves_a_job_leaves_it_alone(
    run: RunPaths, slurm: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(run, slurm)
    assert follow_job(job, [signal.SIGINT]) == 0
    assert f"left; job {job.job_id} continues" in capsys.readouterr().out
    assert (slurm.cancelled, slurm.jobs[job.job_id].state) == ([], PENDING)


def test_a_job_is_done_only_when_slurm_says_so_whatever_results_lie_about(run: RunPaths, slurm: FakeScheduler) -> None:
    job = job_of(run, slurm)
    for rank in (0, 1):
        result = job.task(rank).paths.result_pickle
        result.parent.mkdir(parents=True, exist_ok=True)
        result.touch()
    states = []
    for state in (PENDING, RUNNING, "COMPLETING", PENDING, "COMPLETED"):
        slurm.set(job.job_id, state)
        states.append((job.done(force_check=True), job.state))
    assert states == [
        (False, PENDING),
        (False, RUNNING),
        (False, "COMPLETING"),
        (False, PENDING),
        (True, "COMPLETED"),
    ]


def test_a_job_that_slurm_forgot_is_over(run: RunPaths, slurm: FakeScheduler) -> None:
    job = job_of(run, slurm)
    slurm.forget(job.job_id)
    assert (job.done(), job.state) == (True, "UNKNOWN")


def test_slurm_is_not_asked_at_every_look(run: RunPaths, slurm: FakeScheduler) -> None:
    clock = FakeClock()
    job = job_of(run, slurm, clock)
    assert not job.done()
    slurm.set(job.job_id, "FAILED")
    assert not job.done()
    clock.sleep(10)
    assert job.done()


def test_a_controller_that_is_restarted_does_not_end_the_watch(run: RunPaths, slurm: FakeScheduler) -> None:
    clock = FakeClock()
    job = job_of(run, slurm, clock)
    slurm.fail("job", times=3)
    for _ in range(3):
        clock.sleep(100)
        assert not job.done()
    clock.sleep(100)
    assert (job.done(), job.state) == (False, PENDING)
    slurm.fail("job", times=100)
    clock.sleep(601)
    with pytest.raises(SchedulerError):
        job.done()


def test_a_disk_that_fails_does_not_end_the_watch(
    run: RunPaths, slurm: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(run, slurm)
    failing_reads(monkeypatch, run.finished.name, errno.EIO, times=100)
    assert (job.done(), job.state) == (False, PENDING)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", ["config.json", "run.json", "finished.json", "outcome.json", "first_failure.json"])
def test_a_disk_that_fails_for_a_while_does_not_change_the_exit_code(
    run: RunPaths, slurm: FakeScheduler, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    job = job_of(run, slurm)
    on_slurm(run)
    first = begin(run, f"{job.job_id}-0")
    shared_files.write_document(first.outcome, Outcome(decision="finished", reason="it is finished", time=0.0))
    slurm.set(job.job_id, "COMPLETED")
    failing_reads(monkeypatch, name, number, times=5)
    assert conclude_job(job, FakeClock()) == 0


def failing_reads(monkeypatch: pytest.MonkeyPatch, name: str, number: int, times: int) -> None:
    """The first reads of each file of this name fail."""
    read, left = Path.read_bytes, iter(range(times))

    def failing(path: Path) -> bytes:
        if path.name == name and next(left, None) is not None:
            raise OSError(number, os.strerror(number), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", failing)


def test_cancelling_the_handle_cancels_the_job(run: RunPaths, slurm: FakeScheduler) -> None:
    job = job_of(run, slurm)
    job.cancel()
    assert slurm.cancelled == [job.job_id]


def test_a_run_is_called_as_the_other_launchers_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_title(tmp_path / "runs" / "demo") == "demo"
    assert run_title(tmp_path / "runs" / "sweep" / "0") == "sweep/0"
    assert run_title(tmp_path / "elsewhere" / "demo") == str(tmp_path / "elsewhere" / "demo")


LATE = 40.0


@pytest.fixture
def late_names(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeClock, dict[Path, Struct]]:
    """A clock, and documents of which each is there once its folder is listed after `LATE` seconds."""
    clock, late = FakeClock(), dict[Path, Struct]()
    names = FileSharedDir.names

    def listed(directory: FileSharedDir, folder: str = "") -> tuple[str, ...]:
        for path in [path for path in late if clock.now() >= LATE and path.parent == directory._root / folder]:
            shared_files.write_document(path, late.pop(path))
        return names(directory, folder)

    monkeypatch.setattr(FileSharedDir, "names", listed)
    return clock, late


def on_slurm(run: RunPaths) -> None:
    tree = make_config(cluster={"scheduler": "slurm"}).model_dump(mode="json")
    shared_files.write_document(run.config, tree)


def test_a_run_whose_end_is_seen_late_has_finished(
    run: RunPaths,
    slurm: FakeScheduler,
    late_names: tuple[FakeClock, dict[Path, Struct]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock, late = late_names
    job = job_of(run, slurm)
    on_slurm(run)
    begin(run, f"{job.job_id}-0")
    late[run.finished] = Finished(time=0.0, steps=3, attempt=f"{job.job_id}-0")
    slurm.set(job.job_id, "COMPLETED")
    assert conclude_job(job, clock) == 0
    assert capsys.readouterr().out.startswith("finished 3 steps\n")


def test_the_outcome_of_the_newest_attempt_also_tells_that_a_run_finished(
    run: RunPaths,
    slurm: FakeScheduler,
    late_names: tuple[FakeClock, dict[Path, Struct]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock, late = late_names
    job = job_of(run, slurm)
    on_slurm(run)
    first = begin(run, f"{job.job_id}-0")
    failure = FirstFailure(role="trainer.0", rank=1, cause="killed by SIGKILL", time=0.0, log="", exit_code=-9)
    shared_files.write_document(first.first_failure, failure)
    shared_files.write_document(first.outcome, Outcome(decision="requeued", reason="a lost rank", time=0.0))
    late[begin(run, f"{job.job_id}-1").outcome] = Outcome(decision="finished", reason="it is finished", time=0.0)
    slurm.set(job.job_id, "COMPLETED")
    assert conclude_job(job, clock) == 0
    assert capsys.readouterr().out.startswith("finished\n")


def test_an_end_that_never_shows_is_waited_for_no_longer_than_it_may_be_late(
    run: RunPaths, slurm: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = FakeClock()
    job = job_of(run, slurm)
    on_slurm(run)
    begin(run, f"{job.job_id}-0")
    slurm.set(job.job_id, "COMPLETED")
    assert conclude_job(job, clock) == 1
    assert clock.now() == pytest.approx(make_config(cluster={"scheduler": "slurm"}).cluster.lateness)
    assert "failed: the job ended without a reason (COMPLETED)" in capsys.readouterr().err


def test_a_signal_ends_the_wait_for_an_end_that_does_not_show_yet(
    run: RunPaths, slurm: FakeScheduler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, interrupted = FakeClock(), list[signal.Signals]()
    job = job_of(run, slurm)
    on_slurm(run)
    begin(run, f"{job.job_id}-0")
    slurm.set(job.job_id, "COMPLETED")
    sleep = clock.sleep

    def pressed(seconds: float) -> None:
        sleep(seconds)
        if clock.now() > 3 and not interrupted:
            interrupted.append(signal.SIGINT)

    monkeypatch.setattr(clock, "sleep", pressed)
    assert conclude_job(job, clock, interrupted) == 0
    assert clock.now() < 5
    assert f"left; job {job.job_id} has ended (COMPLETED)" in capsys.readouterr().out


def test_an_end_that_shows_is_not_waited_for(run: RunPaths, slurm: FakeScheduler) -> None:
    clock = FakeClock()
    job = job_of(run, slurm)
    on_slurm(run)
    begin(run, f"{job.job_id}-0")
    shared_files.write_document(run.finished, Finished(time=0.0, steps=3, attempt=f"{job.job_id}-0"))
    slurm.set(job.job_id, "COMPLETED")
    assert conclude_job(job, clock) == 0
    assert clock.slept == []
