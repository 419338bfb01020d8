"""Following a job until it is over, and printing how it ended.

Owns the launcher's output after a job was started, and its exit code, which is the run's: 0 finished, 1 failed, 128
plus the signal's number interrupted (the same command resumes the run). Promises that Ctrl-C does not end a queued job,
and that neither the report nor a shared file system that fails for a while or shows files late changes the exit code.
"""

import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from pipeline.checkpoints import log_newest
from pipeline.config.frozen_config import read_frozen_config
from pipeline.errors import DeadlineError, one_line
from pipeline.observability.postmortem_archive import postmortem_of
from pipeline.observability.run_history import RUNS, read_history
from pipeline.run.completion import is_finished
from pipeline.run.events import LAUNCHER, Event, Events
from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.run.run_documents import Finished, Outcome
from pipeline.utils import shared_files
from pipeline.utils.fs_retry import FINAL_WRITE_TIMEOUT, retry_transient
from pipeline.utils.shared_dir import FileSharedDir
from pipeline.utils.user_commands import user_command
from pipeline.utils.waiting import CLOCK, Clock, wait_for
from slurm.batch.attempt_summary import refresh_listing
from slurm.batch.executors import RunJob
from slurm.monitor.live_view import follow_run
from slurm.registry import run_registry
from slurm.submission.launcher_signals import describe, exit_code

LINE = 100
"""Characters of a line."""
CANCELLED = "CANCELLED"
MAY_BE_FINISHED = ("COMPLETED", "UNKNOWN")
"""The scheduler's states of a job whose run finished: UNKNOWN once it has dropped the job's record."""


def print_job(job: RunJob) -> None:
    """Print the submitted job and the commands that watch or cancel it, from any machine."""
    name = shlex.quote(run_title(job.run.root))
    print(f"submitted job {job.job_id}")
    print(f"  run         {job.run.root}")
    print(f"  watch       {user_command('watch')} run={name}")
    print(f"  cancel      {user_command('cancel')} run={name}", flush=True)


def run_title(root: Path) -> str:
    """The run's title in commands: its name below `runs/`, else its directory."""
    below = RUNS.resolve()
    return str(root.relative_to(below)) if root.is_relative_to(below) else str(root)


def follow_job(job: RunJob, interrupted: Sequence[signal.Signals]) -> int:
    """Show the run until its job is over. Returns the run's exit code, or 0 if a signal ended the display."""
    follow_run(job.run.root, lambda: bool(interrupted) or job.done())
    if interrupted:
        return _leave(job, "continues")
    return conclude_job(job, interrupted=interrupted)


def _leave(job: RunJob, state: str) -> int:
    print(f"left; job {job.job_id} {state}", flush=True)
    return 0


def conclude_job(job: RunJob, clock: Clock = CLOCK, interrupted: Sequence[signal.Signals] = ()) -> int:
    """Print how the job ended, as its last attempt recorded it. Returns the exit code, or 0 if a signal is added to
    `interrupted` before the end is visible in the run's files."""
    attempt = retry_transient(
        "the end of the job", lambda: _last_attempt(job, clock, interrupted), FINAL_WRITE_TIMEOUT, clock
    )
    if interrupted:
        return _leave(job, f"has ended ({job.state})")
    if attempt is not None:
        return conclude_run(job.run, attempt, [], job.state, clock)
    print(f"job {job.job_id} ended before it started ({job.state}); the same command submits it again", file=sys.stderr)
    return exit_code(signal.SIGTERM) if job.state == CANCELLED else 1


def _last_attempt(job: RunJob, clock: Clock, interrupted: Sequence[signal.Signals]) -> AttemptPaths | None:
    """The job's last attempt, once the job's end is visible in the run's files; None if it never had one."""
    refresh_listing(job.run)
    if job.state in MAY_BE_FINISHED:
        _await_end(job, clock, interrupted)
    attempt = run_registry.last_attempt(job.run, job.job_id)
    if attempt is None and is_finished(job.run):
        attempt = job.run.attempt(run_registry.identity(job.run).run_id, f"{job.job_id}-0")
    return attempt


def _await_end(job: RunJob, clock: Clock, interrupted: Sequence[signal.Signals]) -> None:
    """Wait until the job's end is visible in the run's files, at most the visibility delay of the file system, or until
    a signal arrives. A signal does not end the pause between two looks, so the pause is short."""
    config = read_frozen_config(job.run)

    def shows() -> bool:
        if interrupted:
            return True
        refresh_listing(job.run)
        attempt = run_registry.last_attempt(job.run, job.job_id)
        outcome = _outcome(attempt) if attempt is not None else None
        return is_finished(job.run) or (outcome is not None and outcome.decision != "requeued")

    try:
        late = config.cluster.lateness if config is not None else 0.0
        wait_for("the end of the run", shows, late, longest_pause=1.0, clock=clock)
    except DeadlineError:
        return  # `_print_end` then reports an end without a reason


def _outcome(attempt: AttemptPaths) -> Outcome | None:
    FileSharedDir(attempt.root).names()  # listing makes NFS drop a cached absence of the file
    return shared_files.read_document(attempt.outcome, Outcome)


def conclude_run(
    paths: RunPaths,
    attempt: AttemptPaths,
    interrupted: Sequence[signal.Signals],
    job_state: str = "",
    clock: Clock = CLOCK,
) -> int:
    """Print how the run ended and where its results are, then write the report and print its recommendations.

    Args:
        interrupted: the signals that this launcher received and ended the run for.
        job_state: the scheduler's state of the ended job; empty for a local run.

    Returns:
        The exit code. A failure to write the report or the post-mortem does not change it.
    """
    code, text = retry_transient(
        "the end of the run", lambda: _end_of(paths, attempt, interrupted, job_state), FINAL_WRITE_TIMEOUT, clock
    )
    print(text, file=sys.stderr if code else sys.stdout, flush=True)
    if code == 1 and (archive := postmortem_of(attempt)) is not None:
        print(f"  post-mortem {archive}, for a bug report", file=sys.stderr)
    try:
        from pipeline.observability.findings import findings_of
        from pipeline.observability.report_page import (
            write_report,  # imports the charts, as slow as all other imports together
        )

        history = read_history(paths.root, alive=False)
        print(f"  report      {write_report(history)}", flush=True)
        for finding in findings_of(history.config, history.rows):
            line = f"  to change   {finding.observation} {finding.change} {finding.page}"
            print(fill(line, LINE, subsequent_indent=" " * 14, break_on_hyphens=False), flush=True)
    except Exception as error:  # noqa: BLE001 (the exit code of the run stands, whatever the report raises)
        reason = one_line(error)
        print(f"warning: the report could not be written: {reason}", file=sys.stderr)
    return code


def _end_of(
    paths: RunPaths, attempt: AttemptPaths, interrupted: Sequence[signal.Signals], job_state: str
) -> tuple[int, str]:
    """The run's exit code, and how it ended in words."""
    finished, outcome = shared_files.read_document(paths.finished, Finished), _outcome(attempt)
    if finished is not None or (outcome is not None and outcome.decision == "finished"):
        steps = f" {finished.steps} steps" if finished is not None else ""
        return 0, f"finished{steps}\n  metrics     {paths.metrics}\n{_results_text(paths)}"
    if failure := _failure_text(attempt, outcome):
        return 1, failure
    if interrupted:
        return exit_code(interrupted[0]), f"{describe(interrupted[0])}; the same command {_resume_text(paths)}"
    draining = Events(attempt).get("draining")
    if draining is not None or job_state == CANCELLED:
        return exit_code(signal.SIGTERM), f"{_interruption(draining)}; the same command {_resume_text(paths)}"
    how = f" ({job_state})" if job_state else ""
    return 1, f"failed: the job ended without a reason{how}; see its output in {paths.submitit}"


def _interruption(draining: Event | None) -> str:
    if draining is None:
        return "interrupted: the job was cancelled"
    if draining.by == LAUNCHER:
        return draining.detail
    return f"interrupted: {draining.by} received an end request ({draining.detail})"


def _failure_text(attempt: AttemptPaths, outcome: Outcome | None) -> str:
    """The failure of the attempt; empty if there was none.

    A stopped job has failed even if no role did: when a rank is lost, the scheduler signals the agents, which only
    drain.
    """
    failure = shared_files.read_document(attempt.first_failure, FirstFailure)
    if failure is not None:
        decision = f"\n  {outcome.decision}: {outcome.reason}" if outcome is not None else ""
        return f"failed: {failure.one_line()}\n  {attempt.first_failure}{decision}"
    if outcome is not None and outcome.decision == "stopped":
        return f"failed: {outcome.reason}\n  {attempt.outcome}"
    return ""


def _results_text(paths: RunPaths) -> str:
    config = read_frozen_config(paths)
    if config is not None and config.training.jobs:
        return f"  jobs        {config.training.jobs}"
    if config is not None and config.evaluation.only:
        return f"  found       {paths.evaluation}"
    return f"  checkpoint  {log_newest(paths, '{}', 'none')}\n  model       {paths.model}"


def _resume_text(paths: RunPaths) -> str:
    return log_newest(paths, "resumes it from {}", "starts it over, since it had no checkpoint yet")
