"""Run directories: made once, resumed, refused.

Owns what a submission finds and leaves on disk before the job starts: the run's identity, its frozen config, the
snapshot of the code, and the lock that says a run is live. Promises that a run directory only ever belongs to one
config, that two live jobs never share one, and that `examine` writes nothing.
"""

import errno
import fcntl
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pipeline
from pipeline import files
from pipeline.config import RunConfig, load_config
from pipeline.errors import ConfigError, RunStateError
from pipeline.identity import differences, digest
from pipeline.models import located
from pipeline.paths import RunPaths
from pipeline.records import RunIdentity

PACKAGES = ("pipeline", "slurm", "conf")
"""What an attempt runs from its snapshot."""


def examine(config: RunConfig) -> RunPaths:
    """The run's directory, looked at but not touched.

    Raises `RunStateError` if it is finished, live, unreadable or of another config, and `ConfigError` if it cannot be
    written.
    """
    run = RunPaths(config.directory.resolve())
    with _disk(config):
        _refuse_unwritable(run)
        _refuse_live(run, config, run.lock, run.job_lock)
        _refuse_contents(run, config)
    return run


@contextmanager
def claimed(config: RunConfig) -> Iterator[RunPaths]:
    """The run's directory, made or found, and locked as live until the block ends; raises what `examine` raises."""
    run = RunPaths(config.directory.resolve())
    with _disk(config):
        run.root.mkdir(parents=True, exist_ok=True)
        lock = run.lock.open("a+")
    with lock:
        with _disk(config):
            _lock(lock.fileno(), run, config)
            _refuse_live(run, config, run.job_lock)
            _refuse_contents(run, config)
            _freeze(run, _settled(config))
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
    with run.job_lock.open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _sign(lock.fileno())
        yield


def has_job(run: RunPaths) -> bool:
    """Whether a job of this run may be alive: nobody took its lock yet, or somebody holds it."""
    return not run.job_lock.exists() or _is_held(run.job_lock)


def _is_held(path: Path) -> bool:
    with path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _refuse_live(run: RunPaths, config: RunConfig, *paths: Path) -> None:
    """Raise `RunStateError` if anybody holds one of these locks."""
    for path in paths:
        if path.exists() and _is_held(path):
            raise _live(run, config, path)


def _lock(descriptor: int, run: RunPaths, config: RunConfig) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _live(run, config, run.lock) from None
    _sign(descriptor)


def _sign(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"pid {os.getpid()} on {os.uname().nodename}\n".encode())


def _live(run: RunPaths, config: RunConfig, lock: Path) -> RunStateError:
    holder = lock.read_text().strip() or "unknown"
    mend = f"wait for it, or give this one another name (name={config.name}-2)"
    return RunStateError("name", config.name, f"a run that is not live (launcher: {holder})", mend)


def _refuse_contents(run: RunPaths, config: RunConfig) -> None:
    """Insist that what is there, if anything, is this run and not at its end."""
    if run.finished.exists():
        mend = f"start a new run with name={config.name}-2, or remove {run.root}"
        raise RunStateError("name", config.name, f"a run that is not finished (see {run.report})", mend)
    if run.run.exists():
        identity(run)
    if not run.config.exists():
        if run.attempts.exists():
            raise _unreadable(run, run.config)
        return
    old, new = _kept_config(run), _settled(config)
    if digest(old) != digest(new):
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
        raise _unreadable(run, run.config, f" ({error})") from None


def _unreadable(run: RunPaths, path: Path, why: str = "") -> RunStateError:
    mend = f"start a new run with name={run.root.name}-2, or remove {run.root}"
    return RunStateError("name", run.root.name, f"a run with a readable {path}{why}", mend)


def _settled(config: RunConfig) -> RunConfig:
    """The config as it is kept: right from whatever directory the next submission is made."""
    return config.model_copy(update={"model": located(config.model)})


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
