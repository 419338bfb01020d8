"""The claim on a run directory, and the run's job.

Owns the liveness of a run: by a lock for a local job, by `job.json` and the scheduler's answer for a queued job.
`slurm.registry.run_contents` owns the content of the directory. Promises that two live jobs never share a run, and that
`examine` writes nothing. A job counts as live if the scheduler does not answer.

    with claimed_run(config) as run, job_replaced(run):
        record_job(run, "slurm", scheduler.submit(file))   # from here on the job excludes others, and the claim may end
"""

import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.errors import ConfigError, RollcallError, RunStateError
from pipeline.run.paths import AttemptPaths, RunPaths, newest_attempt
from pipeline.run.run_documents import RunIdentity, SubmittedJob
from pipeline.utils import shared_files
from pipeline.utils.private_files import make_directory
from pipeline.utils.user_commands import user_command
from slurm.registry import file_locks
from slurm.registry.run_contents import freeze_run, located_config, refuse_contents, set_aside
from slurm.scheduler.scheduler_protocol import PENDING, Connect, JobQueue, QueuedJob, user_name
from slurm.scheduler.scheduler_registry import connect_scheduler, find_scheduler


def examine(config: RunConfig, connect: Connect = connect_scheduler) -> RunPaths:
    """Check the run's directory without changing it. `connect` is called only if the run may have a queued job.

    Raises `RunStateError` if the run is finished, live, unreadable or has another config, and `ConfigError` if the
    directory cannot be written.
    """
    run = RunPaths(config.directory.resolve())
    with _disk(config):
        _refuse_unwritable(run)
        _refuse_queued(run, config, connect)
        _refuse_live(run, config, run.lock, run.job_lock)
        refuse_contents(run, config)
    return run


@contextmanager
def claimed_run(config: RunConfig, connect: Connect = connect_scheduler) -> Iterator[RunPaths]:
    """Create or check the run's directory, and lock it until the block ends; raises the errors of `examine`."""
    run = RunPaths(config.directory.resolve())
    with _disk(config):
        make_directory(run.root, config.cluster.directory_mode)
        lock = file_locks.open_lock(run.lock)
    with lock:
        with _disk(config):
            _lock(lock.fileno(), run, config)
            _refuse_queued(run, config, connect)
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
    """The run's identity, created at its first submission; `RunStateError` if it cannot be read."""
    document = shared_files.read_document(run.run, RunIdentity)
    if document is None:
        expected = f"a run with a readable {run.run}"
        raise RunStateError("name", run.root.name, expected, "the command that submitted the run creates it again")
    return document


def record_job(run: RunPaths, kind: str, job: str) -> None:
    """Record that this user submitted this job of the scheduler `kind` for the run on this machine, now."""
    document = SubmittedJob(kind=kind, job=job, user=user_name(), host=os.uname().nodename, time=time.time())
    shared_files.write_document(run.job, document)


@contextmanager
def job_replaced(run: RunPaths) -> Iterator[None]:
    """Remove the record of the earlier, ended job while another one is submitted; restore it if the block raises.

    The new job may start before it is recorded, and a record of the earlier job would make it refuse the run.
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
    """The last job that was submitted for the run; `RunStateError` if its record cannot be read."""
    for _ in range(2):  # a file that is replaced during the first read is readable at the second one
        document = shared_files.read_document(run.job, SubmittedJob)
        if document is not None or not run.job.exists():
            return document
    hint = f"see that no job of this run is live, then remove {run.job}"
    raise RunStateError("name", run.root.name, f"a run with a readable {run.job}", hint)


def last_attempt(run: RunPaths, job: str) -> AttemptPaths | None:
    """The job's newest attempt; None before the first one."""
    newest = newest_attempt((folder.name for folder in run.attempts.glob(f"{job}-*")), job)
    return run.attempt(identity(run).run_id, newest) if newest else None


def owns(run: RunPaths, job: str) -> bool:
    """Whether this job may execute the run: the last recorded job is this one, or none is recorded."""
    last = submitted_job(run)
    return last is None or last.job == job


def queue_of(run: RunPaths, config: RunConfig | None) -> str:
    """The scheduler that may have a live job of the run, by name; empty if none may.

    The last submitted job decides. Before a submission to a queue, jobs that are not on record count too.
    """
    last = submitted_job(run)
    if last is not None and last.queued:
        return last.kind
    unrecorded = config is not None and not config.cluster.on_this_machine and run.run.exists()
    return config.cluster.scheduler if config is not None and unrecorded else ""


def live_job(run: RunPaths, queue: JobQueue) -> QueuedJob | None:
    """The scheduler's live job of this run, if any; `SchedulerError` if the scheduler does not answer.

    The job is identified by its record, else by the run_id in its comment: the answer to its submission may have been
    lost, or a user may have queued an earlier job again.
    """
    last = submitted_job(run)
    queued = queue.job(last.job) if last is not None and last.queued else None
    if queued is not None and queued.live and is_job_of(run, queued):
        return queued
    known = shared_files.read_document(run.run, RunIdentity)
    return next(iter(queue.jobs_with(known.run_id)), None) if known else None


def is_job_of(run: RunPaths, queued: QueuedJob) -> bool:
    """Whether a job with the recorded id belongs to this run: the scheduler may have reused the id.

    The job's comment decides; at a site without comments, its name.
    """
    known = shared_files.read_document(run.run, RunIdentity)
    if known is None:
        return True
    return known.run_id in queued.comment.split() if queued.comment else queued.name == run.root.name


@contextmanager
def _disk(config: RunConfig) -> Iterator[None]:
    """Turn an `OSError` of the block into a `ConfigError`."""
    try:
        yield
    except OSError as error:
        expected = "a directory this user can write, with room in it"
        raise ConfigError("output", str(config.output), expected, _reason(error)) from error


def _reason(error: OSError) -> str:
    if isinstance(error, shutil.Error):  # one (source, target, reason) for each file that could not be copied
        return " ".join(str(error.args[0][0][2]).split())
    file = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{file}"


def _refuse_unwritable(run: RunPaths) -> None:
    nearest = next(path for path in (run.root, *run.root.parents) if path.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(nearest))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(nearest))


@contextmanager
def held_by_job(run: RunPaths) -> Iterator[None]:
    """Hold the job's lock during the block, which may outlive the launcher; `BlockingIOError` if it is held."""
    with file_locks.open_lock(run.job_lock) as lock:
        if not file_locks.take_lock(lock.fileno(), run.job_lock):
            raise BlockingIOError(errno.EWOULDBLOCK, f"held by {file_locks.signature(run.job_lock)}", str(run.job_lock))
        yield


def has_job(run: RunPaths) -> bool:
    """Whether a job of this run may be alive: its lock is held, or was never taken."""
    return not run.job_lock.exists() or file_locks.is_held(run.job_lock)


def is_live_here(run: RunPaths) -> bool:
    """Whether a launcher or a local job holds one of the run's locks; a starting launcher takes its lock first."""
    return file_locks.is_held(run.lock) or file_locks.is_held(run.job_lock)


def _refuse_live(run: RunPaths, config: RunConfig, *paths: Path) -> None:
    """Raise `RunStateError` if a process holds one of these locks."""
    for path in paths:
        if file_locks.is_held(path):
            raise _live(run, config, _launcher(path))


def _refuse_queued(run: RunPaths, config: RunConfig, connect: Connect) -> None:
    """Raise `RunStateError` if a scheduler has a live job of this run, or does not answer."""
    name = queue_of(run, config)
    if not name:
        return
    title = find_scheduler(name).title
    try:
        queued = live_job(run, connect(name))
    except RollcallError as error:
        last = submitted_job(run)
        recorded = last if last is not None and last.queued else None
        whose = f"{title} job {recorded.job} of {recorded.user}" if recorded else f"its {title} jobs"
        otherwise = f", or, if that job is over, remove {run.job}" if recorded else ""
        expected = f"a run that is not live, which is unknown for {whose} ({error})"
        raise RunStateError("name", config.name, expected, f"try again where {title} answers{otherwise}") from None
    if queued is not None:
        why = f", {queued.reason}" if queued.state == PENDING and queued.reason else ""
        raise _live(run, config, f"{title} job {queued.id} of {queued.user} is {queued.state}{why}")


def _lock(descriptor: int, run: RunPaths, config: RunConfig) -> None:
    if not file_locks.take_lock(descriptor, run.lock):
        raise _live(run, config, _launcher(run.lock))


def _launcher(lock: Path) -> str:
    return f"launcher: {file_locks.signature(lock)}"


def _live(run: RunPaths, config: RunConfig, who: str) -> RunStateError:
    named = config.name if config.output == Path("runs") else run.root
    hint = (
        f"end it ({user_command('cancel')} run={named}), wait for it, or give this run another name "
        f"(name={config.name}-2)"
    )
    return RunStateError("name", config.name, f"a run that is not live ({who})", hint)
