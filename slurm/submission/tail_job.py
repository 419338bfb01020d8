"""Following a job until it is over, and how it ended.

Owns what the launcher says after a job was started, and its exit code, which is the run's: 0 finished, 1 failed, 128
and the signal's number interrupted (the run can be resumed by the same command). Promises that Ctrl-C leaves a Slurm
job alone, and that neither the report nor an end which this machine sees late changes how a run ended.
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
from pipeline.observability.run_history import RUNS, read_history
from pipeline.run.completion import is_finished
from pipeline.run.events import LAUNCHER, Event, Events
from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.run.run_documents import Finished, Outcome
from pipeline.utils import shared_files
from pipeline.utils.shared_dir import FileSharedDir
from pipeline.utils.waiting import CLOCK, Clock, wait_for
from slurm.batch.attempt_summary import MAX_PAUSE, refresh_listing
from slurm.batch.executors import RunJob
from slurm.monitor.live_view import follow_run
from slurm.registry import run_registry
from slurm.submission.launcher_signals import describe, exit_code

LINE = 100
"""Characters of a line."""
CANCELLED = "CANCELLED"
MAY_BE_FINISHED = ("COMPLETED", "UNKNOWN")
"""Slurm's words for a job whose run finished: the second when it has forgotten the job."""


def print_job(job: RunJob) -> None:
    """What was submitted, and what can be done with it from here or from anywhere else."""
    name = shlex.quote(run_title(job.run.root))
    print(f"submitted job {job.job_id}")
    print(f"  run         {job.run.root}")
    print(f"  watch       python launchers/watch.py run={name}")
    print(f"  cancel      python launchers/cancel.py run={name}", flush=True)


def run_title(root: Path) -> str:
    """What the launchers call a run: its name below `runs/`, else its directory."""
    below = RUNS.resolve()
    return str(root.relative_to(below)) if root.is_relative_to(below) else str(root)


def follow_job(job: RunJob, interrupted: Sequence[signal.Signals]) -> int:
    """Show the run until its Slurm job is over; the exit code: the run's, or 0 when the watcher was told to leave."""
    follow_run(job.run.root, lambda: bool(interrupted) or job.done())
    if not interrupted:
        return conclude_job(job)
    print(f"left; job {job.job_id} goes on", flush=True)
    return 0


def conclude_job(job: RunJob, clock: Clock = CLOCK) -> int:
    """Say how the job ended, from the attempt that it made last; the exit code."""
    refresh_listing(job.run)
    if job.state in MAY_BE_FINISHED:
        _await_end(job, clock)
    attempt = last_attempt(job.run, job.job_id)
    if attempt is not None or is_finished(job.run):
        named = attempt or job.run.attempt(run_registry.identity(job.run).run_id, f"{job.job_id}-0")
        return conclude_run(job.run, named, [], job.state)
    print(f"job {job.job_id} ended before it started ({job.state}); the same command submits it again", file=sys.stderr)
    return exit_code(signal.SIGTERM) if job.state == CANCELLED else 1


def last_attempt(run: RunPaths, job: str) -> AttemptPaths | None:
    """The job's newest attempt; None before its first."""
    pairs = [folder.name.rpartition("-") for folder in run.attempts.glob(f"{job}-*")]
    restarts = [int(restart) for of, _, restart in pairs if of == job and restart.isdecimal()]
    return run.attempt(run_registry.identity(run).run_id, f"{job}-{max(restarts)}") if restarts else None


def _await_end(job: RunJob, clock: Clock) -> None:
    """Wait until the end of a job that may have finished its run shows, for as long as it may be seen late."""
    config = read_frozen_config(job.run)

    def shows() -> bool:
        refresh_listing(job.run)
        attempt = last_attempt(job.run, job.job_id)
        outcome = _outcome(attempt) if attempt is not None else None
        return is_finished(job.run) or (outcome is not None and outcome.decision != "requeued")

    try:
        late = config.cluster.lateness if config is not None else 0.0
        wait_for("the end of the run", shows, late, longest_pause=MAX_PAUSE, clock=clock)
    except DeadlineError:
        return  # what is said of the end then says that it has no reason


def _outcome(attempt: AttemptPaths) -> Outcome | None:
    FileSharedDir(attempt.root).names()  # what was absent at an earlier look may be there by now
    return shared_files.read_document(attempt.outcome, Outcome)


def conclude_run(
    paths: RunPaths, attempt: AttemptPaths, interrupted: Sequence[signal.Signals], job_state: str = ""
) -> int:
    """Say how the run ended and where to look, then write the report, and what it says should be changed; the exit
    code, which a report cannot change.

    `interrupted` are the signals that ended it from here, `job_state` Slurm's word for the end of the job.
    """
    code = _print_end(paths, attempt, interrupted, job_state)
    try:
        from pipeline.observability.findings import findings_of
        from pipeline.observability.report_page import (
            write_report,  # with it come charts, as slow to import as all else together
        )

        history = read_history(paths.root, alive=False)
        print(f"  report      {write_report(history)}", flush=True)
        for found in findings_of(history.config, history.rows):
            said = f"  to change   {found.observation} {found.change} {found.page}"
            print(fill(said, LINE, subsequent_indent=" " * 14, break_on_hyphens=False), flush=True)
    except Exception as error:  # noqa: BLE001 (how the run ended is told, whatever the report does)
        reason = one_line(error)
        print(f"warning: the report could not be written: {reason}", file=sys.stderr)
    return code


def _print_end(paths: RunPaths, attempt: AttemptPaths, interrupted: Sequence[signal.Signals], job_state: str) -> int:
    finished, outcome = shared_files.read_document(paths.finished, Finished), _outcome(attempt)
    if finished is not None or (outcome is not None and outcome.decision == "finished"):
        steps = f" {finished.steps} steps" if finished is not None else ""
        print(f"finished{steps}\n  metrics     {paths.metrics}\n{_results_text(paths)}", flush=True)
        return 0
    if _print_failure(attempt, outcome):
        return 1
    if interrupted:
        print(f"{describe(interrupted[0])}; the same command {_resume_text(paths)}", file=sys.stderr)
        return exit_code(interrupted[0])
    draining = Events(attempt).get("draining")
    if draining is not None or job_state == CANCELLED:
        print(f"{_interruption(draining)}; the same command {_resume_text(paths)}", file=sys.stderr)
        return exit_code(signal.SIGTERM)
    how = f" ({job_state})" if job_state else ""
    print(f"failed: the job ended without a reason{how}; see its output in {paths.submitit}", file=sys.stderr)
    return 1


def _interruption(draining: Event | None) -> str:
    if draining is None:
        return "interrupted: the job was cancelled"
    if draining.by == LAUNCHER:
        return draining.detail
    return f"interrupted: {draining.by} was told to end ({draining.detail})"


def _print_failure(attempt: AttemptPaths, outcome: Outcome | None) -> bool:
    """Say what failed, if anything did.

    A job that was stopped has failed, also where no role did and the agents were only told to end: as srun tells them
    when a rank is lost.
    """
    failure = shared_files.read_document(attempt.first_failure, FirstFailure)
    if failure is not None:
        print(f"failed: {failure.one_line()}\n  {attempt.first_failure}", file=sys.stderr)
        if outcome is not None:
            print(f"  {outcome.decision}: {outcome.reason}", file=sys.stderr)
    elif outcome is not None and outcome.decision == "stopped":
        print(f"failed: {outcome.reason}\n  {attempt.outcome}", file=sys.stderr)
    else:
        return False
    return True


def _results_text(paths: RunPaths) -> str:
    config = read_frozen_config(paths)
    if config is not None and config.training.jobs:
        return f"  jobs        {config.training.jobs}"
    if config is not None and config.evaluation.alone:
        return f"  found       {paths.evaluation}"
    return f"  checkpoint  {log_newest(paths, '{}', 'none')}\n  model       {paths.model}"


def _resume_text(paths: RunPaths) -> str:
    return log_newest(paths, "resumes it from {}", "starts it over, since it had no checkpoint yet")
