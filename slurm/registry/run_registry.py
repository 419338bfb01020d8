"""Run directories: made once, resumed, refused.

Owns who is at a run: a lock for a local job, `job.json` and the scheduler's answer for one of Slurm. What a submission
finds and leaves in the directory is in `slurm.registry.run_contents`. Promises that two live jobs never share one, and
that `examine` writes nothing. A job that cannot be asked about counts as live.

    with claimed(config) as run, job_replaced(run):
        record_job(run, "slurm", sbatch(...))   # from here on the job keeps others out, the claim need not
"""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pipeline.config import RunConfig
from pipeline.errors import ConfigError, RollcallError, RunStateError
from pipeline.run.paths import RunPaths
from pipeline.run.run_documents import RunIdentity, SubmittedJob
from pipeline.utils import shared_files
from pipeline.utils.private_files import make_directory
from slurm.registry import file_locks
from slurm.registry.run_contents import freeze_run, located_config, refuse_contents, set_aside
from slurm.scheduler.scheduler_protocol import PENDING, QueuedJob, Scheduler
from slurm.scheduler.slurm.slurm_commands import find_slurm, my_name


def examine(config: RunConfig, scheduler: Callable[[], Scheduler] = find_slurm) -> RunPaths:
    """The run's directory, looked at but not touched; `scheduler` is called only if the run had a job of one.

    Raises `RunStateError` if it is finished, live, unreadable or of another config, and `ConfigError` if it cannot be
    written.
    """
    run = RunPaths(config.directory.resolve())
    with _disk(config):
        _refuse_unwritable(run)
        _refuse_queued(run, config, scheduler)
        _refuse_live(run, config, run.lock, run.job_lock)
        refuse_contents(run, config)
    return run


@contextmanager
def claimed_run(config: RunConfig, scheduler: Callable[[], Scheduler] = find_slurm) -> Iterator[RunPaths]:
    """The run's directory, made or found, and locked as live until the block ends; raises what `examine` raises."""
    run = RunPaths(config.directory.resolve())
    with _disk(config):
        make_directory(run.root, config.cluster.directory_mode)
        lock = file_locks.open_lock(run.lock)
    with lock:
        with _disk(config):
            _lock(lock.fileno(), run, config)
            _refuse_queued(run, config, scheduler)
            _refuse_live(run, config, run.job_lock)
            known = refuse_contents(run, config)
            if config.resume == "scratch":
                set_aside(run)
            freeze_run(run, known, located_config(config))
        yield run


def is_new(run: RunPaths) -> bool:
    """Whether the run has had no attempt yet."""
    return not run.attempts.exists()


def identity(run: RunPaths) -> RunIdentity:
    """Who this run is; made at its first submission."""
    found = shared_files.read_document(run.run, RunIdentity)
    if found is None:
        expected = f"a run with a readable {run.run}"
        raise RunStateError("name", run.root.name, expected, "the command that submitted the run makes it again")
    return found


def record_job(run: RunPaths, kind: Literal["local", "slurm"], job: str) -> None:
    """Keep that this job was submitted for the run, by this user on this machine, now."""
    document = SubmittedJob(kind=kind, job=job, user=my_name(), host=os.uname().nodename, time=time.time())
    shared_files.write_document(run.job, document)


@contextmanager
def job_replaced(run: RunPaths) -> Iterator[None]:
    """Put the record of the earlier job, which is over, aside while another is submitted; back if the block raises.

    The new job may start before it is recorded, and must not take itself for an earlier one.
    """
    earlier = submitted_job(run)
    run.job.unlink(missing_ok=True)
    try:
        yield
    except BaseException:
        if earlier is not None:
            shared_files.write_document(run.job, earlier)
        raise


def submitted_job(run: RunPaths) -> SubmittedJob | None:
    """The job that was submitted for the run last; `RunStateError` if it is recorded and cannot be read."""
    for _ in range(2):  # a file that is replaced while it is read is there at the second look
        found = shared_files.read_document(run.job, SubmittedJob)
        if found is not None or not run.job.exists():
            return found
    hint = f"see that no job of this run is live, then remove {run.job}"
    raise RunStateError("name", run.root.name, f"a run with a readable {run.job}", hint)


def owns(run: RunPaths, job: str) -> bool:
    """Whether this job may carry out the run: it is the last that was submitted, as far as that is recorded."""
    last = submitted_job(run)
    return last is None or last.job == job


def live_job(run: RunPaths, scheduler: Scheduler) -> QueuedJob | None:
    """The scheduler's job of this run if it is live; raises `SchedulerError` when the scheduler does not answer.

    It is found by its record, else by the run_id in its comment: the answer to its submission may have been lost, or
    an earlier job queued again by hand.
    """
    last = submitted_job(run)
    queued = scheduler.job(last.job) if last is not None and last.kind == "slurm" else None
    if queued is not None and queued.live and is_job_of(run, queued):
        return queued
    known = shared_files.read_document(run.run, RunIdentity)
    return next(iter(scheduler.jobs_with(known.run_id)), None) if known else None


def is_job_of(run: RunPaths, queued: QueuedJob) -> bool:
    """Whether a job with the recorded id is this run's, and not another's that was given the same id since.

    Its comment tells; its name only at a site that keeps no comments.
    """
    known = shared_files.read_document(run.run, RunIdentity)
    if known is None:
        return True
    return known.run_id in queued.comment.split() if queued.comment else queued.name == run.root.name


@contextmanager
def _disk(config: RunConfig) -> Iterator[None]:
    """Whatever the disk refuses is said in one line."""
    try:
        yield
    except OSError as error:
        expected = "a directory this user can write, with room in it"
        raise ConfigError("output", str(config.output), expected, _reason(error)) from error


def _reason(error: OSError) -> str:
    if isinstance(error, shutil.Error):  # one (source, target, reason) for each file that could not be copied
        return " ".join(str(error.args[0][0][2]).split())
    place = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{place}"


def _refuse_unwritable(run: RunPaths) -> None:
    nearest = next(path for path in (run.root, *run.root.parents) if path.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(nearest))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(nearest))


@contextmanager
def held_by_job(run: RunPaths) -> Iterator[None]:
    """Mark the run as live for as long as its job runs, which may be longer than its launcher."""
    with file_locks.open_lock(run.job_lock) as lock:
        if not file_locks.take_lock(lock.fileno(), run.job_lock):
            raise BlockingIOError(errno.EWOULDBLOCK, f"held by {file_locks.signature(run.job_lock)}", str(run.job_lock))
        yield


def has_job(run: RunPaths) -> bool:
    """Whether a job of this run may be alive: nobody took its lock yet, or somebody holds it."""
    return not run.job_lock.exists() or file_locks.is_held(run.job_lock)


def is_live_here(run: RunPaths) -> bool:
    """Whether a launcher or a local job is at this run: a launcher that is starting holds its own lock first."""
    return file_locks.is_held(run.lock) or file_locks.is_held(run.job_lock)


def _refuse_live(run: RunPaths, config: RunConfig, *paths: Path) -> None:
    """Raise `RunStateError` if anybody holds one of these locks."""
    for path in paths:
        if file_locks.is_held(path):
            raise _live(run, config, _launcher(path))


def _refuse_queued(run: RunPaths, config: RunConfig, scheduler: Callable[[], Scheduler]) -> None:
    """Raise `RunStateError` if the scheduler has a live job of this run, or cannot say.

    It is asked for the job on record, and before a further one is submitted also for one that is not.
    """
    last = submitted_job(run)
    recorded = last if last is not None and last.kind == "slurm" else None
    if recorded is None and (config.cluster.scheduler != "slurm" or not run.run.exists()):
        return
    try:
        queued = live_job(run, scheduler())
    except RollcallError as error:
        whose = f"Slurm job {recorded.job} of {recorded.user}" if recorded else "its Slurm jobs"
        otherwise = f", or, if that job is over, remove {run.job}" if recorded else ""
        expected = f"a run that is not live, but nobody here can say so of {whose} ({error})"
        raise RunStateError("name", config.name, expected, f"try again where Slurm answers{otherwise}") from None
    if queued is not None:
        raise _live(run, config, _describe(queued))


def _describe(queued: QueuedJob) -> str:
    why = f", {queued.reason}" if queued.state == PENDING and queued.reason else ""
    return f"Slurm job {queued.id} of {queued.user} is {queued.state}{why}"


def _lock(descriptor: int, run: RunPaths, config: RunConfig) -> None:
    if not file_locks.take_lock(descriptor, run.lock):
        raise _live(run, config, _launcher(run.lock))


def _launcher(lock: Path) -> str:
    return f"launcher: {file_locks.signature(lock)}"


def _live(run: RunPaths, config: RunConfig, who: str) -> RunStateError:
    named = config.name if config.output == Path("runs") else run.root
    hint = (
        f"end it (python launchers/cancel.py run={named}), wait for it, or give this one another name "
        f"(name={config.name}-2)"
    )
    return RunStateError("name", config.name, f"a run that is not live ({who})", hint)
