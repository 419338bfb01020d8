"""Supervised fine-tuning: one optimizer step per step.

Owns the step: cross-entropy of the policy, normalized over the counted tokens of the step. The caller supplies the
source of rows (a dataset, the task's demonstrations, or packed files) and the evaluation. Promises that the rows of
step s depend on s alone, so a resumed job trains the same rows as an uninterrupted one; and that a new job starts with
a new optimizer. Must not know ranks, checkpoints or files.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.compile_warmup import WarmUp
from pipeline.train.loop.eval_loss import EvalLoss
from pipeline.train.loop.group_batches import Pulse
from pipeline.train.loop.overflow_retries import train_batch
from pipeline.train.loop.step_metrics import NonFiniteGuard
from pipeline.train.loss_specs import SFT, MetricsLevel
from pipeline.train.train_jobs import SftJob

Demonstrate = Callable[[int, int], Sequence[TrainSequence]]
"""(step, count) → the `count` rows of a step; always the same ones for the same step."""


class SupervisedFineTuning:
    """The `Algorithm` of an `SftJob`: minimizes the cross-entropy of the counted tokens.

    Attributes:
        is_checkpointable: False during the optimizer step. If it fails on one rank, the ranks' parameters differ, which
            no checkpoint may contain.
    """

    def __init__(
        self,
        job: SftJob,
        dispatch: RankGroup,
        demonstrate: Demonstrate,
        pulse: Pulse,
        level: MetricsLevel = "basic",
        held_out: EvalLoss | None = None,
        warm_up: WarmUp | None = None,
    ) -> None:
        """`held_out` evaluates the model on the eval split; None: no evaluation. Without `warm_up` the first step
        compiles."""
        self.job, self._held_out, self._warm_up = job, held_out, warm_up
        self._dispatch, self._demonstrate, self._pulse, self._level = dispatch, demonstrate, pulse, level
        self._skips = NonFiniteGuard()
        self.is_checkpointable = True

    def begin(self, step: int) -> None:
        if step == 0:
            self._dispatch.reset_optimizer("policy", self.job.optim, steps=self.job.steps)
        if self._warm_up and step < self.job.steps:
            self._warm_up.run({"policy": SFT}, ["policy"] if self._held_out else [])
        self._measure(step)

    def step(self, step: int) -> Mapping[str, float]:
        self._pulse()
        batch = Batch.of(self._demonstrate(step, self.job.batch), "token")
        split = self._dispatch.cut(["policy"], batch)
        metrics = train_batch(self._dispatch, "policy", split, SFT, self._level, self._stepping)
        self._skips.note(metrics)
        size = {"tokens/batch": float(sum(batch.lengths)), "tokens/shared": float(split.saved_tokens)}
        return metrics | size | {"steps": float(self.job.steps)}

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """An optimizer step, after whose failure `is_checkpointable` stays False."""
        self.is_checkpointable = False
        yield
        self.is_checkpointable = True

    def after_step(self, done: int) -> Mapping[str, float]:
        """Evaluate if due. Raises `TrainingError` if the last steps were all skipped: the model has diverged."""
        self._skips.check()
        self._measure(done)
        return {}

    def end(self) -> None:
        """Evaluate the final model."""
        self._measure(self.job.steps, last=True)

    def _measure(self, step: int, *, last: bool = False) -> None:
        if self._held_out:
            self._held_out.at(step, last=last)
