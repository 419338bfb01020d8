"""Where the trainer left off, and where it goes on.

Owns the commit of everything that moves together: the parameters and optimizers of all models of the job, the ledger,
the position. Promises that what is restored is one commit whole, that at most one commit is under way, that what a
commit covers is given up only once it is durable, and that after `restore` `ledger.jsonl` and `metrics.jsonl` hold
exactly what that commit covers.

    position = commits.restore()
    commits.on_durable = acknowledge         # called with what a commit covers, when that is safe to give up
    …a step…
    commits.collect()                        # every step, and while a step waits for its data
    commits.commit(job, done, covered)       # now and then; returns when the models are copied
    …
    commits.finish()                         # before anybody relies on it

Nothing random is kept: a trainer draws no numbers but those that its seed and step name.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from pipeline.checkpoints import Checkpoint, Fence, TrainerState, complete_checkpoints, remove_unfinished, root_of
from pipeline.checkpoints.run_progress import (
    copy_identity,
    mark_checkpointed,
    new_aside_folder,
    refuse_restart,
    skipped_rows,
)
from pipeline.checkpoints.trainer_state import PHASES
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
"""The longest that a commit may be under way once a rank is lost; until then it is `Deadlines.checkpoint`."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PhasePosition:
    """The job to go on with, how many of its steps are done, and the jobs after it."""

    job: Job
    done: int
    remaining: tuple[Job, ...]


@dataclass(frozen=True)
class PendingSave:
    """A commit under way: its name, and the stream entries that it covers."""

    name: str
    covered: tuple[str, ...]
    began: float


class RunRecorder:
    """The checkpoints of a run, as one attempt's trainer writes and reads them.

    Attributes:
        seconds: from the begin of the newest durable commit until it was durable; 0 before the first.

    After `restore`, `ledger` is the committed one and `covered` the stream entries that it covers. `fence` guards
    whatever else the trainer writes for later attempts.
    """

    def __init__(
        self, paths: AttemptPaths, config: RunConfig, dispatch: RankGroup, conversations: Conversations | None = None
    ) -> None:
        """`conversations` are the data of SFT; None where that trains demonstrations, or is not done."""
        self._conversations = conversations
        self._run, self._attempt, self._config, self._dispatch = RunPaths(paths.run), paths.attempt, config, dispatch
        self._paths, self._marked = paths, False
        self._root = root_of(config, self._run, paths.run_id)
        self.fence = Fence(self._root, paths.attempt)
        self._settled = AppendLog(self._run.ledger, self.fence.check)
        self.ledger = Ledger()
        self.covered: tuple[str, ...] = ()
        self.on_durable: Callable[[tuple[str, ...]], None] = lambda covered: None
        self._flight: PendingSave | None = None
        self._durable = ""
        self.seconds = 0.0

    def restore(self) -> PhasePosition:
        """Make the models as the newest commit left them, or new; take the right to write from earlier attempts.

        A commit that is found damaged while it is loaded is given up for the one before it. From then on none counts
        for anybody but this one, those before it, and those that this attempt makes. `CheckpointError` where a run that
        had committed has no commit to go on from.
        A model whose replacement an earlier attempt could not end has its name again.
        """
        submitted = shared_files.read_document(self._run.job, SubmittedJob)
        self.fence.claim(submitted.job if submitted else "")
        atomic_dirs.repair(self._run.model)
        atomic_dirs.repair(self._run.best)
        copy_identity(self._run, self._root)
        position = self._newest() or self._afresh()
        remove_unfinished(self._root, self._attempt)
        expect_save(self._dispatch, self._dispatch.models)
        return position

    def _newest(self) -> PhasePosition | None:
        """Go on from the newest commit that is whole, if there is one."""
        found = complete_checkpoints(self._root)
        for checkpoint in found:
            try:
                position = self._resume(checkpoint)
            except DamagedCheckpointError as damage:
                log.warning("%s is refused, now and in later attempts: %s", checkpoint.name, damage)
                forget_models(self._dispatch)
            else:
                self.fence.keep([checkpoint.place, *(older.place for older in found)])
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
        """Go on from a commit; `DamagedCheckpointError` if it is not what was committed."""
        state = checkpoint.state()
        jobs = self._jobs(state.job)
        if self._conversations and state.job == "sft":
            self._conversations.check(state.data)
        index = next((index for index, job in enumerate(jobs) if job.name == state.job), 0)
        load_models(self._dispatch, checkpoint, self._make_models(jobs[index]))
        log.info("resuming from %s", checkpoint.name)
        self.ledger, self.covered = Ledger.restore(state.ledger), state.covered
        self._roll_back(jobs[index], state.step, state.ledger_bytes, skipped_rows(checkpoint))
        return PhasePosition(jobs[index], state.step, jobs[index + 1 :])

    def _jobs(self, newest: str) -> tuple[Job, ...]:
        """The jobs of the run; who is beyond SFT reads no dataset again."""
        rows = len(self._conversations.rows) if self._conversations and newest == "sft" else 0
        return jobs_of(self._config, rows)

    def _make_models(self, job: Job) -> Iterable[str]:
        models = models_of(self._config, job.name, job.optim, job.steps)
        for name, spec in models.items():
            self._dispatch.init_model(name, spec)
        return models

    def save_checkpoint(self, job: Job, done: int, covered: tuple[str, ...], wait: bool = False) -> None:
        """Begin to commit `done` steps of `job`, after an earlier commit is durable; with `wait`, end it too.

        What was settled so far and the models as they are now belong to it; both may change when this returns.
        `CheckpointError`, and nothing is written, if a later attempt has the right by now, or if the earlier one
        failed; after that it may be called again. What is durable already is not written again.
        """
        self.finish()
        if self._durable == f"{job.name}-{done}":
            return
        self.fence.check()
        began = time.monotonic()
        names = tuple(models_of(self._config, job.name, job.optim, job.steps))
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
        start_save(self._dispatch, self._root, self._attempt, state, parts, keep)
        self._flight = PendingSave(f"{job.name}-{done}", covered, began)
        log.info("committing %s; training stood still for %.2f s", self._flight.name, time.monotonic() - began)
        if wait or not self._config.training.async_checkpoints:
            self.finish()

    @property
    def is_saving(self) -> bool:
        """Whether a commit has begun that is not durable yet."""
        return self._flight is not None

    def collect(self) -> None:
        """If the commit under way has become durable, tell `on_durable`; `CheckpointError` if it failed. Cheap."""
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
        """Wait for the commit under way, if there is one, then `collect`.

        Once a rank is lost it waits only shortly, and raises nothing: what lost the rank is the error to tell.
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
        """Write the policy as the run's model, or its `best`, in Hugging Face's form; raises what `commit` raises.

        It takes the model's name when it is whole and on disk, and only if no later attempt took over meanwhile.
        """
        self.fence.check()
        place = self._run.best if best else self._run.model
        part = atomic_dirs.unfinished(place, self._attempt)
        self._dispatch.save_hf_model("policy", part)
        atomic_dirs.replace(place, part, self.fence.check)

    def _append_ledger_file(self) -> int:
        """Add what was settled since the last commit to `ledger.jsonl`; its size."""
        self._settled.add(*map(msgspec.json.encode, self.ledger.drain_changes()))
        return self._settled.flush()

    def _roll_back(self, job: Job, done: int, ledger_bytes: int, damaged: Sequence[str] = ()) -> None:
        """Drop what is not covered by the commit after `done` steps of `job`: those steps come again.

        Newer commits that are `damaged` had covered some of it, so all of it is kept aside.
        """
        run, check = self._run, self.fence.check
        aside = new_aside_folder(run) if damaged else None
        rows = roll_back(run.metrics, job.name, done, check, aside and aside / run.metrics.name)
        ledger = aside and aside / run.ledger.name
        lines = rewrite_lines(run.ledger, lambda line, end: end <= ledger_bytes, check, aside=ledger)
        if aside:
            log.warning(
                "going on from %s-%d, since %s is damaged: %d rows of %s and %d of %s are kept in %s",
                *(job.name, done, ", ".join(damaged), rows, run.metrics.name, lines, run.ledger.name, aside),
            )
        self._settled = AppendLog(run.ledger, check)
