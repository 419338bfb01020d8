"""A folder of jobs, and which of them is next.

Owns the names in the folder and the order. Promises that the oldest job is next; that a job leaves the folder only when
it is done or has failed, in one rename; and that no job runs on what another should have made and did not: as long as a
job lies in `failed/`, jobs that need something of it wait, in a later process too, and all others go on. Looked at by
one process, the controller.

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
        """The oldest job that can be executed; None when there is none.

        A file that is no job raises the `ConfigError` that says why, and stays: what others need of it is not known.
        """
        for path in waiting(self.folder):
            if path not in self._waiting_for and not self._must_wait(path):
                return path
        return None

    def done(self, path: Path) -> None:
        """Put a job that is done away."""
        self._move(path, DONE)

    def failed(self, path: Path, error: str) -> None:
        """Set a job aside with its error; what it would have made is missing from now on."""
        self._missing |= made_by(read_job(path))
        shared_files.write_atomic(self.folder / FAILED / f"{path.stem}.error", f"{error}\n".encode())
        self._move(path, FAILED)

    @property
    def left(self) -> dict[Path, str]:
        """Jobs that wait for something that a failed one should have made, and for what."""
        return {path: needed for path, needed in self._waiting_for.items() if path.exists()}

    @property
    def failures(self) -> list[str]:
        """The names of the jobs in `failed/`, whichever execution they failed in."""
        return sorted(path.name for path in (self.folder / FAILED).glob("*.json"))

    def _must_wait(self, path: Path) -> bool:
        job = read_job(path)
        missing = sorted(needed_by(job) & self._missing)
        if missing:
            self._waiting_for[path] = missing[0]
            self._missing |= made_by(job)
        return bool(missing)

    def _move(self, path: Path, to: str) -> None:
        target = self.folder / to / path.name
        target.parent.mkdir(exist_ok=True)
        path.rename(target)


def waiting_at(path: Path) -> list[Path]:
    """The job files that an execution of a file, or of a folder, has left to do, as far as they are there by now."""
    return waiting(path) if path.is_dir() else [path] if path.is_file() else []


def waiting(folder: Path) -> list[Path]:
    """The jobs of a folder, the oldest first: by the time of their last change, then by name."""
    found = []
    for path in folder.glob("*.json"):
        with suppress(FileNotFoundError):  # done, or failed, since it was listed
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime_ns, path.name, path))
    return [path for *_, path in sorted(found)]


def made_by(job: Job) -> set[str]:
    """What a job writes for others."""
    return {path for path in (job.output, job.optimizer_state) if path}


def needed_by(job: Job) -> set[str]:
    """What a job reads that another may have written."""
    inputs = job.inputs.folder if isinstance(job.inputs, PackedInput) else ""
    return {path for path in (job.checkpoint, job.optimizer_state, inputs) if path}
