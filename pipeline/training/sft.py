"""Supervised fine-tuning on a task's demonstrations.

Owns which demonstrations a step trains. Promises that step s always trains the same ones, so that a resumed job goes on
as if it had not stopped.
"""

from collections.abc import Callable, Mapping, Sequence

from pipeline.losses import SFT, Level
from pipeline.training.batches import Pulse
from pipeline.training.dispatch.dispatch import Dispatch
from pipeline.training.jobs import SftJob
from pipeline.training.rows import Batch, Row
from pipeline.training.tally import Skips

Demonstrate = Callable[[int, int], Sequence[Row]]
"""(step, count) → the rows of a step."""


class SupervisedFineTuning:
    """The `Algorithm` of an `SftJob`: minimises the cross-entropy of the demonstrated answers."""

    def __init__(
        self,
        job: SftJob,
        dispatch: Dispatch,
        demonstrate: Demonstrate,
        pulse: Pulse,
        level: Level = "basic",
    ) -> None:
        self.job = job
        self._dispatch, self._demonstrate, self._pulse, self._level = dispatch, demonstrate, pulse, level
        self._skips = Skips()

    @property
    def whole(self) -> bool:
        """Always: a step is one optimizer step."""
        return True

    def begin(self, step: int) -> None:
        if step == 0:
            self._dispatch.reset_optimizer("policy", self.job.optim, steps=self.job.steps)

    def step(self, step: int) -> Mapping[str, float]:
        self._pulse()
        batch = Batch.of(self._demonstrate(step, self.job.batch), "token")
        metrics = self._dispatch.forward_backward("policy", batch, SFT, level=self._level)
        metrics |= self._dispatch.optim_step("policy")
        self._skips.note(metrics)
        return metrics | {"tokens/batch": float(sum(batch.lengths))}

    def follow_up(self, done: int) -> Mapping[str, float]:
        """Nobody else needs to know. Raises `TrainingError` when the last steps were all skipped: the model is lost."""
        self._skips.check()
        return {}

    def end(self) -> None:
        """Nothing is left to do."""
