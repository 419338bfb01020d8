"""A folder of job files as a queue.

Owns the names in the folder and the order. Promises that the oldest job is next; that a job leaves the folder only when
it is done or has failed, in one rename; and that no job runs without the outputs of its predecessors: while a job is in
`failed/`, the jobs that need its outputs wait, also in later processes, and all others run. Used by one process, the
controller.

    queue/
      007-rl.json               waits
      done/006-rl.json
      failed/005-sft.json, failed/005-sft.error
"""

import stat
from contextlib import suppress
from pathlib import Path

from pipeline.train.train_jobs import Job, PackedInput, read_job
from pipeline.utils import shared_files

DONE, FAILED = "done", "failed"


class JobQueue:
    """The jobs of a folder, as one process executes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        failed = sorted((folder / FAILED).glob("*.json"))
        self._missing = {made for path in failed for made in made_by(read_job(path, folder))}
        self._waiting_for: dict[Path, str] = {}

    def next(self) -> Path | None:
        """The oldest executable job; None if there is none.

        An invalid job file raises its `ConfigError` and stays: the outputs that other jobs need of it are unknown.
        """
        for path in waiting(self.folder):
            if path not in self._waiting_for and not self._must_wait(path):
                return path
        return None

    def done(self, path: Path) -> None:
        """Move a finished job to `done/`."""
        self._move(path, DONE)

    def failed(self, path: Path, error: str) -> None:
        """Move a job to `failed/`, with its error; its outputs count as missing from now on."""
        self._missing |= made_by(read_job(path))
        shared_files.write_atomic(self.folder / FAILED / f"{path.stem}.error", f"{error}\n".encode())
        self._move(path, FAILED)

    @property
    def left(self) -> dict[Path, str]:
        """The jobs that wait for an output of a failed one, with its path."""
        return {path: needed for path, needed in self._waiting_for.items() if path.exists()}

    @property
    def failures(self) -> list[str]:
        """The names of the jobs in `failed/`, also of earlier executions."""
        return sorted(path.name for path in (self.folder / FAILED).glob("*.json"))

    def _must_wait(self, path: Path) -> bool:
        job = read_job(path)
        missing = sorted(needed_by(job) & self._missing)
        if missing:
            self._waiting_for[path] = missing[0]
            self._missing |= made_by(job)  # waiting is transitive: its own outputs will not exist either
        return bool(missing)

    def _move(self, path: Path, to: str) -> None:
        target = self.folder / to / path.name
        target.parent.mkdir(exist_ok=True)
        path.rename(target)


def waiting_at(path: Path) -> list[Path]:
    """The job files that an execution of a file, or of a folder, would execute now."""
    return waiting(path) if path.is_dir() else [path] if path.is_file() else []


def waiting(folder: Path) -> list[Path]:
    """The jobs of a folder, the oldest first: by the time of their last change, then by name."""
    jobs = []
    for path in folder.glob("*.json"):
        with suppress(FileNotFoundError):  # moved to `done/` or `failed/` since it was listed
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                jobs.append((status.st_mtime_ns, path.name, path))
    return [path for *_, path in sorted(jobs)]


def made_by(job: Job) -> set[str]:
    """The paths of a job's outputs."""
    return {path for path in (job.output, job.optimizer_state) if path}


def needed_by(job: Job) -> set[str]:
    """The paths of a job's inputs, which another job may write."""
    inputs = job.inputs.folder if isinstance(job.inputs, PackedInput) else ""
    return {path for path in (job.checkpoint, job.optimizer_state, inputs) if path}
