"""A job that is requeued, with its run directory and a scheduler in memory."""

from pathlib import Path

from pipeline.checkpoints.checkpoint_store import complete_checkpoint
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.checkpoints.trainer_state import TrainerState
from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import AttemptPaths
from pipeline.run.run_documents import Outcome
from pipeline.utils import shared_files
from slurm.batch.requeue import conclude_attempt
from slurm.scheduler.scheduler_protocol import RUNNING
from tests.fakes.clock import FakeClock
from tests.fakes.run_directory import FakeRun
from tests.fakes.scheduler import FakeScheduler

LATE_SECONDS = 70


class Cluster:
    """A run whose job 1 has one attempt after the other, on a scheduler in memory."""

    def __init__(self, root: Path, **limits: int) -> None:
        self.run = FakeRun(root / "run")
        tree = self.run.config.model_dump(mode="json")
        tree["cluster"] |= {"scheduler": "slurm"} | limits
        shared_files.write_document(self.run.paths.config, tree)
        self.scheduler, self.restart = FakeScheduler(), -1
        self.clock = FakeClock()
        self.job = self.scheduler.submit(state=RUNNING)

    def attempt(self) -> AttemptPaths:
        """A new attempt begins, the first or one that was queued."""
        self.restart += 1
        assert self.scheduler.jobs[self.job].restarts == self.restart
        self.scheduler.set(self.job, RUNNING)
        return self.run.attempt(f"{self.job}-{self.restart}").paths

    def leave(self, paths: AttemptPaths, *ranks: int) -> None:
        for rank in ranks or range(4):
            shared_files.write_document(paths.down(f"agent.{rank}"), "left")

    def commit(self, paths: AttemptPaths, step: int) -> None:
        storage = Storage(str(self.run.paths.checkpoints))
        complete_checkpoint(storage, TrainerState(job="rl", step=step), paths.attempt, {}, 1)

    def end(self, code: int = 0) -> Outcome:
        outcome = conclude_attempt(self.run.paths, self.scheduler, self.job, self.restart, code, self.clock)
        paths = self.run.paths.attempt(self.run.identity.run_id, f"{self.job}-{self.restart}")
        assert shared_files.read_document(paths.outcome, Outcome) == outcome
        return outcome


def fail(paths: AttemptPaths, cause: str = "exited with code 1", time: float = 20.0) -> None:
    failure = FirstFailure(role="trainer.0", rank=1, cause=cause, exit_code=1, time=time, log="")
    shared_files.create_document(paths.first_failure, failure)
