"""The loss of SFT on the eval split, and the selection of the best model.

Owns the schedule of this evaluation. Promises the mean cross-entropy over all counted tokens of the eval rows,
independent of the batches they are computed in; that no step is measured twice; and that the best model is saved before
its loss is logged, so that a reader of the loss finds the model. Must not know ranks, checkpoints or files.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.group_batches import Pulse

log = logging.getLogger(__name__)
Note = Callable[[int, Mapping[str, float]], None]


class EvalLoss:
    """Measures the policy's loss on the eval rows.

    eval_loss.at(0)          # when the job begins
    eval_loss.at(step)       # after each step; does nothing unless due
    eval_loss.at(steps, last=True)
    """

    def __init__(
        self,
        dispatch: RankGroup,
        rows: Sequence[TrainSequence],
        batch: int,
        every: int,
        measured: Mapping[int, float],
        note: Note,
        keep: Callable[[], None],
        pulse: Pulse,
    ) -> None:
        """Create the evaluation; nothing is measured yet.

        Args:
            dispatch: the ranks that compute the loss.
            rows: rows of the eval split.
            batch: rows per forward pass.
            every: interval in steps; 0: first and last only.
            measured: losses that earlier attempts have logged, by step.
            note: logs the metrics of a step.
            keep: saves the current model as the best.
            pulse: called between forward passes.
        """
        self._dispatch, self._rows, self._batch, self._every = dispatch, rows, batch, every
        self._measured, self._note, self._keep, self._pulse = dict(measured), note, keep, pulse

    def at(self, step: int, *, last: bool = False) -> None:
        """Measure the model of `step`, if it is due and not measured yet. May raise a `Pulse`'s errors."""
        due = step == 0 or last or (self._every > 0 and step % self._every == 0)
        if not (due and self._rows) or step in self._measured:
            return
        started = time.monotonic()
        metrics = self._measure()
        loss = metrics["eval/loss"]
        if step and loss < min(self._measured.values(), default=math.inf):
            self._keep()
            log.info("step %d: the held-out loss, %.4g, is the lowest so far; its model is kept", step, loss)
        self._measured[step] = loss
        seconds = time.monotonic() - started
        self._note(step, {**metrics, "eval/seconds": seconds})

    def _batches(self) -> Iterator[Batch]:
        """The eval rows in order, `batch` at a time; calls the pulse before each."""
        for begin in range(0, len(self._rows), self._batch):
            self._pulse()
            yield Batch.of(self._rows[begin : begin + self._batch])

    def _measure(self) -> dict[str, float]:
        """`eval/loss`, the mean cross-entropy (nats) over the counted tokens, and `eval/tokens`, their number."""
        total, counted = 0.0, 0
        for batch in self._batches():
            logprobs_by_row = self._dispatch.forward("policy", batch)  # float32[T] of each row
            total -= sum(
                float(np.sum(logprobs, where=np.asarray(row.mask, bool), dtype=np.float64))
                for logprobs, row in zip(logprobs_by_row, batch.rows, strict=True)
            )
            counted += batch.counted
        return {"eval/loss": total / counted, "eval/tokens": float(counted)}
