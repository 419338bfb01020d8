"""The checkpoints of a run: save and restore of a trainer's whole state.

Owns the state that changes together: parameters and optimizers of all models of the job, the ledger, the position.
Promises that a restored state is exactly one checkpoint; that at most one save is in progress; that stream entries are
acknowledged only once the checkpoint that covers them is durable; and that after `restore` the files `ledger.jsonl` and
`metrics.jsonl` contain exactly the restored steps.

    position = recorder.restore()
    recorder.on_durable = acknowledge               # called with the covered entries of each durable checkpoint
    recorder.on_save = reached                      # called with the step of RL while its checkpoint is being written
    …a step…
    recorder.collect()                              # every step, and while a step waits for its data
    recorder.save_checkpoint(job, done, covered)    # returns when the models are copied; writing continues
    …
    recorder.finish()                               # before the checkpoint must be durable

No random state is saved: every random number of the trainer depends on the seed and the step alone.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from pipeline.checkpoints import (
    Checkpoint,
    Fence,
    TrainerState,
    complete_checkpoints,
    remove_unfinished,
    root_of,
    writer_of,
)
from pipeline.checkpoints.run_progress import (
    copy_identity,
    mark_checkpointed,
    new_aside_folder,
    refuse_restart,
    skipped_checkpoints,
)
from pipeline.checkpoints.trainer_state import DATASET_PHASES, PHASES
from pipeline.config import RunConfig
from pipeline.config.model_directory import describe_weights
from pipeline.errors import CheckpointError, DamagedCheckpointError, DeadlineError
from pipeline.run.metrics_log import roll_back
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.run.run_documents import SubmittedJob
from pipeline.train.batching.conversation_rows import Conversations
from pipeline.train.controller.model_saving import (
    await_save,
    expect_save,
    forget_models,
    load_models,
    stage_models,
    start_save,
)
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.train_jobs import Job, jobs_of
from pipeline.train.worker_spec import models_of
from pipeline.transport.ledger import Ledger
from pipeline.utils import atomic_dirs, shared_files
from pipeline.utils.append_log import AppendLog, rewrite_lines
from pipeline.utils.waiting import wait_for

FINAL_SAVE_SECONDS = 10.0
"""Time limit of a save in progress once a rank is lost; before that it is `Deadlines.checkpoint`."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PhasePosition:
    """The current job, the number of its completed steps, and the jobs after it."""

    job: Job
    done: int
    remaining: tuple[Job, ...]


@dataclass(frozen=True)
class PendingSave:
    """A save in progress: the checkpoint's name, and the stream entries that it covers."""

    name: str
    covered: tuple[str, ...]
    began: float


class RunRecorder:
    """Reads and writes the checkpoints of a run, for the trainer of one attempt.

    Attributes:
        seconds: duration of the newest durable checkpoint's save, from its begin until durable; 0 before the first.
        ledger: after `restore`, the ledger of the checkpoint.
        covered: after `restore`, the stream entries that the checkpoint covers.
        fence: guards everything else that the trainer writes for later attempts.
    """

    def __init__(
        self,
        paths: AttemptPaths,
        config: RunConfig,
        dispatch: RankGroup,
        conversations: Conversations | None = None,
        restart: int = 0,
    ) -> None:
        """`conversations` are the dataset of SFT or preference training; None without one. `restart` counts
        the restarts of the trainer in this attempt."""
        self._conversations = conversations
        self._run, self._config, self._dispatch = RunPaths(paths.run), config, dispatch
        self._writer, self._restart = writer_of(paths.attempt, restart), restart
        self._paths, self._marked = paths, False
        self._root = root_of(config, self._run, paths.run_id)
        self.fence = Fence(self._root, self._writer)
        self._settled = AppendLog(self._run.ledger, self.fence.check)
        self.ledger = Ledger()
        self.covered: tuple[str, ...] = ()
        self.on_durable: Callable[[tuple[str, ...]], None] = lambda covered: None
        self.on_save: Callable[[int], None] = lambda step: None
        self._flight: PendingSave | None = None
        self._durable = ""
        self.seconds = 0.0

    def restore(self) -> PhasePosition:
        """Load the newest checkpoint, or create new models; revoke the right of earlier attempts to write.

        If a checkpoint is damaged, the one before it is loaded. From then on the only valid checkpoints are the loaded
        one, those before it, and those of this attempt. Raises `CheckpointError` if the run had a checkpoint and none
        can be loaded. Repairs an exported model whose replacement an earlier attempt could not finish.
        """
        submitted = shared_files.read_document(self._run.job, SubmittedJob)
        self.fence.claim(submitted.job if submitted else "")
        atomic_dirs.repair(self._run.model)
        atomic_dirs.repair(self._run.best)
        copy_identity(self._run, self._root)
        position = self._newest() or self._afresh()
        remove_unfinished(self._root, self._writer)
        expect_save(self._dispatch, self._dispatch.models)
        return position

    def _newest(self) -> PhasePosition | None:
        """Load the newest undamaged checkpoint; None if there is none."""
        candidates = complete_checkpoints(self._root)
        for checkpoint in candidates:
            try:
                position = self._resume(checkpoint)
            except DamagedCheckpointError as damage:
                log.warning("%s is refused, now and in later attempts: %s", checkpoint.name, damage)
                forget_models(self._dispatch)
            else:
                # `candidates` is an iterator, newest first, so what remains of it are the older checkpoints.
                self.fence.keep([checkpoint.folder, *(older.folder for older in candidates)])
                return position
        return None

    def _afresh(self) -> PhasePosition:
        refuse_restart(self._run, self._root)
        log.info("%s", describe_weights(self._config.model))
        jobs = self._jobs(PHASES[0])
        self._make_models(jobs[0])
        self._roll_back(jobs[0], 0, 0)
        self.fence.keep([])
        return PhasePosition(jobs[0], 0, jobs[1:])

    def _resume(self, checkpoint: Checkpoint) -> PhasePosition:
        """Load a checkpoint; `DamagedCheckpointError` if its content differs from what was saved."""
        state = checkpoint.state()
        jobs = self._jobs(state.job)
        if self._conversations and state.job in DATASET_PHASES:
            self._conversations.check(state.data)
        index = next((index for index, job in enumerate(jobs) if job.name == state.job), 0)
        load_models(self._dispatch, checkpoint, self._make_models(jobs[index]))
        log.info("resuming from %s", checkpoint.name)
        self.ledger, self.covered = Ledger.restore(state.ledger), state.covered
        self._roll_back(jobs[index], state.step, state.ledger_bytes, skipped_checkpoints(checkpoint))
        return PhasePosition(jobs[index], state.step, jobs[index + 1 :])

    def _jobs(self, newest: str) -> tuple[Job, ...]:
        """The jobs of the run. The dataset is read only if the checkpoint `newest` is of a phase that trains it."""
        rows = self._conversations.size if self._conversations and newest in DATASET_PHASES else 0
        return jobs_of(self._config, rows)

    def _make_models(self, job: Job) -> Iterable[str]:
        models = models_of(self._config, job.name, job.optim, job.steps)
        for name, spec in models.items():
            self._dispatch.init_model(name, spec)
        return models

    def save_checkpoint(self, job: Job, done: int, covered: tuple[str, ...], wait: bool = False) -> None:
        """Begin the save of `done` steps of `job`, after an earlier save is durable; with `wait`, also finish it.

        The checkpoint has the ledger and the models of this moment; both may change after the return. Raises
        `CheckpointError`, and writes nothing, if a later attempt has the right to write, or if the earlier save failed;
        then the call may be repeated. A checkpoint that is already durable is not written again.
        """
        self.finish()
        if self._durable == f"{job.name}-{done}":
            return
        self.fence.check()
        began = time.monotonic()
        names = tuple(models_of(self._config, job.name, job.optim, job.steps))
        # Training stands still only for this copy to host memory; threads of the ranks write it while steps go on.
        parts = stage_models(self._dispatch, names)
        state = TrainerState(
            job=job.name,
            step=done,
            models=names,
            ledger=self.ledger.snapshot(),
            ledger_bytes=self._append_ledger_file(),
            covered=covered,
            data=self._conversations.digest if self._conversations else "",
        )
        keep = self._config.training.keep_checkpoints
        start_save(self._dispatch, self._root, self._writer, state, parts, keep)
        self._flight = PendingSave(f"{job.name}-{done}", covered, began)
        self.on_save(done if job.name == "rl" else 0)
        log.info("committing %s; training stood still for %.2f s", self._flight.name, time.monotonic() - began)
        if wait or not self._config.training.async_checkpoints:
            self.finish()

    @property
    def is_saving(self) -> bool:
        """Whether a save has begun and its checkpoint is not durable yet."""
        return self._flight is not None

    def collect(self) -> None:
        """Call `on_durable` if the save in progress has finished; `CheckpointError` if it failed. Does not wait."""
        if self._flight is None or not self._dispatch.saver.idle:
            return
        flight, self._flight = self._flight, None
        checkpoint = self._dispatch.saver.result()
        self.seconds = time.monotonic() - flight.began
        log.info("committed %s after %.2f s", checkpoint.name, self.seconds)
        self._durable = flight.name
        self._marked = self._marked or mark_checkpointed(self._paths)
        self.on_durable(flight.covered)

    def finish(self) -> None:
        """Wait for the save in progress, if there is one, then `collect`.

        After the loss of a rank it waits at most `FINAL_SAVE_SECONDS` and raises nothing: the loss is the error that
        the attempt reports.
        """
        if self._flight is None:
            return
        if self._dispatch.broken:
            self._finish_alone(self._flight.name)
            return
        try:
            await_save(self._dispatch, f"the commit of {self._flight.name}")
        except DeadlineError:
            self._flight = None
            raise
        self.collect()

    def _finish_alone(self, name: str) -> None:
        try:
            wait_for(f"the commit of {name}", lambda: self._dispatch.saver.idle, FINAL_SAVE_SECONDS)
            self.collect()
        except (CheckpointError, DeadlineError) as error:
            self._flight = None
            log.warning("%s is not committed: %s", name, error)

    def export(self, best: bool = False) -> None:
        """Write the policy as the run's model, or its `best`, in Hugging Face's format; errors as of `save_checkpoint`.

        The directory gets its final name when it is complete on disk, and only if no later attempt has taken over.
        """
        self.fence.check()
        target = self._run.best if best else self._run.model
        part = atomic_dirs.unfinished(target, self._writer)
        self._dispatch.save_hf_model("policy", part)
        atomic_dirs.replace(target, part, self.fence.check)

    def _append_ledger_file(self) -> int:
        """Append the ledger entries since the last checkpoint to `ledger.jsonl`; the file's size in bytes."""
        self._settled.add(*map(msgspec.json.encode, self.ledger.drain_changes()))
        return self._settled.flush()

    def _roll_back(self, job: Job, done: int, ledger_bytes: int, damaged: Sequence[str] = ()) -> None:
        """Truncate metrics and ledger to the checkpoint after `done` steps of `job`: later steps are repeated.

        The removed metrics stay on record in the attempt's directory, for the run's goodput. If newer checkpoints are
        `damaged`, the removed lines of the ledger are moved to a separate folder instead of deleted.
        """
        run, check = self._run, self.fence.check
        aside = new_aside_folder(run) if damaged else None
        dropped = self._paths.dropped(self._restart)
        rows = roll_back(run.metrics, job.name, done, check, dropped)
        ledger = aside and aside / run.ledger.name
        lines = rewrite_lines(run.ledger, lambda line, end: end <= ledger_bytes, check, aside=ledger)
        if aside:
            log.warning(
                "going on from %s-%d, since %s is damaged: %d rows of %s are kept in %s, and %d of %s in %s",
                *(job.name, done, ", ".join(damaged), rows, run.metrics.name, dropped, lines, run.ledger.name, aside),
            )
        self._settled = AppendLog(run.ledger, check)
