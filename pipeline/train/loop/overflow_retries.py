"""An optimizer step on a batch, which is trained again at a smaller loss scale if its float16 gradients overflow.

Owns the number of passes over a batch. Promises that a batch changes the model once at most; that all ranks do the
same, since the norm that decides is that of all of them; and that a repeated pass has the parameters, the rows and the
loss weights of the first. No memory is added, since the rows are in it: at the caller, or staged on the ranks.

    metrics = train_batch(dispatch, "policy", batch, loss)
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import isfinite

from pipeline.train.batching.sequences import Batch
from pipeline.train.controller.batch_staging import ShardedBatch
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loss_specs import LossSpec, MetricsLevel

MAX_OVERFLOWS = 4
"""Passes over a batch in a step; each later epoch of the step adds one, so a batch has 4 + epochs - 1 at most. After
four overflows the scale is a sixteenth, and takes 1,600 steps to grow back, so more would let one batch whose gradients
are infinite at any scale round those of all later ones to 0."""


def train_batch(
    dispatch: RankGroup,
    name: str,
    rows: Batch | ShardedBatch,
    loss: LossSpec,
    level: MetricsLevel = "basic",
    stepping: Callable[[], AbstractContextManager[None]] = nullcontext,
    passes: int = MAX_OVERFLOWS,
) -> dict[str, float]:
    """The metrics of `forward_backward` and `optim_step`, of the last pass over the rows, with the `flops` of all
    passes. Each optimizer step is taken within a context of `stepping`. `passes` is the largest number of passes.

    In float16 `overflows` is the number of passes after which the scale was halved. `skipped` is 1 if the last one was
    among them, or its gradient was not finite for another reason. A loss that is not finite is not repeated: no scale
    makes it finite.
    """
    overflows = flops = 0.0
    while True:
        metrics = dispatch.forward_backward(name, rows, loss, level=level)
        if overflows:
            metrics["flops"] += flops
        with stepping():
            metrics |= dispatch.optim_step(name)
        if "overflows" not in metrics:
            return metrics
        overflows += metrics["overflows"]
        if not metrics["overflows"] or overflows >= passes or not isfinite(metrics["loss"]):
            return metrics | {"overflows": overflows}
        flops = metrics["flops"]


def passes_left(passes: int, metrics: dict[str, float]) -> int:
    """The passes over a batch in the next epoch of the same step: one, once it has halved the scale as often as a batch
    may. Without this bound a batch that overflows at any scale would halve it `MAX_OVERFLOWS` times in each epoch."""
    return max(1, passes - int(metrics.get("overflows", 0)))
