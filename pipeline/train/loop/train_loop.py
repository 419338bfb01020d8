"""The loop that every job runs in.

Owns progress, commits, metrics and the orderly end of a job, and knows no algorithm: an algorithm is something with a
`step`. Promises that a job ends at exactly its number of steps, or with an error after a commit of what was
done; and that the last commit of a job, and of an attempt that ends early, is durable before anything else happens.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
        """False in the middle of a step that has changed the models already: what they are then is not committed."""
        ...

    def begin(self, step: int) -> None:
        """Called once, before the first `step`, with the step to go on from."""
        ...

    def step(self, step: int) -> Mapping[str, float]:
        """Do step `step`; its metrics. Raises what a `Pulse` does only if the step was not done at all."""
        ...

    def after_step(self, done: int) -> Mapping[str, float]:
        """Called after each step, which counts by now: tell others. Further metrics; may raise `Interrupted`."""
        ...

    def end(self) -> None:
        """Called once, after the last commit: what is left to do with the final model. May raise `Interrupted`."""
        ...


class ProgressRecorder(Protocol):
    """Where a runner writes what it did."""

    @property
    def is_checkpointable(self) -> bool:
        """Whether the ranks still hold the models, so that they may be committed."""
        ...

    @property
    def is_near_budget(self) -> bool:
        """Whether what only a commit can free takes so much room that it should come early."""
        ...

    @property
    def is_saving(self) -> bool:
        """Whether a commit is under way, so that another one would have to wait for it."""
        ...

    @property
    def checkpoint_seconds(self) -> float:
        """How long the newest durable commit took; 0 before the first."""
        ...

    def save_checkpoint(self, job: Job, done: int, wait: bool) -> None:
        """Commit a checkpoint after `done` steps of `job`; with `wait` it is durable on return. Collective.

        Raises `CheckpointError` also when the commit before failed; it may be called again then, as for what is
        committed already.
        """
        ...

    def note(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, which is done. Called once a step, also by an attempt that is ending."""
        ...


@dataclass(frozen=True)
class CheckpointCadence:
    """When a job commits before its end.

    Attributes:
        steps: after every so many steps.
        seconds: after the first step that ends so long after the last commit began; 0: never.
        cluster: how long an attempt may take to end, for the warning that a step and its commit take longer.
    """

    steps: int
    seconds: float = 0.0
    cluster: ClusterConfig | None = None

    @classmethod
    def of(cls, config: RunConfig) -> "CheckpointCadence":
        """As the config says."""
        return cls(config.training.checkpoint_every, config.training.checkpoint_seconds, config.cluster)


class TrainLoop:
    """Runs jobs, one at a time."""

    def __init__(
        self,
        book: ProgressRecorder,
        cadence: CheckpointCadence,
        machine: DeviceSpeed | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book, self._cadence, self._machine, self._clock = book, cadence, machine or DeviceSpeed(), clock
        self._began = clock()
        self._recent: deque[MetricRecord] = deque(maxlen=2)
        self._warned = False

    def run(self, algorithm: Algorithm, done: int) -> None:
        """Run a job of which `done` steps are committed; returns when all are.

        Whatever ends it early (`Interrupted`, a server's failure, a missed deadline, a full disk) is raised after a
        commit of the steps that were done, unless the models are not intact any more. If that commit fails too, the
        first error is raised, since it says what happened; see `takes_precedence`.
        """
        job = algorithm.job
        log.info("%s: steps %d to %d", job.name, done, job.steps)
        self._committed = self._durable = done
        try:
            algorithm.begin(done)
            self._began = self._clock()
            while done < job.steps:
                started = self._clock()
                metrics = dict(algorithm.step(done))
                done += 1
                self._tell(algorithm, done, metrics, started)
                if self._is_due(done) and done < job.steps:
                    self._commit(job, done, wait=False)
            self._commit(job, done, wait=True)
            algorithm.end()
        except Exception as error:
            if self._book.is_checkpointable and algorithm.is_checkpointable:
                self._commit_last(job, done, error)
            raise

    def _tell(self, algorithm: Algorithm, done: int, metrics: dict[str, float], started: float) -> None:
        """Follow a step up and log it, in this order unless the attempt is ending: the step is logged in any case."""
        try:
            metrics |= algorithm.after_step(done)
        finally:
            metrics |= rates(metrics, self._clock() - started, self._machine)
            if self._book.checkpoint_seconds:
                metrics["checkpoint/seconds"] = self._book.checkpoint_seconds
            self._book.note(algorithm.job, done, metrics)
        self._recent.append(metrics)
        self._warn()

    def _warn(self) -> None:
        """Say once that an attempt which is told to end cannot commit in time."""
        if self._warned or self._cadence.cluster is None:
            return
        if warning := grace_warning(self._cadence.cluster, list(self._recent)):
            log.warning("%s", warning)
            self._warned = True

    def _is_due(self, done: int) -> bool:
        if done % self._cadence.steps == 0:
            return True
        # A timed commit must not hold training up until the one before it is on a slow disk.
        if 0 < self._cadence.seconds <= self._clock() - self._began and not self._book.is_saving:
            return True
        if self._book.is_near_budget:
            log.info("step %d is committed early: what waits for a commit takes half of streams.budget_bytes", done)
            return True
        return False

    def _commit(self, job: Job, done: int, *, wait: bool) -> None:
        if done == self._committed:
            return
        self._began = self._clock()
        self._book.save_checkpoint(job, done, wait)
        self._committed = done
        if wait:
            self._durable = done

    def _commit_last(self, job: Job, done: int, error: Exception) -> None:
        """Have what was done be durable, although `error` ends the job."""
        if done == self._durable:
            return
        try:
            self._commit_again(job, done)
        except Exception as second:
            if takes_precedence(second, error):
                raise
            log.error("steps %d to %d are lost, their commit failed too: %s", self._durable + 1, done, second)

    def _commit_again(self, job: Job, done: int) -> None:
        """Commit, also if a commit that was under way turns out to have failed."""
        try:
            self._book.save_checkpoint(job, done, wait=True)
        except CheckpointError as error:
            log.warning("the last commit is tried again: %s", error)
            self._book.save_checkpoint(job, done, wait=True)


def takes_precedence(second: Exception, first: BaseException | None) -> bool:
    """Whether what failed while a job was being ended is to be raised in place of what ended it.

    `Interrupted` would say that all is well. Whoever was replaced is to learn that, and nothing else.
    """
    return first is None or isinstance(first, Interrupted) or isinstance(second, SupersededError)
