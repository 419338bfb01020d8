"""Who is told how an execution of jobs goes on.

Owns what is told, and when. By itself an observer does nothing: jobs need none. Must not know runs.
"""

from collections.abc import Mapping
from pathlib import Path

from pipeline.train.train_jobs import Job


class Observer:
    """Told by rank 0, between two operations. What it raises ends the execution, as an error of the job's own would."""

    def before_claim(self) -> None:
        """A job is about to take the right to write. What this raises is no failure of the job, which stays: such as
        `SupersededError` if whoever executes it may not."""

    def began(self, file: Path, job: Job, done: int) -> None:
        """A job goes on from its step `done`, 0 for a new one; called again when that turns out to be damaged."""

    def checkpoint_begins(self) -> None:
        """New steps of the job that began last are about to be committed."""

    def checkpoint_completed(self) -> None:
        """They are durable."""

    def stepped(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` of that job is done."""

    def exhausted(self) -> None:
        """Nothing of a folder is left but jobs that failed and those that wait for them: it ends with an error."""
