"""What a run directory shows of progress, and what must be there to go on.

Owns the one rule by which a run resumes or is refused. A run that has committed must not start over because a mount is
missing or a folder was swept: it is refused, with what is missing and what remains, until the missing part is restored
or the user starts over with `resume=scratch`. Steps that no checkpoint covered are no progress in this sense: an
attempt that was cut off before its first checkpoint begins again without a word.

    evidence of a commit       attempts/<attempt>/committed, made once by each attempt that commits
                               a COMMIT file below the run's checkpoints, whole or damaged
                               rows in metrics.jsonl or ledger.jsonl although attempts/ is gone
    needed to go on            run.json, or the copy of it beside the checkpoints, or the name of rendezvous/<run_id>
                               config.json, or the copy of it beside the checkpoints
                               with evidence of a commit: a whole commit that counts

    refuse_restart(run, root)              # whoever found no commit to go on from, before anything is rolled back
    copy_identity(run, root)                 # each attempt, once it may write
    mark_checkpointed(paths)                  # each attempt, once a commit is durable

The job of a file keeps its checkpoints in its `optimizer_state`, which jobs share. Its run records in `jobs/` which
states it has checkpoints in, and of which job the newest one is. A job is refused where those checkpoints are gone.

    refuse_damaged_state(root)             # a job that found no checkpoint in its state
    refuse_lost_state(run, root, job, done)    # a job that goes on from step `done`
    mark_job_checkpointed(run, root, job, done)   # once a checkpoint of a job is durable
"""

import hashlib
import logging
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from pipeline.checkpoints.checkpoint_store import Checkpoint, folder_names, newest_checkpoint
from pipeline.checkpoints.fencing import LINES
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.checkpoints.pruning import complete_folders
from pipeline.errors import CheckpointError
from pipeline.run.paths import COMMITTED, AttemptPaths, RunPaths
from pipeline.run.run_documents import JobStateRecord, RunIdentity
from pipeline.utils import shared_files
from pipeline.utils.shared_dir import FileSharedDir

RUN, CONFIG = "RUN", "CONFIG"
"""The copies of `run.json` and `config.json`. Under the name of the first, a folder would pass for a run's."""
log = logging.getLogger(__name__)


def refuse_restart(run: RunPaths, root: str) -> None:
    """Raise `CheckpointError` if the run has committed: nobody may begin it again who found no commit to go on from.

    `root` is the address of its checkpoints.
    """
    torn = complete_folders(Storage(root))
    found = [f"attempt {name} committed" for name in _checkpointing_attempts(run)]
    found += [f"{place} is damaged" for place in torn]
    rows = [f"{_lines(path)} lines of {path.name}" for path in (run.metrics, run.ledger) if _lines(path)]
    if not found and (run.attempts.exists() or not rows):
        return
    missing = f"{root} has no checkpoint to go on from" if found else f"{run.attempts} is missing"
    raise CheckpointError(f"{missing}, but the run had progress ({', '.join(found + rows)}); {resume_options(run)}")


def resume_options(run: RunPaths) -> str:
    """What to do about a part of a run that is missing or damaged."""
    return f"restore it, or start over with resume=scratch, which moves what is there to {run.aside}"


def mark_checkpointed(paths: AttemptPaths) -> bool:
    """Leave a mark that the attempt has committed; False if the disk takes none now, and the next commit tries again.

    The checkpoint is durable whatever becomes of the mark.
    """
    try:
        paths.checkpointed.touch()
    except OSError as error:
        log.warning("%s is made with the next commit: %s", paths.checkpointed, error)
        return False
    return True


def copy_identity(run: RunPaths, root: str) -> None:
    """Keep copies of `run.json` and `config.json` beside the checkpoints. Whoever calls this owns the run."""
    storage = Storage(root)
    for path, copy in ((run.run, RUN), (run.config, CONFIG)):
        try:
            data = path.read_bytes()
            if shared_files.unseal(data) is not None:
                storage.put(copy, data)
        except (OSError, CheckpointError) as error:
            log.warning("no copy of %s is kept beside the checkpoints: %s", path.name, error)


def refuse_damaged_state(root: str) -> None:
    """Raise `CheckpointError` if checkpoints of jobs are below `root`, of which the caller found none to be whole."""
    if torn := complete_folders(Storage(root)):
        raise _lost_state(root, f"its checkpoints are damaged ({', '.join(torn)})")


def refuse_lost_state(run: RunPaths, root: str, job: str, done: int) -> int:
    """Raise `CheckpointError` if checkpoints are lost that a job, which begins at its first step, would go on from.

    `root` is the job's `optimizer_state`, `job` tells it from any other, and `done` are the steps that it goes on from.
    Checkpoints of this job must be there if the newest recorded one was its own; of any job, if the run has recorded
    one. Returns the steps of this job that the newest recorded checkpoint covers, 0 if that is another job's.
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
    """Record that a checkpoint of a job below `root` is durable, which covers `done` of its steps.

    The checkpoint is durable whatever becomes of the record.
    """
    path = run.job_state(_digest(root))
    try:
        path.parent.mkdir(exist_ok=True)
        shared_files.write_document(path, JobStateRecord(root=root, job=job, done=done))
    except OSError as error:
        log.warning("%s is made with the next commit: %s", path, error)


def new_aside_folder(run: RunPaths) -> Path:
    """A folder below `aside` that is not there yet."""
    return next(path for number in count(1) if not (path := run.aside / str(number)).exists())


def skipped_rows(checkpoint: Checkpoint) -> list[str]:
    """What counts, has a COMMIT and is newer than `checkpoint`, as `<job>-<step>/<attempt>`: it was found damaged."""
    storage = Storage(checkpoint.root)
    names = folder_names(storage)
    newer = names[: names.index(checkpoint.name)]
    return [place for place in complete_folders(storage) if place.partition("/")[0] in newer]


def _lost_state(root: str, found: str) -> CheckpointError:
    hint = "move it away and start the run over with resume=scratch, or give the job another optimizer_state"
    return CheckpointError(f"optimizer_state {root}: {found}; restore it, or {hint}")


def _digest(root: str) -> str:
    return hashlib.sha256(root.encode()).hexdigest()[:16]


def known_identity(run: RunPaths) -> RunIdentity | None:
    """Who the run is, also where `run.json` is lost; None for a run that has not begun.

    `CheckpointError` for one that has, and of which nothing else says its id.
    """
    found = shared_files.read_document(run.run, RunIdentity)
    if found is None:
        found = shared_files.read_document(run.checkpoints / RUN, RunIdentity)
    if found is not None:
        return found
    ids = [path for path in _entries(run.rendezvous) if path.is_dir()]
    if len(ids) == 1:
        return RunIdentity(run_id=ids[0].name, created=ids[0].stat().st_mtime)
    if run.run.exists() or has_begun(run):
        raise CheckpointError(
            f"{run.run} is {_state(run.run)}, and nothing else says the run's id; {resume_options(run)}"
        )
    return None


def known_config(run: RunPaths, root: str) -> dict[str, Any] | None:
    """The config that the run was made with, also where `config.json` is lost; None for a run that has not begun.

    `CheckpointError` for one that has, and that has no copy of it.
    """
    found = shared_files.read_document(run.config, dict[str, Any])
    if found is not None:
        return found
    if run.config.exists() or has_begun(run):
        copy = shared_files.unseal(Storage(root).get(CONFIG) or b"")
        if copy is None:
            raise CheckpointError(
                f"{run.config} is {_state(run.config)}, without a copy in {root}; {resume_options(run)}"
            )
        return msgspec.json.decode(copy, type=dict[str, Any])
    return None


def has_begun(run: RunPaths) -> bool:
    """Whether anything is there that an attempt makes."""
    if any(_entries(folder) for folder in (run.attempts, run.rendezvous)):
        return True
    if any(path.is_dir() and path.name != LINES for path in _entries(run.checkpoints)):
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
