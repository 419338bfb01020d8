"""Callbacks for the progress of offline jobs.

The methods of `Observer` do nothing; a run overrides them. Must not know runs.
"""

from collections.abc import Mapping
from pathlib import Path

from pipeline.train.train_jobs import Job


class Observer:
    """Receives the events of an execution, on rank 0, between two operations. An error that it raises ends the
    execution like an error of the job."""

    def before_claim(self) -> None:
        """Called before a job claims the right to write. An error here, such as `SupersededError` if this attempt was
        replaced, is no failure of the job, which stays in its place."""

    def began(self, file: Path, job: Job, done: int) -> None:
        """Called when a job starts from its step `done`, 0 for a new one; again if that checkpoint was damaged."""

    def checkpoint_begins(self) -> None:
        """Called before a checkpoint of the current job is saved."""

    def checkpoint_completed(self) -> None:
        """Called when the checkpoint is durable."""

    def stepped(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        """Called after step `step` of the current job."""

    def exhausted(self) -> None:
        """Called when a folder has only failed jobs and jobs that wait for them; the execution ends with an error."""
