"""Compilation of layers before the first real step, by passes over placeholder rows while servers start.

Owns the passes that compile everything a step needs, and their rows. Promises that only compiled code remains:
parameters, moments, progress, gradients and random states are unchanged. No micro-batch is larger than the config
permits in a real step, so a budget that does not fit the memory fails here, with the error of a real step. Without
`training.compile` it does nothing. Must not know when a job begins.

    warm_up = WarmUp(config, dispatch, pulse, phase)
    warm_up.run({"policy": config.loss}, ["reference"])     # models must have no gradients yet

The compiler treats a size as a constant until a second size appears, and size 1 always as a constant. So three
micro-batches suffice: two rows; a full one of other sizes, after which the layers are compiled for all sizes; and a
single row. Layouts with shared prefixes use different index tables, so with `shared` packing the first two
micro-batches are repeated with rows that have a common prefix.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import NDArray

from pipeline.config import RunConfig
from pipeline.topology.gpu_memory import micro_batch_tokens
from pipeline.topology.memory_budget import trainer_ranks
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.group_batches import Pulse
from pipeline.train.loss_specs import LossSpec
from pipeline.train.model.model_worker import ModelWorker

log = logging.getLogger(__name__)
Phase = Callable[[], AbstractContextManager[object]]
"""A context that is entered during a warm-up, to display it in the status."""


class WarmUp:
    """The warm-up of a trainer's models."""

    def __init__(self, config: RunConfig, dispatch: RankGroup, pulse: Pulse, phase: Phase = nullcontext) -> None:
        self._config, self._dispatch, self._pulse, self._phase = config, dispatch, pulse, phase

    @property
    def due(self) -> bool:
        """Whether layers are compiled."""
        return self._config.training.compile

    def run(self, trained: Mapping[str, LossSpec], forward_only: Sequence[str] = ()) -> None:
        """Compile the training passes of the models in `trained`, with their losses, and the forward passes of
        `forward_only`. No model has gradients before or afterwards.

        Raises the errors of a `Pulse`, between two operations, and the `TrainingError` of a failed pass.
        """
        if not self.due:
            return
        started, batches = time.monotonic(), self._batches([*trained, *forward_only])
        with self._phase():
            for name, objective in trained.items():
                for batch in batches:
                    self._train(name, batch, objective)
            for name in forward_only:
                for batch in batches:
                    self._pulse()
                    self._dispatch.forward(name, batch)
        log.info("warm-up: everything is compiled after %.1f s", time.monotonic() - started)

    def _train(self, name: str, batch: Batch, objective: LossSpec) -> None:
        self._pulse()
        level = self._config.training.metrics
        # The weight 0 makes all gradients 0; they are dropped, so that the first real step starts without any.
        self._dispatch.forward_backward(name, batch, objective, loss_weight=0.0, level=level)
        self._dispatch.run_on_ranks(name, drop_gradients, needs="forward_backward")

    def _batches(self, names: Sequence[str]) -> list[Batch]:
        """The placeholder batches; each is exactly one micro-batch on every rank."""
        ranks, budget, cp = trainer_ranks(self._config), self._dispatch.budget, self._config.training.mesh.cp
        # With context parallelism, cp ranks compute one micro-batch together, so there are ranks / cp micro-batches.
        tokens, replicas = min(budget.tokens, micro_batch_tokens(self._config, ranks) * cp), ranks // cp
        vocabulary = min(self._dispatch.models[name].vocabulary for name in names)
        sizes = shapes(tokens, self._config.model.max_length, budget.rows)
        distinct = [
            [empty_row(length, vocabulary, number) for number in range(count * replicas)] for count, length in sizes
        ]
        shared = [
            [
                row
                for replica in range(replicas)
                for row in rows_with_shared_prefix(count, length, vocabulary, replica * count)
            ]
            for count, length in sizes
            if budget.packing == "shared" and min(count, length) > 1
        ]
        return [Batch.of(rows) for rows in distinct + shared]


def shapes(tokens: int, longest: int, most: int | None = None) -> list[tuple[int, int]]:
    """(rows, tokens of each row) of each micro-batch, in order: at most `tokens` in total, `most` rows (None: any
    number), and `longest` tokens per row."""
    most = most or tokens
    full = min(most, max(3, -(-tokens // longest)))
    length = min(longest, tokens // full)
    # Sizes that are equal by chance would be compiled as one symbol. The number of rows must therefore differ from
    # their length; and so must the table of row bounds, which has one more entry than rows.
    if full in (length, length - 1):
        length = max(1, length - 2)
    return [(min(most, 2), max(1, 3 * length // 4)), (full, length), (1, max(1, length // 2))]


def empty_row(
    length: int, vocabulary: int, number: int = 0, prefix: Sequence[int] | NDArray[np.int32] = ()
) -> TrainSequence:
    """A placeholder row with the inputs of every loss. Rows with different `number` share only `prefix`, as far as the
    vocabulary suffices."""
    zeros, mask = np.zeros(length, np.float32), np.ones(length, np.uint8)
    mask[0] = 0
    tokens = (np.arange(length, dtype=np.int32) * (1 + number // vocabulary) + number) % vocabulary
    tokens[: len(prefix)] = prefix
    return TrainSequence(
        tokens, mask, sampler_logprobs=zeros, old_logprobs=zeros, reference=zeros, values=zeros, returns=zeros
    )


def rows_with_shared_prefix(count: int, length: int, vocabulary: int, number: int) -> list[TrainSequence]:
    """`count` rows: one of half the length, and longer ones that begin with it."""
    # The longest row's suffix in the layout is shorter than the row that attention reads: the kernel gets two sizes.
    first = empty_row(length // 2, vocabulary, number)
    return [first, *(empty_row(length, vocabulary, number + more, first.tokens) for more in range(1, count))]


def drop_gradients(worker: ModelWorker) -> None:
    """Delete the gradients of a rank's model."""
    worker.model.zero_grad(set_to_none=True)
