"""The loss of rows that are never trained, and the model of the lowest.

Owns when supervised fine-tuning is measured, and which model counts as the best. Promises the mean cross-entropy over
all counted tokens of the held-out rows, whatever portions they are computed in; that nothing is measured twice; and
that the best model is kept before its number is told, so that who reads the number finds the model. Must not know
ranks, checkpoints or files.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.group_batches import Pulse

log = logging.getLogger(__name__)
Note = Callable[[int, Mapping[str, float]], None]


class EvalLoss:
    """Measures the policy on held-out rows.

    measures.at(0)          # when the job begins
    measures.at(step)       # after each step; it knows which are due
    measures.at(steps, last=True)
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
        """Every `every` steps, `batch` rows at once; 0: first and last only.

        `measured` has the losses so far by step, `note` is told a new one, `keep` keeps the model as the best so far.
        """
        self._dispatch, self._rows, self._batch, self._every = dispatch, rows, batch, every
        self._measured, self._note, self._keep, self._pulse = dict(measured), note, keep, pulse

    def at(self, step: int, *, last: bool = False) -> None:
        """Measure the model of `step`, if it is due and was not measured. May raise what a `Pulse` does."""
        due = step == 0 or last or (self._every > 0 and step % self._every == 0)
        if not (due and self._rows) or step in self._measured:
            return
        started = time.monotonic()
        loss, tokens = self._measure()
        if step and loss < min(self._measured.values(), default=math.inf):
            self._keep()
            log.info("step %d: the held-out loss, %.4g, is the lowest so far; its model is kept", step, loss)
        self._measured[step] = loss
        seconds = time.monotonic() - started
        self._note(step, {"eval/loss": loss, "eval/tokens": float(tokens), "eval/seconds": seconds})

    def _measure(self) -> tuple[float, int]:
        """Mean cross-entropy (nats) over the counted tokens, and how many they are."""
        total, counted = 0.0, 0
        for begin in range(0, len(self._rows), self._batch):
            self._pulse()
            batch = Batch.of([self._rows[i] for i in range(begin, min(begin + self._batch, len(self._rows)))])
            answers = self._dispatch.forward("policy", batch)
            total -= sum(
                float(np.sum(answer, where=np.asarray(row.mask, bool), dtype=np.float64))
                for answer, row in zip(answers, batch.rows, strict=True)
            )
            counted += batch.counted
        return total / counted, counted
