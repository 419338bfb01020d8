"""Where the trainer left off, and where it goes on.

Owns the commit of everything that moves together: parameters, optimizer, ledger, position [F1]. Promises that what is
restored is one commit whole, and that `ledger.jsonl` holds exactly what the newest commit covers.
"""

import logging
import os
import shutil
from dataclasses import dataclass

import msgspec

from pipeline import files
from pipeline.checkpoints import Checkpoint, Fence, TrainerState, newest_committed, prune
from pipeline.config import RunConfig
from pipeline.errors import CheckpointError
from pipeline.ledger import Ledger
from pipeline.paths import AttemptPaths, RunPaths
from pipeline.records import SubmittedJob
from pipeline.training.dispatch import Dispatch
from pipeline.training.jobs import Job, jobs_of
from pipeline.training.spec import models_of
from pipeline.training.worker import Worker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """The job to go on with, how many of its steps are done, and the jobs after it."""

    job: Job
    done: int
    rest: tuple[Job, ...]


class Commits:
    """The checkpoints of a run, as one attempt's trainer writes and reads them.

    After `restore`, `ledger` is the committed one and `covered` the stream entries that it covers. `fence` guards
    whatever else the trainer writes for later attempts.
    """

    def __init__(self, paths: AttemptPaths, config: RunConfig, dispatch: Dispatch) -> None:
        self._run, self._attempt, self._config, self._dispatch = RunPaths(paths.run), paths.attempt, config, dispatch
        self._root = str(self._run.checkpoints)
        self.fence = Fence(self._root, paths.attempt)
        self.ledger = Ledger()
        self.covered: tuple[str, ...] = ()

    def restore(self) -> Position:
        """Make the policy as the newest commit left it, or new; take the right to write from earlier attempts."""
        submitted = files.read_document(self._run.job, SubmittedJob)
        self.fence.claim(submitted.job if submitted else "")
        checkpoint = newest_committed(self._root, hashes=True)
        jobs = jobs_of(self._config)
        first = next((index for index, job in enumerate(jobs) if checkpoint and job.name == checkpoint.manifest.job), 0)
        job = jobs[first]
        for name, spec in models_of(self._config, job.name, job.optim, job.steps).items():
            self._dispatch.init_model(name, spec)
        if checkpoint is None:
            self._cut_ledger_file(0)
            return Position(job, 0, jobs[1:])
        state = self._dispatch.pass_through("policy", load_worker, checkpoint)[0]
        log.info("resuming from %s", checkpoint.name)
        self.ledger, self.covered = Ledger.restore(state.ledger), state.acknowledge.get("prepared", ())
        self._cut_ledger_file(state.ledger_bytes)
        return Position(job, state.step, jobs[first + 1 :])

    def commit(self, job: Job, done: int, covered: tuple[str, ...]) -> None:
        """Commit `done` steps of `job`; collective, and durable when it returns.

        `CheckpointError`, and nothing is written, if a later attempt has the right by now.
        """
        self.fence.check()
        state = TrainerState(
            job=job.name,
            step=done,
            ledger=self.ledger.snapshot(),
            ledger_bytes=self._append_ledger_file(),
            acknowledge={"prepared": covered},
        )
        checkpoint = self._dispatch.pass_through("policy", save_worker, self._root, self._attempt, state)[0]
        log.info("committed %s", checkpoint.name)
        try:
            prune(self._root, self._config.training.keep_checkpoints)
        except CheckpointError as error:
            log.warning("old checkpoints stay until the next commit: %s", error)

    def export(self) -> None:
        """Write the policy as the run's model, in Hugging Face's form; raises what `commit` raises.

        It takes the model's name when it is whole, and only if no later attempt took over while it was written.
        """
        self.fence.check()
        whole = self._run.unfinished_model(self._attempt)
        self._dispatch.export_hf("policy", whole)
        self.fence.check()
        if self._run.model.exists():
            self._run.model.rename(self._run.unfinished_model(f"{self._attempt}.replaced"))
        whole.rename(self._run.model)
        for leftover in self._run.root.glob(self._run.unfinished_model("*").name):
            shutil.rmtree(leftover, ignore_errors=True)

    def _append_ledger_file(self) -> int:
        """Add what was settled since the last commit to `ledger.jsonl`; its size."""
        with self._run.ledger.open("ab") as file:
            for settlement in self.ledger.take_news():
                file.write(msgspec.json.encode(settlement) + b"\n")
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

    def _cut_ledger_file(self, size: int) -> None:
        """Drop what a crash left behind the commit: those positions will be settled again."""
        with self._run.ledger.open("ab") as file:
            if file.tell() < size:
                log.warning("%s lacks %d bytes that were committed", self._run.ledger, size - file.tell())
            else:
                file.truncate(size)


def save_worker(worker: Worker, root: str, attempt: str, state: TrainerState) -> Checkpoint:
    """On every rank: commit the worker's shards with the controller's state."""
    from pipeline.checkpoints.sharded import save

    return save(root, attempt, state, worker.state())


def load_worker(worker: Worker, checkpoint: Checkpoint) -> TrainerState:
    """On every rank: fill the worker from a checkpoint."""
    from pipeline.checkpoints.sharded import load

    tensors = worker.state()
    state = load(checkpoint, tensors)
    worker.load_state(tensors)
    return state
