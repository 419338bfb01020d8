"""Cancelling runs: told to end, waited for, and where they can be resumed from.

Owns how a run's job is ended from outside: Slurm's through the scheduler, a local one through its processes. Promises
that only processes which hold the run's own lock are signalled, that none gets a second signal which would end it at
once, and that every wait has an end.

    python launchers/cancel.py run=<name or directory>      python launchers/cancel.py sweep=<name or directory>
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from pipeline.checkpoints import log_newest
from pipeline.config.frozen_config import read_frozen_config
from pipeline.errors import RollcallError, SchedulerError
from pipeline.observability.run_history import attempt_names, find_run
from pipeline.run.events import Events
from pipeline.run.paths import RunPaths, SweepPaths
from pipeline.run.run_documents import RunIdentity
from pipeline.utils import shared_files
from pipeline.utils.waiting import CLOCK, Clock, wait_for
from slurm.agent.supervisor import max_shutdown_seconds
from slurm.batch.executors import LOST_SECONDS, SUBMIT_SECONDS
from slurm.registry import file_locks, run_registry, sweep_manifest
from slurm.scheduler.slurm.slurm_commands import find_slurm
from slurm.submission.sweep_trials import FindScheduler

_SLACK_SECONDS = 30.0
"""How much longer than its agents a job may take to be over."""
_SUBMISSION_SECONDS = SUBMIT_SECONDS + LOST_SECONDS + _SLACK_SECONDS
"""The longest that a submission takes to end, with a job or without."""


@dataclass(frozen=True)
class Cancellation:
    """A job that was told to end: what was done to which, and whether it is over."""

    run: RunPaths
    requested: str
    over: Callable[[], bool]


def main(arguments: Sequence[str]) -> int:
    """Cancel what the arguments name; 0 when it is over or there was nothing to cancel, 2 for a wrong argument."""
    try:
        if len(arguments) == 1 and arguments[0].startswith("sweep="):
            return cancel_sweep(sweep_manifest.find_sweep(arguments[0].removeprefix("sweep=")), find_slurm)
        return cancel([RunPaths(find_run(arguments))], find_slurm)
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("left; what was told to end goes on ending")
        return 0


def cancel_sweep(paths: SweepPaths, scheduler: FindScheduler, clock: Clock = CLOCK) -> int:
    """End whoever submits or runs the sweep, then cancel its points; 1 if any of that could not be done."""
    kept = sweep_manifest.load_manifest(paths)
    points = [paths.point(point.name) for point in kept.points] if kept else []
    ended, failed = False, False
    try:
        ended = _end_submission(paths, points, clock)
    except (RollcallError, OSError) as error:
        print(f"error: {paths.root.name}: {error}", file=sys.stderr)
        failed = True
    told, code = _cancel(points, scheduler, clock)
    if not (told or ended or failed or code):
        print(f"nothing to cancel: no job of {paths.root.name} is live")
    return code or int(failed)


def _end_submission(paths: SweepPaths, points: Sequence[RunPaths], clock: Clock) -> bool:
    """Have the launcher that submits the sweep, or runs it here, end, and wait until it did; whether there was one.

    It ends with the point that it runs, which is told instead of it. One that finishes by itself is followed by the
    next.
    """
    told: dict[str, RunPaths | None] = {}

    def over() -> bool:
        process = file_locks.lock_holder(paths.lock)
        if process is None:
            return True
        for run in points:
            if run.root.name not in told and (ending := _end_local(run)) is not None:
                told[run.root.name] = run
                print(f"{run.root.name}: {ending.requested}", flush=True)
        if not told and _terminate(process):
            told[""] = None
            print(f"{paths.root.name}: process {process.pid}, which submits it, was told to end", flush=True)
        return False

    if over():
        return False
    seconds = SUBMIT_SECONDS + max(map(_patience, points), default=0.0)
    wait_for(f"the launcher of {paths.root.name} to end", over, seconds, clock=clock)
    for run in told.values():
        if run is not None:
            print(_over(run), flush=True)
    return True


def _patience(run: RunPaths) -> float:
    """Seconds that the run's job may take to come down."""
    config = read_frozen_config(run)
    return _SLACK_SECONDS + (max_shutdown_seconds(config.cluster) if config else 0.0)


def cancel(named: Sequence[RunPaths], scheduler: FindScheduler, clock: Clock = CLOCK) -> int:
    """Tell the jobs of these runs to end and wait until they are over; 1 if any could not be told, or is not over.

    One that cannot be told keeps no other from it. `scheduler` is called once a run has a job of one.
    """
    told, code = _cancel(named, scheduler, clock)
    if not (told or code):
        print(f"nothing to cancel: no job of {', '.join(run.root.name for run in named)} is live")
    return code


def _cancel(named: Sequence[RunPaths], scheduler: FindScheduler, clock: Clock) -> tuple[int, int]:
    """How many were told, and 1 if anything failed."""
    endings, failed = [], 0
    for run in named:
        try:
            ending = request_end(run, scheduler)
        except (RollcallError, OSError) as error:
            failed += 1
            print(f"error: {run.root.name}: {error}", file=sys.stderr)
            continue
        if ending is not None:
            endings.append(ending)
            print(f"{run.root.name}: {ending.requested}", flush=True)
    for ending in endings:
        try:
            wait_for(f"{ending.run.root.name} to end", _answered(ending), _patience(ending.run), clock=clock)
        except (RollcallError, OSError) as error:
            failed += 1
            print(f"error: {ending.run.root.name}: {error}", file=sys.stderr)
            continue
        print(_over(ending.run), flush=True)
    return len(endings), 1 if failed else 0


def _answered(ending: Cancellation) -> Callable[[], bool]:
    """Whether it is over, as far as the scheduler answers."""

    def over() -> bool:
        try:
            return ending.over()
        except SchedulerError:
            return False

    return over


def _over(run: RunPaths) -> str:
    return f"{run.root.name}: over; {log_newest(run, 'it can be resumed from {}', 'it had no checkpoint yet')}"


def request_end(run: RunPaths, scheduler: FindScheduler) -> Cancellation | None:
    """Tell the run's job to end, or take it out of the queue; None when none is live.

    Raises `SchedulerError` when the scheduler gives no answer, and `ConfigError` for a local run of another machine.
    """
    job, config, ending = run_registry.submitted_job(run), read_frozen_config(run), None
    if job is None or job.kind == "local":
        ending = _end_local(run)
        if config is None or config.cluster.kind == "local":
            return ending
        if ending is not None:  # a launcher that is submitting: it ends when its job is queued, or is not
            wait_for(f"the submission of {run.root.name} to end", ending.over, _SUBMISSION_SECONDS)
    asked = scheduler()
    queued = run_registry.live_job(run, asked)
    if queued is None:
        return ending
    asked.cancel(queued.id)
    told = f"job {queued.id} ({queued.state}) was told to end and will not be queued again"
    return Cancellation(run, told, lambda: run_registry.live_job(run, asked) is None)


def _end_local(run: RunPaths) -> Cancellation | None:
    """TERM to the controller of the run's job, or to its launcher before there is one, unless it comes down already.

    A launcher that is told twice ends its job at once, without a commit; a controller may be told often.
    """
    holders = _lock_holders(run)
    if not holders:
        return None
    if _is_draining(run):
        told = f"process {holders[0].pid} ({run.root}) is ending already"
    elif _terminate(holders[0]):
        told = f"process {holders[0].pid} ({run.root}) was told to end"
    else:
        return None
    return Cancellation(run, told, lambda: not _lock_holders(run))


def _is_draining(run: RunPaths) -> bool:
    """Whether the attempt of the job that was submitted last was told to come down within its grace.

    One that may take as long as its trainer needs has no deadline, unless its controller is told too.
    """
    identity, job, names = (
        shared_files.read_document(run.run, RunIdentity),
        run_registry.submitted_job(run),
        attempt_names(run),
    )
    if identity is None or job is None or not names or names[-1].rpartition("-")[0] != job.job:
        return False
    draining = Events(run.attempt(identity.run_id, names[-1])).get("draining")
    return draining is not None and not (draining.patient and file_locks.lock_holder(run.job_lock) is not None)


def _terminate(process: psutil.Process) -> bool:
    """TERM; False if the process ended by itself meanwhile."""
    try:
        process.terminate()
    except psutil.NoSuchProcess:
        return False
    return True


def _lock_holders(run: RunPaths) -> list[psutil.Process]:
    """The processes that hold the run's locks: its job's controller, then its launcher."""
    found = [file_locks.lock_holder(lock) for lock in (run.job_lock, run.lock)]
    return [process for process in found if process is not None]
