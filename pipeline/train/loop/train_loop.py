"""The training loop of every job, independent of the algorithm.

Owns progress, checkpoints, metrics and the end of a job. An `Algorithm` supplies the steps. Promises that a job ends
after exactly its number of steps, or with an error after a checkpoint of the completed steps; and that the last
checkpoint of a job, or of an attempt that ends early, is durable before anything else happens.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from pipeline.config import RunConfig
from pipeline.config.cluster_keys import ClusterConfig
from pipeline.errors import CheckpointError, SupersededError
from pipeline.run.metrics_log import MetricRecord
from pipeline.train.loop.grace_period import grace_warning
from pipeline.train.loop.group_batches import Interrupted
from pipeline.train.throughput import DeviceSpeed, rates
from pipeline.train.train_jobs import Job

log = logging.getLogger(__name__)


class Algorithm(Protocol):
    """One kind of job. `step` numbers steps from 0."""

    @property
    def job(self) -> Job: ...

    @property
    def is_checkpointable(self) -> bool:
        """False within a step that has begun to change the models: a partial update must not be saved."""
        ...

    def begin(self, step: int) -> None:
        """Prepare for `step`, the first one of this attempt; called once."""
        ...

    def step(self, step: int) -> Mapping[str, float]:
        """Execute step `step` and return its metrics. Raises errors of a `Pulse` only before any model changes."""
        ...

    def after_step(self, done: int) -> Mapping[str, float]:
        """Publish a completed step to the other roles; called after each step. Further metrics; may raise
        `Interrupted`."""
        ...

    def end(self) -> None:
        """Finish with the final model; called once, after the last checkpoint. May raise `Interrupted`."""
        ...


class ProgressRecorder(Protocol):
    """The sink of a `TrainLoop`'s checkpoints and metrics."""

    @property
    def is_checkpointable(self) -> bool:
        """Whether all ranks still hold the models, so that a checkpoint is possible."""
        ...

    @property
    def is_near_budget(self) -> bool:
        """Whether stream entries that wait for a checkpoint take so much room that it should come early."""
        ...

    @property
    def is_saving(self) -> bool:
        """Whether a save is in progress; another one would wait for it."""
        ...

    @property
    def checkpoint_seconds(self) -> float:
        """Duration of the newest durable checkpoint's save; 0 before the first."""
        ...

    def save_checkpoint(self, job: Job, done: int, wait: bool) -> None:
        """Save a checkpoint after `done` steps of `job`; with `wait` it is durable on return. Collective.

        Raises `CheckpointError`, also if the previous save failed; the call may then be repeated. A checkpoint that
        exists already is not written again.
        """
        ...

    def note(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a completed step; called once per step, also in an attempt that is ending."""
        ...


@dataclass(frozen=True)
class CheckpointCadence:
    """The schedule of a job's checkpoints before its end.

    Attributes:
        steps: interval in steps.
        seconds: interval in seconds since the last save began, checked after each step; 0: none.
        cluster: the grace period of an attempt, for the warning that a step and its checkpoint exceed it.
    """

    steps: int
    seconds: float = 0.0
    cluster: ClusterConfig | None = None

    @classmethod
    def of(cls, config: RunConfig) -> "CheckpointCadence":
        """The schedule in `training.checkpoint_every` and `training.checkpoint_seconds`."""
        return cls(config.training.checkpoint_every, config.training.checkpoint_seconds, config.cluster)


StepObserver = Callable[[str, int], AbstractContextManager[None]]
"""(job, step) → a context around the step, which may trace it; `step` counts from 1."""


class TrainLoop:
    """Runs jobs, one at a time."""

    def __init__(
        self,
        recorder: ProgressRecorder,
        cadence: CheckpointCadence,
        machine: DeviceSpeed | None = None,
        clock: Callable[[], float] = time.monotonic,
        observe: StepObserver = lambda job, step: nullcontext(),
        start: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`start` are metrics of the process's start, which the first step gets."""
        self._observe, self._start = observe, dict(start)
        self._recorder, self._cadence, self._machine = recorder, cadence, machine or DeviceSpeed()
        self._clock, self._began = clock, clock()
        self._recent: deque[MetricRecord] = deque(maxlen=2)
        self._warned = False

    def run(self, algorithm: Algorithm, done: int) -> None:
        """Run a job from step `done` to its end; returns when a checkpoint has all steps.

        An error that ends the job early (`Interrupted`, a server's failure, a missed deadline, a full disk) is raised
        after a checkpoint of the completed steps, if the models are still checkpointable. If that save fails too, the
        first error is raised, since it is the cause; see `takes_precedence`.
        """
        job = algorithm.job
        log.info("%s: steps %d to %d", job.name, done, job.steps)
        self._committed = self._durable = done
        try:
            self._began = self._clock()
            algorithm.begin(done)
            self._start["start/begin_seconds"] = self._clock() - self._began
            self._began = self._clock()
            while done < job.steps:
                started = self._clock()
                with self._observe(job.name, done + 1):
                    metrics = dict(algorithm.step(done))
                # From here on the step counts: an error in `after_step` still leads to a checkpoint that has it.
                done += 1
                self._publish_step(algorithm, done, metrics, started)
                if self._is_due(done) and done < job.steps:
                    self._commit(job, done, wait=False)
            self._commit(job, done, wait=True)
            algorithm.end()
        except Exception as error:
            if self._recorder.is_checkpointable and algorithm.is_checkpointable:
                self._commit_last(job, done, error)
            raise

    def _publish_step(self, algorithm: Algorithm, done: int, metrics: dict[str, float], started: float) -> None:
        """Call `after_step`, then log the step with all metrics; the step is logged even if `after_step` raises."""
        try:
            metrics |= algorithm.after_step(done)
        finally:
            metrics |= rates(metrics, self._clock() - started, self._machine) | self._start
            self._start = {}
            if self._recorder.checkpoint_seconds:
                metrics["checkpoint/seconds"] = self._recorder.checkpoint_seconds
            self._recorder.note(algorithm.job, done, metrics)
        self._recent.append(metrics)
        self._warn()

    def _warn(self) -> None:
        """Warn once that an attempt could not save a checkpoint within its grace period."""
        if self._warned or self._cadence.cluster is None:
            return
        if warning := grace_warning(self._cadence.cluster, list(self._recent)):
            log.warning("%s", warning)
            self._warned = True

    def _is_due(self, done: int) -> bool:
        if done % self._cadence.steps == 0:
            return True
        # A timed checkpoint must not block training while the previous one is still being written to a slow disk.
        if 0 < self._cadence.seconds <= self._clock() - self._began and not self._recorder.is_saving:
            return True
        if self._recorder.is_near_budget:
            log.info("early checkpoint of step %d: entries that wait for one fill half of streams.budget_bytes", done)
            return True
        return False

    def _commit(self, job: Job, done: int, *, wait: bool) -> None:
        if done == self._committed:
            return
        self._began = self._clock()
        self._recorder.save_checkpoint(job, done, wait)
        self._committed = done
        if wait:
            self._durable = done

    def _commit_last(self, job: Job, done: int, error: Exception) -> None:
        """Save the completed steps, although `error` ends the job."""
        if done == self._durable:
            return
        try:
            self._commit_again(job, done)
        except Exception as second:
            if takes_precedence(second, error):
                raise
            log.error("steps %d to %d are lost, their commit failed too: %s", self._durable + 1, done, second)

    def _commit_again(self, job: Job, done: int) -> None:
        """Save; once more if the first call raises the failure of an earlier save."""
        try:
            self._recorder.save_checkpoint(job, done, wait=True)
        except CheckpointError as error:
            log.warning("the last commit is tried again: %s", error)
            self._recorder.save_checkpoint(job, done, wait=True)


def takes_precedence(second: Exception, first: BaseException | None) -> bool:
    """Whether `second`, raised while a job was being ended, replaces `first`, the error that ended it.

    `Interrupted` would report a clean end, so any error replaces it. A `SupersededError` replaces every error: an
    attempt that was replaced must report only that.
    """
    return first is None or isinstance(first, Interrupted) or isinstance(second, SupersededError)
