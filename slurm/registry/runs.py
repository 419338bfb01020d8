"""Run directories: made once, resumed, refused.

Owns what a submission finds and leaves on disk before the job starts: the run's identity, its frozen config, the
snapshot of the code, and what says that a run is live: a lock for a local job, `job.json` and the scheduler's answer
for one of Slurm. Promises that a run directory only ever belongs to one config, that two live jobs never share one, and
that `examine` writes nothing. A job that cannot be asked about counts as live.

    with claimed(config) as run, job_replaced(run):
        record_job(run, "slurm", sbatch(...))   # from here on the job keeps others out, the claim need not
"""

import errno
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pipeline
from pipeline.config import RunConfig, TaskConfig, load_config
from pipeline.config.data import located_data, located_options
from pipeline.config.identity import differences, identity_digest
from pipeline.config.models import located_model
from pipeline.errors import ConfigError, RollcallError, RunStateError
from pipeline.rundir.documents import RunIdentity, SubmittedJob
from pipeline.rundir.paths import RunPaths, SweepPaths
from pipeline.system import files
from pipeline.system.private import make_directory
from slurm.registry import locks
from slurm.scheduler.commands import find_slurm, my_name
from slurm.scheduler.protocol import PENDING, QueuedJob, Scheduler

PACKAGES = ("pipeline", "slurm", "conf")
"""What an attempt runs from its snapshot."""
ENTRANCES = ("slurm/node/agent.py", "slurm/batch/requeue.py", "slurm/batch/controller.py")
"""The modules in a run's snapshot that a launcher, which may be newer, tells its job to start."""


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
        _refuse_contents(run, config)
    return run


@contextmanager
def claimed(config: RunConfig, scheduler: Callable[[], Scheduler] = find_slurm) -> Iterator[RunPaths]:
    """The run's directory, made or found, and locked as live until the block ends; raises what `examine` raises."""
    run = RunPaths(config.directory.resolve())
    with _disk(config):
        make_directory(run.root, config.cluster.directory_mode)
        lock = locks.open_lock(run.lock)
    with lock:
        with _disk(config):
            _lock(lock.fileno(), run, config)
            _refuse_queued(run, config, scheduler)
            _refuse_live(run, config, run.job_lock)
            _refuse_contents(run, config)
            _freeze(run, located_config(config))
        yield run


def is_new(run: RunPaths) -> bool:
    """Whether the run has had no attempt yet."""
    return not run.attempts.exists()


def identity(run: RunPaths) -> RunIdentity:
    """Who this run is; made at its first submission."""
    found = files.read_document(run.run, RunIdentity)
    if found is None:
        raise _unreadable(run, run.run)
    return found


def record_job(run: RunPaths, kind: Literal["local", "slurm"], job: str) -> None:
    """Keep that this job was submitted for the run, by this user on this machine, now."""
    document = SubmittedJob(kind=kind, job=job, user=my_name(), host=os.uname().nodename, time=time.time())
    files.write_document(run.job, document)


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
            files.write_document(run.job, earlier)
        raise


def submitted_job(run: RunPaths) -> SubmittedJob | None:
    """The job that was submitted for the run last; `RunStateError` if it is recorded and cannot be read."""
    for _ in range(2):  # a file that is replaced while it is read is there at the second look
        found = files.read_document(run.job, SubmittedJob)
        if found is not None or not run.job.exists():
            return found
    mend = f"see that no job of this run is live, then remove {run.job}"
    raise RunStateError("name", run.root.name, f"a run with a readable {run.job}", mend)


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
    known = files.read_document(run.run, RunIdentity)
    return next(iter(scheduler.jobs_with(known.run_id)), None) if known else None


def is_job_of(run: RunPaths, queued: QueuedJob) -> bool:
    """Whether a job with the recorded id is this run's, and not another's that was given the same id since.

    Its comment tells; its name only at a site that keeps no comments.
    """
    known = files.read_document(run.run, RunIdentity)
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
    with locks.open_lock(run.job_lock) as lock:
        if not locks.take_lock(lock.fileno(), run.job_lock):
            raise BlockingIOError(errno.EWOULDBLOCK, f"held by {locks.signed(run.job_lock)}", str(run.job_lock))
        yield


def has_job(run: RunPaths) -> bool:
    """Whether a job of this run may be alive: nobody took its lock yet, or somebody holds it."""
    return not run.job_lock.exists() or locks.is_held(run.job_lock)


def is_live_here(run: RunPaths) -> bool:
    """Whether a launcher or a local job is at this run: a launcher that is starting holds its own lock first."""
    return locks.is_held(run.lock) or locks.is_held(run.job_lock)


def _refuse_live(run: RunPaths, config: RunConfig, *paths: Path) -> None:
    """Raise `RunStateError` if anybody holds one of these locks."""
    for path in paths:
        if locks.is_held(path):
            raise _live(run, config, _launcher(path))


def _refuse_queued(run: RunPaths, config: RunConfig, scheduler: Callable[[], Scheduler]) -> None:
    """Raise `RunStateError` if the scheduler has a live job of this run, or cannot say.

    It is asked for the job on record, and before a further one is submitted also for one that is not.
    """
    last = submitted_job(run)
    recorded = last if last is not None and last.kind == "slurm" else None
    if recorded is None and (config.cluster.kind != "slurm" or not run.run.exists()):
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
    if not locks.take_lock(descriptor, run.lock):
        raise _live(run, config, _launcher(run.lock))


def _launcher(lock: Path) -> str:
    return f"launcher: {locks.signed(lock)}"


def _live(run: RunPaths, config: RunConfig, who: str) -> RunStateError:
    named = config.name if config.output == Path("runs") else run.root
    mend = (
        f"end it (python launchers/cancel.py run={named}), wait for it, or give this one another name "
        f"(name={config.name}-2)"
    )
    return RunStateError("name", config.name, f"a run that is not live ({who})", mend)


def _refuse_contents(run: RunPaths, config: RunConfig) -> None:
    """Insist that what is there, if anything, is this run and not at its end."""
    if SweepPaths(run.root).manifest.exists():
        raise RunStateError("name", config.name, "a name that is no sweep's", f"add -m, or name={config.name}-2")
    if run.finished.exists():
        mend = f"start a new run with name={config.name}-2, or remove {run.root}"
        raise RunStateError("name", config.name, f"a run that is not finished (see {run.report})", mend)
    if run.run.exists():
        identity(run)
    if not run.config.exists():
        if run.attempts.exists():
            raise _unreadable(run, run.config)
        return
    if absent := [name for name in ENTRANCES if not (run.code / name).exists()]:
        raise _of_another_version(run, f"a run whose code has {absent[0]}, which this version starts")
    old, new = _kept_config(run), located_config(config)
    if identity_digest(old) != identity_digest(new):
        changes = "; ".join(differences(old, new))
        mend = f"submit it as it was, or give the new one another name (name={config.name}-2)"
        raise RunStateError("name", config.name, f"the config this run was made with, but {changes}", mend)


def _kept_config(run: RunPaths) -> RunConfig:
    tree = files.read_document(run.config, dict)
    if tree is None:
        raise _unreadable(run, run.config)
    try:
        return load_config(tree)
    except ConfigError as error:
        raise _of_another_version(run, f"a run whose config this version reads ({error})") from None


def _of_another_version(run: RunPaths, expected: str) -> RunStateError:
    """A run that is sound, but not for this checkout."""
    made = identity(run).revision if run.run.exists() else ""
    mend = f"submit it from the checkout it was made with{made and f' ({made})'}, or start a new one with "
    return RunStateError("name", run.root.name, expected, f"{mend}name={run.root.name}-2")


def _unreadable(run: RunPaths, path: Path) -> RunStateError:
    mend = f"start a new run with name={run.root.name}-2, or remove {run.root}"
    return RunStateError("name", run.root.name, f"a run with a readable {path}", mend)


def located_config(config: RunConfig) -> RunConfig:
    """The config as it is kept: right from whatever directory the next submission is made."""
    jobs = config.training.jobs and str(Path(config.training.jobs).resolve())
    located: dict[str, Any] = {
        "model": located_model(config.model),
        "data": located_data(config.data),
        "training": config.training.model_copy(update={"jobs": jobs}),
    }
    located["task"] = _located_task(config.task)
    sets = config.evaluation.sets
    with_tasks = {
        name: each.model_copy(update={"task": _located_task(each.task)}) for name, each in sets.items() if each.task
    }
    located["evaluation"] = config.evaluation.model_copy(update={"sets": {**sets, **with_tasks}})
    return config.model_copy(update=located)


def _located_task(task: TaskConfig) -> TaskConfig:
    if task.name != "dataset":
        return task
    return task.model_copy(update={"options": located_options(task.options)})


def _freeze(run: RunPaths, config: RunConfig) -> None:
    """Keep code, config and identity, each unless it is there; a config that is there takes the operational changes.

    In this order: a submission that is killed between two of them is completed by the next.
    """
    if not run.config.exists():
        _snapshot(run)
    files.write_document(run.config, config.model_dump(mode="json"))
    if not run.run.exists():
        run_id = f"{config.name}-{secrets.token_hex(4)}"
        files.create_document(run.run, RunIdentity(run_id=run_id, created=time.time(), revision=git_revision()))


def _snapshot(run: RunPaths) -> None:
    """Copy the packages this checkout runs; a half copy of an earlier try is replaced."""
    source = Path(pipeline.__file__).parent.parent
    part = run.code.with_name(f"{run.code.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    for package in PACKAGES:
        shutil.copytree(source / package, part / package, ignore=shutil.ignore_patterns("__pycache__"))
    if run.code.exists():
        shutil.rmtree(run.code)
    part.rename(run.code)


def git_revision() -> str:
    """Revision of this checkout, with `-dirty` when it is edited; empty without git."""
    source = Path(pipeline.__file__).parent.parent
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip()
