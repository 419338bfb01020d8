"""The rule by which a run resumes or is refused.

A run that has saved a checkpoint must not start over because a mount is missing or a folder was purged. It is refused,
with a list of missing and remaining parts, until the missing part is restored or the user starts over with
`resume=scratch`. Steps without a checkpoint do not count: an attempt that was cut off before its first checkpoint
starts over silently.

    evidence of a checkpoint   attempts/<attempt>/committed, created once by each attempt that completes a checkpoint
                               a COMPLETE file below the run's checkpoints, valid or damaged
                               rows in metrics.jsonl or ledger.jsonl although attempts/ is gone
    required to resume         run.json, or its copy next to the checkpoints, or the name of rendezvous/<run_id>
                               config.json, or its copy next to the checkpoints
                               with evidence of a checkpoint: a complete checkpoint that counts

    refuse_restart(run, root)              # if no checkpoint can be restored, before any file is rolled back
    copy_identity(run, root)               # each attempt, once it may write
    mark_checkpointed(paths)               # each attempt, once a checkpoint is durable

The job of a file keeps its checkpoints in its `optimizer_state`, which jobs share. Its run records in `jobs/` the
states in which it has checkpoints, and the job of the newest one. A job is refused if these checkpoints are gone.

    refuse_damaged_state(root)                    # a job that finds no checkpoint in its state
    refuse_lost_state(run, root, job, done)       # a job that resumes from step `done`
    mark_job_checkpointed(run, root, job, done)   # once a checkpoint of a job is durable
"""

import hashlib
import logging
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from pipeline.checkpoints.checkpoint_store import Checkpoint, folder_names, newest_checkpoint
from pipeline.checkpoints.fencing import ANCESTRY
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.checkpoints.pruning import complete_folders
from pipeline.errors import CheckpointError
from pipeline.run.paths import COMMITTED, AttemptPaths, RunPaths
from pipeline.run.run_documents import JobStateRecord, RunIdentity
from pipeline.utils import shared_files
from pipeline.utils.shared_dir import FileSharedDir

RUN, CONFIG = "RUN", "CONFIG"
"""The copies of `run.json` and `config.json`. Named `run.json`, the copy would make the folder look like a run's."""
log = logging.getLogger(__name__)


def refuse_restart(run: RunPaths, root: str) -> None:
    """Raise `CheckpointError` if there is evidence of a checkpoint. Call this before a run without one starts over.

    `root` is the address of the run's checkpoints.
    """
    damaged = complete_folders(Storage(root))
    evidence = [f"attempt {name} committed" for name in _checkpointing_attempts(run)]
    evidence += [f"{folder} is damaged" for folder in damaged]
    rows = [f"{_lines(path)} lines of {path.name}" for path in (run.metrics, run.ledger) if _lines(path)]
    if not evidence and (run.attempts.exists() or not rows):
        return
    missing = f"{root} has no checkpoint to go on from" if evidence else f"{run.attempts} is missing"
    raise CheckpointError(f"{missing}, but the run had progress ({', '.join(evidence + rows)}); {resume_options(run)}")


def resume_options(run: RunPaths) -> str:
    """The hint for a missing or damaged part of a run."""
    return f"restore it, or start over with resume=scratch, which moves what is there to {run.aside}"


def mark_checkpointed(paths: AttemptPaths) -> bool:
    """Create the marker file of an attempt with a checkpoint. False if the disk refuses it: retry at the next one.

    The checkpoint is durable without the marker.
    """
    try:
        paths.checkpointed.touch()
    except OSError as error:
        log.warning("%s is made with the next checkpoint: %s", paths.checkpointed, error)
        return False
    return True


def copy_identity(run: RunPaths, root: str) -> None:
    """Copy `run.json` and `config.json` to the folder of the checkpoints. Only the run's owner may call this."""
    storage = Storage(root)
    for path, copy in ((run.run, RUN), (run.config, CONFIG)):
        try:
            data = path.read_bytes()
            if shared_files.unseal(data) is not None:  # never replace a valid copy by a damaged file
                storage.put(copy, data)
        except (OSError, CheckpointError) as error:
            log.warning("%s was not copied to the folder of the checkpoints: %s", path.name, error)


def refuse_damaged_state(root: str) -> None:
    """Raise `CheckpointError` if `root` has checkpoints of jobs. The caller has found all of them damaged."""
    if damaged := complete_folders(Storage(root)):
        raise _lost_state(root, f"its checkpoints are damaged ({', '.join(damaged)})")


def refuse_lost_state(run: RunPaths, root: str, job: str, done: int) -> int:
    """Raise `CheckpointError` if a job would start at its first step although the run has recorded a checkpoint.

    `root` is the job's `optimizer_state`, `job` its identity, and `done` the step from which it resumes. If the newest
    recorded checkpoint is of this job, a checkpoint of this job must exist; otherwise one of any job. Returns the steps
    of this job that the newest recorded checkpoint covers, 0 if that is another job's.
    """
    recorded = shared_files.read_document(run.job_state(_digest(root)), JobStateRecord)
    if recorded is None:
        return 0
    if recorded.job == job:
        if not done:
            raise _lost_state(root, f"it has no whole checkpoint of this job, which had saved one in run {run.root}")
        return recorded.done
    if not done and newest_checkpoint(root) is None:
        raise _lost_state(root, f"it has no checkpoint, but a job of run {run.root} had saved one")
    return 0


def mark_job_checkpointed(run: RunPaths, root: str, job: str, done: int) -> None:
    """Record that a checkpoint of a job below `root` is durable and covers `done` of its steps.

    The checkpoint is durable without the record.
    """
    path = run.job_state(_digest(root))
    try:
        path.parent.mkdir(exist_ok=True)
        shared_files.write_document(path, JobStateRecord(root=root, job=job, done=done))
    except OSError as error:
        log.warning("%s is made with the next checkpoint: %s", path, error)


def new_aside_folder(run: RunPaths) -> Path:
    """The first numbered folder below `aside` that does not exist yet."""
    return next(path for number in count(1) if not (path := run.aside / str(number)).exists())


def skipped_checkpoints(checkpoint: Checkpoint) -> list[str]:
    """The damaged checkpoints that were skipped in favor of `checkpoint`, as `<job>-<step>/<attempt>`.

    These are the newer ones that count and have a COMPLETE file.
    """
    storage = Storage(checkpoint.root)
    names = folder_names(storage)
    newer = names[: names.index(checkpoint.name)]
    return [folder for folder in complete_folders(storage) if folder.partition("/")[0] in newer]


def _lost_state(root: str, problem: str) -> CheckpointError:
    hint = "move it away and start the run over with resume=scratch, or give the job another optimizer_state"
    return CheckpointError(f"optimizer_state {root}: {problem}; restore it, or {hint}")


def _digest(root: str) -> str:
    return hashlib.sha256(root.encode()).hexdigest()[:16]


def known_identity(run: RunPaths) -> RunIdentity | None:
    """The run's identity, from `run.json`, its copy or the rendezvous directory; None for a run that has not begun.

    `CheckpointError` for a run that has begun and whose id is in none of them.
    """
    identity = shared_files.read_document(run.run, RunIdentity)
    if identity is None:
        identity = shared_files.read_document(run.checkpoints / RUN, RunIdentity)
    if identity is not None:
        return identity
    # The rendezvous directory has one folder per run id, so a single one identifies the run.
    ids = [path for path in _entries(run.rendezvous) if path.is_dir()]
    if len(ids) == 1:
        return RunIdentity(run_id=ids[0].name, created=ids[0].stat().st_mtime)
    if run.run.exists() or has_begun(run):
        raise CheckpointError(
            f"{run.run} is {_state(run.run)}, and nothing else says the run's id; {resume_options(run)}"
        )
    return None


def known_config(run: RunPaths, root: str) -> dict[str, Any] | None:
    """The run's configuration, from `config.json` or its copy; None for a run that has not begun.

    `CheckpointError` for a run that has begun and has neither.
    """
    config = shared_files.read_document(run.config, dict[str, Any])
    if config is not None:
        return config
    if run.config.exists() or has_begun(run):
        copy = shared_files.unseal(Storage(root).get(CONFIG) or b"")
        if copy is None:
            raise CheckpointError(
                f"{run.config} is {_state(run.config)}, without a copy in {root}; {resume_options(run)}"
            )
        return msgspec.json.decode(copy, type=dict[str, Any])
    return None


def has_begun(run: RunPaths) -> bool:
    """Whether the run directory has any file that an attempt creates."""
    if any(_entries(folder) for folder in (run.attempts, run.rendezvous)):
        return True
    if any(path.is_dir() and path.name != ANCESTRY for path in _entries(run.checkpoints)):
        return True
    return any(_lines(path) for path in (run.metrics, run.ledger))


def _checkpointing_attempts(run: RunPaths) -> list[str]:
    return [path.name for path in _entries(run.attempts) if COMMITTED in FileSharedDir(path).names()]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _lines(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(1 for line in file if line.endswith(b"\n"))
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _state(path: Path) -> str:
    return "damaged" if path.exists() else "missing"
