"""The algorithms of offline jobs: `pipeline.train.loop.sft` and `policy_update` on rows from files.

Owns the source of rows: packed files, or the task's demonstrations.
"""

import time
from collections.abc import Mapping
from functools import partial

from pipeline.config import RunConfig
from pipeline.errors import TrainingError
from pipeline.train.batching.demonstrations import TaskDemonstrations
from pipeline.train.batching.sequences import TrainSequence
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.group_batches import Pulse
from pipeline.train.loop.policy_update import PolicyUpdate
from pipeline.train.loop.sft import Demonstrate, SupervisedFineTuning
from pipeline.train.loop.step_metrics import NonFiniteGuard
from pipeline.train.loop.train_loop import Algorithm
from pipeline.train.loss_specs import MetricsLevel
from pipeline.train.offline.job_resume import JobState
from pipeline.train.offline.packed_dataset import PackedRows
from pipeline.train.train_jobs import Job, PreferenceJob, RlJob, SftJob


def build_algorithm(
    job: Job, config: RunConfig, dispatch: RankGroup, state: JobState, packed: PackedRows | None, pulse: Pulse
) -> Algorithm:
    """The job's algorithm, on the packed rows, or without them on the task's demonstrations. Each step begins with a
    `pulse`, which may raise `Interrupted`."""
    if isinstance(job, SftJob):
        rows = partial(_cycle_rows, packed) if packed else TaskDemonstrations(config)
        return OfflineFineTuning(job, dispatch, rows, config.training.metrics, state, pulse)
    if isinstance(job, PreferenceJob):
        raise TrainingError("preference training needs a run; a job from a file has no pairs")
    if packed is None:
        raise TrainingError("an RL job from a file needs packed rows as inputs")
    return OfflineLearning(job, config, dispatch, state, packed, pulse)


def _cycle_rows(packed: PackedRows, step: int, count: int) -> list[TrainSequence]:
    return packed.rows(packed.cycle(step, count))


class OfflineFineTuning(SupervisedFineTuning):
    """The `Algorithm` of an offline `SftJob`: a new job inherits the optimizer's moments from the job before."""

    def __init__(
        self, job: SftJob, dispatch: RankGroup, rows: Demonstrate, level: MetricsLevel, state: JobState, pulse: Pulse
    ) -> None:
        super().__init__(job, dispatch, rows, pulse, level)
        self._state = state

    def begin(self, step: int) -> None:
        super().begin(step)
        if step == 0:
            self._state.inherit()


class OfflineLearning:
    """The `Algorithm` of an `RlJob` on packed rows, which contain their advantages (or rewards)."""

    def __init__(
        self, job: RlJob, config: RunConfig, dispatch: RankGroup, state: JobState, packed: PackedRows, pulse: Pulse
    ) -> None:
        self.job, self._pulse = job, pulse
        self._state, self._packed = state, packed
        self._update = PolicyUpdate(dispatch, config)
        self._skips = NonFiniteGuard()

    @property
    def is_checkpointable(self) -> bool:
        """See `PolicyUpdate.is_checkpointable`."""
        return self._update.is_checkpointable

    def begin(self, step: int) -> None:
        self._update.begin(self.job.optim, self.job.steps, step)
        if step == 0:
            self._state.inherit()

    def step(self, step: int) -> Mapping[str, float]:
        self._pulse()
        started = time.monotonic()
        rows = self._packed.rows(self._packed.of_prompts(step, self.job.prompts))
        metrics = self._update.run(rows, step)
        self._skips.note(metrics)
        timing = {"seconds/train": time.monotonic() - started}
        return metrics | timing | {"tokens/batch": float(sum(map(len, rows)))}

    def after_step(self, done: int) -> Mapping[str, float]:
        """Raise `TrainingError` if the last steps were all skipped: the model has diverged."""
        self._skips.check()
        return {}

    def end(self) -> None:
        """Do nothing: `JobExecution` exports the model."""
