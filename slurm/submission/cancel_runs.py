"""Cancelling runs and sweeps: request the end of their jobs, wait for it, and print where they can be resumed.

Owns the end of a run's job from outside: a queued job through its scheduler, a local job through its processes.
Promises that only processes which hold the run's lock are signalled, that no process gets a second signal that would
end it at once, and that every wait has a deadline.

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
from pipeline.run.paths import AttachedPaths, RunPaths, SweepPaths
from pipeline.run.run_documents import RunIdentity
from pipeline.utils import shared_files
from pipeline.utils.waiting import CLOCK, Clock, wait_for
from slurm.agent.supervisor import max_shutdown_seconds
from slurm.batch.executors import LOST_SECONDS
from slurm.registry import file_locks, run_registry, sweep_manifest
from slurm.registry.attached_jobs import mark_ended, title, unfinished_jobs
from slurm.scheduler.scheduler_protocol import SUBMIT_SECONDS, Connect
from slurm.scheduler.scheduler_registry import connect_scheduler

_SLACK_SECONDS = 30.0
"""Seconds that a job may take to end after its agents have ended."""
_SUBMISSION_SECONDS = SUBMIT_SECONDS + LOST_SECONDS + _SLACK_SECONDS
"""The longest time until a submission has ended, with or without a job."""


@dataclass(frozen=True)
class Cancellation:
    """A requested end of a run's job.

    Attributes:
        requested: one line that names the job and the request.
        over: whether the job has ended.
    """

    run: RunPaths
    requested: str
    over: Callable[[], bool]


def main(arguments: Sequence[str]) -> int:
    """Cancel the run or sweep that the arguments name. Returns 0 if its jobs are over, 2 for a wrong argument."""
    try:
        if len(arguments) == 1 and arguments[0].startswith("sweep="):
            return cancel_sweep(sweep_manifest.find_sweep(arguments[0].removeprefix("sweep=")), connect_scheduler)
        return cancel([RunPaths(find_run(arguments))], connect_scheduler)
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("left; the cancelled jobs continue to shut down")
        return 0


def cancel_sweep(paths: SweepPaths, connect: Connect, clock: Clock = CLOCK) -> int:
    """End the launcher that submits or runs the sweep, then cancel its points. Returns 1 if any part failed."""
    recorded = sweep_manifest.load_manifest(paths)
    points = [paths.point(point.name) for point in recorded.points] if recorded else []
    ended, failed = False, False
    try:
        ended = _end_submission(paths, points, clock)
    except (RollcallError, OSError) as error:
        print(f"error: {paths.root.name}: {error}", file=sys.stderr)
        failed = True
    requests, code = end_jobs(points, connect, clock)
    if not (requests or ended or failed or code):
        print(f"nothing to cancel: no job of {paths.root.name} is live")
    return code or int(failed)


def _end_submission(paths: SweepPaths, points: Sequence[RunPaths], clock: Clock) -> bool:
    """End the launcher that submits the sweep or runs it on this machine, and wait for it. Returns whether one existed.

    A launcher that runs a point is not signalled: the point's job is, and the launcher ends with an interrupted point.
    If that point finishes before the signal, the launcher starts the next one, so every poll checks all points.
    """
    requested: dict[str, RunPaths | None] = {}

    def over() -> bool:
        process = file_locks.lock_holder(paths.lock)
        if process is None:
            return True
        for run in points:
            if run.root.name not in requested and (ending := _end_local(run)) is not None:
                requested[run.root.name] = run
                print(f"{run.root.name}: {ending.requested}", flush=True)
        if not requested and _terminate(process):
            requested[""] = None
            print(f"{paths.root.name}: process {process.pid}, which submits it, was signalled to end", flush=True)
        return False

    if over():
        return False
    seconds = SUBMIT_SECONDS + max(map(_patience, points), default=0.0)
    wait_for(f"the launcher of {paths.root.name} to end", over, seconds, clock=clock)
    for run in requested.values():
        if run is not None:
            print(_over(run), flush=True)
    return True


def _patience(run: RunPaths) -> float:
    """Seconds that the run's job may take to shut down."""
    config = read_frozen_config(run)
    return _SLACK_SECONDS + (max_shutdown_seconds(config.cluster) if config else 0.0)


def cancel(named: Sequence[RunPaths], connect: Connect, clock: Clock = CLOCK) -> int:
    """Request the end of these runs' jobs, and of those attached to them, and wait until all are over.

    Returns 1 if any request or wait failed. A failed request does not prevent the others. `connect` is called only if a
    run may have a queued job.
    """
    requests, code = end_jobs(named, connect, clock)
    if not (requests or code):
        print(f"nothing to cancel: no job of {', '.join(map(title, named))} is live")
    return code


def end_jobs(named: Sequence[RunPaths], connect: Connect, clock: Clock = CLOCK) -> tuple[int, int]:
    """As `cancel`, without a message if there is nothing to end.

    Returns the number of requested ends, and 1 if any request or wait failed, else 0.
    """
    endings, failed, jobs = [], 0, list[RunPaths]()
    for owner in named:
        jobs.append(owner)
        try:
            jobs += unfinished_jobs(owner)
        except OSError as error:
            failed += 1
            print(f"error: jobs attached to {title(owner)}: {error}", file=sys.stderr)
    for run in jobs:
        try:
            ending = request_end(run, connect)
        except (RollcallError, OSError) as error:
            failed += 1
            print(f"error: {title(run)}: {error}", file=sys.stderr)
            continue
        if ending is not None:
            endings.append(ending)
            print(f"{title(run)}: {ending.requested}", flush=True)
    for ending in endings:
        try:
            wait_for(f"{title(ending.run)} to end", _answered(ending), _patience(ending.run), clock=clock)
        except (RollcallError, OSError) as error:
            failed += 1
            print(f"error: {title(ending.run)}: {error}", file=sys.stderr)
            continue
        print(_over(ending.run), flush=True)
    return len(endings), 1 if failed else 0


def _answered(ending: Cancellation) -> Callable[[], bool]:
    """A predicate whether the job is over; False while the scheduler does not answer."""

    def over() -> bool:
        try:
            return ending.over()
        except SchedulerError:
            return False

    return over


def _over(run: RunPaths) -> str:
    if isinstance(run, AttachedPaths):
        mark_ended(run)
        return f"{title(run)}: over"
    return f"{run.root.name}: over; {log_newest(run, 'it can be resumed from {}', 'it had no checkpoint yet')}"


def request_end(run: RunPaths, connect: Connect) -> Cancellation | None:
    """Request the end of the run's job, or remove it from the queue. Returns None if no job is live.

    Raises `SchedulerError` if the scheduler does not answer, and `ConfigError` for a local run of another machine.
    """
    job, config, ending = run_registry.submitted_job(run), read_frozen_config(run), None
    if job is None or not job.queued:
        ending = _end_local(run)
        if config is None or config.cluster.on_this_machine:
            return ending
        if ending is not None:  # a launcher that is submitting: it ends when its job is queued, or is not
            wait_for(f"the submission of {run.root.name} to end", ending.over, _SUBMISSION_SECONDS)
    name = run_registry.queue_of(run, config)
    if not name:
        return ending
    queue = connect(name)
    queued = run_registry.live_job(run, queue)
    if queued is None:
        return ending
    queue.cancel(queued.id)
    requested = f"job {queued.id} ({queued.state}) was cancelled and will not be queued again"
    return Cancellation(run, requested, lambda: run_registry.live_job(run, queue) is None)


def _end_local(run: RunPaths) -> Cancellation | None:
    """Send TERM to the controller of the run's job, or to its launcher before there is a job, unless it is draining.

    A second signal would make a launcher end its job at once, without a checkpoint. A controller ignores repeats.
    """
    holders = _lock_holders(run)
    if not holders:
        return None
    if _is_draining(run):
        requested = f"process {holders[0].pid} ({run.root}) is ending already"
    elif _terminate(holders[0]):
        requested = f"process {holders[0].pid} ({run.root}) was signalled to end"
    else:
        return None
    return Cancellation(run, requested, lambda: not _lock_holders(run))


def _is_draining(run: RunPaths) -> bool:
    """Whether the last submitted job's newest attempt is shutting down within its grace time.

    A patient shutdown waits for the trainer without a deadline, so it does not count while the controller is alive: a
    signal to the controller then sets the deadline.
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
    """Send TERM. Returns False if the process has already ended."""
    try:
        process.terminate()
    except psutil.NoSuchProcess:
        return False
    return True


def _lock_holders(run: RunPaths) -> list[psutil.Process]:
    """The processes that hold the run's locks: the job's controller first, then the launcher."""
    holders = [file_locks.lock_holder(lock) for lock in (run.job_lock, run.lock)]
    return [process for process in holders if process is not None]
