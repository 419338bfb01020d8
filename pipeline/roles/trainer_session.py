"""One attempt of the trainer, from its newest checkpoint to `training_finished`.

Owns the wiring of rank 0: the jobs, the rank group, the checkpoints and sinks, and the other roles if the run has
rollouts (`rl_services`), or in a replay the recorded run (`replay_services`); and the order of the end: last
checkpoint, exported model, weight groups closed, device memory released, and only then the event. Must not know losses,
ranks or how weights travel.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

from pipeline.errors import StreamError
from pipeline.roles.rank0 import Rank0
from pipeline.roles.replay_services import ReplayServices
from pipeline.roles.rl_services import RlServices
from pipeline.roles.role_context import PROGRESS, RoleContext
from pipeline.run.fault_moments import FaultMoments
from pipeline.run.fault_plan import parse_faults
from pipeline.run.goodput_records import read_goodput
from pipeline.run.metrics_log import read_rows, series
from pipeline.train.batching.conversation_rows import Conversations
from pipeline.train.batching.demonstrations import TaskDemonstrations
from pipeline.train.batching.labeled_rows import LabeledCompletions
from pipeline.train.batching.preference_rows import PreferencePairs
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.step_traces import StepTraces
from pipeline.train.loop.compile_warmup import WarmUp
from pipeline.train.loop.eval_loss import EvalLoss
from pipeline.train.loop.group_batches import Interrupted
from pipeline.train.loop.preference import EvalPreferences, PreferenceTraining
from pipeline.train.loop.run_recorder import PhasePosition, RunRecorder
from pipeline.train.loop.sft import SupervisedFineTuning
from pipeline.train.loop.train_loop import Algorithm, CheckpointCadence, TrainLoop, takes_precedence
from pipeline.train.throughput import machine_of
from pipeline.train.train_jobs import Job, PreferenceJob, SftJob, write_job
from pipeline.utils import heartbeat

log = logging.getLogger(__name__)
GOODPUT_RANKS = 64
"""Timelines of an attempt that the trainer reads for the run's goodput, since it does so in its grace period."""


class RunSession(Rank0):
    """Rank 0's part of one attempt."""

    def __init__(self, context: RoleContext, dispatch: RankGroup) -> None:
        super().__init__(context, dispatch)
        self._conversations = self._dataset()
        self._commits = RunRecorder(context.paths, context.config, dispatch, self._conversations, context.restart)
        self._moments = FaultMoments(context.paths, parse_faults(self._config.faults), self._attend)
        self._commits.on_save = partial(self._moments.reach, "save")
        self._peers: RlServices | ReplayServices | None = None
        self._traces = StepTraces(dispatch, self._config.debug, context.paths.traces)
        self._warm_up = WarmUp(self._config, dispatch, self._pulse, self._warming_up)

    def _dataset(self) -> Conversations | None:
        if self._config.has_preference:
            is_labeled = self._config.preference.formula.is_labeled
            return (LabeledCompletions if is_labeled else PreferencePairs)(self._config, self._alive)
        reads = self._config.has_sft and self._config.data.path
        return Conversations(self._config, self._alive) if reads else None

    def run(self) -> None:
        """Run the remaining jobs; returns without `training_finished` when the attempt is ending."""
        began = time.monotonic()
        position = self._commits.restore()
        self._start = {"start/restore_seconds": time.monotonic() - began}
        with ExitStack() as opened:
            self._open(opened)
            opened.callback(self._log_goodput)
            opened.push(self._finish_commits)  # before the services close, which it still notifies
            try:
                self._get_ready("connected")
                if self._peers:
                    self._peers.release_covered(self._commits.covered)
                self._run_jobs(position)
                self._moments.reach("end")
                self._commits.export()
            except Interrupted as reason:
                log.info("%s; the finished work is saved", reason)
                return
        self._finish()

    def _open(self, opened: ExitStack) -> None:
        """Open all connections of rank 0; `opened` closes them in the opposite order."""
        self._sinks = self._open_sinks(opened, self._commits.fence.check)
        if self._config.has_rollouts:
            ledger = self._commits.ledger
            self._peers = RlServices(
                self._context, self._dispatch, ledger, opened, self._pulse, self._note_evaluation, self._moments
            )
            self._commits.on_durable = partial(self._release_covered, self._peers)
        elif self._config.replay:
            self._peers = ReplayServices(self._context, self._dispatch, self._commits.ledger, self._pulse)

    def _release_covered(self, peers: RlServices, covered: tuple[str, ...]) -> None:
        """Acknowledge the entries of a durable checkpoint. If the streams are unreachable while the attempt is ending,
        the next attempt does so: it restores the same checkpoint, and drops duplicates."""
        try:
            peers.release_covered(covered)
        except StreamError as error:
            if not self._ending(at_once=True):
                raise
            log.warning("the next attempt acknowledges the entries of the last checkpoint: %s", error)

    def _run_jobs(self, position: PhasePosition) -> None:
        done = position.done
        for job in (position.job, *position.remaining):
            write_job(self._context.run.training_job(job.name), job)
            machine = machine_of(self._config)
            loop = TrainLoop(self, CheckpointCadence.of(self._config), machine, observe=self._trace, start=self._start)
            loop.run(self._algorithm(job), done)
            done, self._start = 0, {}

    def _trace(self, job: str, step: int) -> AbstractContextManager[None]:
        """Trace the step if `debug` names it; it counts the steps of the run's last phase."""
        return self._traces(job, step) if job == self._config.last_phase else nullcontext()

    def _algorithm(self, job: Job) -> Algorithm:
        if isinstance(job, SftJob):
            return self._fine_tuning(job)
        if isinstance(job, PreferenceJob):
            return self._preference_training(job)
        assert self._peers, "a job of RL belongs to a run with rollouts"
        return self._peers.algorithm(job, self._warm_up)

    def _fine_tuning(self, job: SftJob) -> SupervisedFineTuning:
        level = self._config.training.metrics
        if self._conversations:
            held_out = self._held_out(job, self._conversations)
            return SupervisedFineTuning(
                job, self._dispatch, self._conversations, self._pulse, level, held_out, self._warm_up
            )
        with heartbeat.busy_with("making the task", self._config.cluster.startup_seconds):
            demonstrate = TaskDemonstrations(self._config)
        return SupervisedFineTuning(job, self._dispatch, demonstrate, self._pulse, level, warm_up=self._warm_up)

    def _preference_training(self, job: PreferenceJob) -> PreferenceTraining:
        assert self._conversations, "a job of preferences has a dataset"
        held_out = self._held_out(job, self._conversations)
        return PreferenceTraining(
            job, self._config, self._dispatch, self._conversations, self._pulse, held_out, self._warm_up
        )

    def _held_out(self, job: SftJob | PreferenceJob, conversations: Conversations) -> EvalLoss:
        training, rows = self._config.training, read_rows(self._context.run.metrics)
        preference, max_length = self._config.preference, self._config.model.max_length
        prefers = partial(EvalPreferences, preference=preference, max_length=max_length)
        make = prefers if job.kind == "preference" else EvalLoss
        return make(
            dispatch=self._dispatch,
            rows=conversations.held_out,
            batch=job.batch * conversations.rows_per_example,
            every=training.eval_every,
            measured=dict(series((row for row in rows if row["kind"] == "eval"), "eval/loss", job=job.name)),
            note=lambda step, metrics: self._sinks.log("eval", job.name, step, metrics),
            keep=partial(self._commits.export, best=True) if training.keep_best else lambda: None,
            pulse=self._pulse,
        )

    def _alive(self) -> None:
        """Called while data are read, so that neither this process nor rank 0 counts as hung."""
        heartbeat.beat()
        self._dispatch.keepalive()

    @property
    def is_checkpointable(self) -> bool:
        """See `train_loop.ProgressRecorder`."""
        return not self._dispatch.broken

    @property
    def is_near_budget(self) -> bool:
        """See `train_loop.ProgressRecorder`."""
        return self._peers is not None and self._peers.is_near_budget

    @property
    def is_saving(self) -> bool:
        """See `train_loop.ProgressRecorder`."""
        return self._commits.is_saving

    @property
    def checkpoint_seconds(self) -> float:
        """See `train_loop.ProgressRecorder`."""
        return self._commits.seconds

    def save_checkpoint(self, job: Job, done: int, wait: bool) -> None:
        """See `train_loop.ProgressRecorder`."""
        self._sinks.flush()
        covered = self._peers.begin_checkpoint() if self._peers else ()
        self._commits.save_checkpoint(job, done, covered, wait)

    def _finish_commits(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Wait for the checkpoint in progress. Its failure must not hide an earlier `error`."""
        try:
            self._commits.finish()
        except Exception as second:
            if takes_precedence(second, error):
                raise
            log.error("the checkpoint in progress failed too: %s", second)

    def note(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        """See `train_loop.ProgressRecorder`."""
        actor = self._peers.actor_metrics() if self._peers else {}
        self._sinks.log("train", job.name, step, {**metrics, **actor})
        self._numbers[PROGRESS] = self._numbers.get(PROGRESS, 0.0) + 1
        self._context.report("ready", f"{job.name} step {step} of {job.steps}", **self._numbers)
        self._commits.collect()
        self._moments.reach("step" if job.name == "rl" else "sft", step)

    def _log_goodput(self) -> None:
        """Add the run's goodput so far to its metrics, at the end of each process that ends in order."""
        try:
            measured = read_goodput(self._context.run.root, time.time(), GOODPUT_RANKS)
            rows = read_rows(self._context.run.metrics)
        except OSError as error:
            log.warning("the goodput is not measured: %s", error)
            return
        last = next(((row["job"], row["step"]) for row in reversed(rows) if row["kind"] == "train"), None)
        known = {(row["job"], row["step"]) for row in rows if row["kind"] == "goodput"}
        if measured and last and last not in known:
            self._sinks.log("goodput", *last, measured.metrics())

    def _attend(self) -> bool:
        """Called while a moment's faults are awaited; returns whether the attempt is ending."""
        self._alive()
        return self._ending() is not None

    def _note_evaluation(self, version: int, metrics: Mapping[str, float], eval_set: str) -> None:
        self._sinks.log("eval", "rl", version, metrics, eval_set=eval_set)

    def _pulse(self) -> None:
        """Run the pulse of every rank 0, then acknowledge the stream entries of a checkpoint once it is durable.

        The check for the attempt's end comes first, because the last checkpoint makes up for a failed one.

        Raises `CheckpointError` for a checkpoint that failed, or that was refused because a later attempt owns the run.
        """

        super()._pulse()
        self._commits.collect()
