"""Compiled layers before the first real step: rows that mean nothing go through the models while servers start.

Owns which passes have everything compiled that steps need, and the rows of these passes. Promises that nothing is left
of them but what was compiled: parameters, moments, progress, gradients and random states are what they were; and that
no micro-batch is larger than the config lets a real one be, so that what does not fit fails here, with the error of a
real step. Does nothing where nothing is compiled. Must not know when a job begins.

    warm_up = WarmUp(config, dispatch, pulse, phase)
    warm_up.run({"policy": config.loss}, asked=["reference"])     # of models that have no gradients yet

A size is compiled as a constant until another one comes, and 1 is always a constant. So three micro-batches suffice:
some rows, a full one of other sizes, whose layers are then compiled for all, and one with a single row. Lines that rows
share have tables of their own: where there may be some, the first two come again with rows that begin alike.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import NDArray

from pipeline.config import RunConfig
from pipeline.topology.gpu_memory import micro_batch_tokens, trainer_ranks
from pipeline.train.algorithms import LossSpec
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.group_batches import Pulse
from pipeline.train.model.model_worker import ModelWorker

log = logging.getLogger(__name__)
Phase = Callable[[], AbstractContextManager[object]]
"""What is entered while a warm-up goes on, so that people see it."""


class WarmUp:
    """The warm-up of a trainer's models."""

    def __init__(self, config: RunConfig, dispatch: RankGroup, pulse: Pulse, phase: Phase = nullcontext) -> None:
        self._config, self._dispatch, self._pulse, self._phase = config, dispatch, pulse, phase

    @property
    def due(self) -> bool:
        """Whether layers are compiled."""
        return self._config.training.compile

    def run(self, trained: Mapping[str, LossSpec], asked: Sequence[str] = ()) -> None:
        """Train models, by name, on these losses, and ask models; all have no gradients, before and afterwards.

        Raises what a `Pulse` does, between two operations, and the `TrainingError` of a pass that fails.
        """
        if not self.due:
            return
        started, batches = time.monotonic(), self._batches([*trained, *asked])
        with self._phase():
            for name, objective in trained.items():
                for batch in batches:
                    self._train(name, batch, objective)
            for name in asked:
                for batch in batches:
                    self._pulse()
                    self._dispatch.forward(name, batch)
        log.info("warm-up: everything is compiled after %.1f s", time.monotonic() - started)

    def _train(self, name: str, batch: Batch, objective: LossSpec) -> None:
        self._pulse()
        level = self._config.training.metrics
        self._dispatch.forward_backward(name, batch, objective, loss_weight=0.0, level=level)
        self._dispatch.run_on_ranks(name, drop_gradients, needs="forward_backward")

    def _batches(self, names: Sequence[str]) -> list[Batch]:
        """Each of them is one micro-batch on every rank."""
        ranks, budget, cp = trainer_ranks(self._config), self._dispatch.budget, self._config.training.mesh.cp
        tokens, places = min(budget.tokens, micro_batch_tokens(self._config, ranks) * cp), ranks // cp
        vocabulary = min(self._dispatch.models[name].vocabulary for name in names)
        sizes = shapes(tokens, self._config.model.max_length, budget.rows)
        apart = [[empty_row(length, vocabulary, number) for number in range(count * places)] for count, length in sizes]
        alike = [
            [
                row
                for place in range(places)
                for row in rows_with_shared_prefix(count, length, vocabulary, place * count)
            ]
            for count, length in sizes
            if budget.packing == "shared" and min(count, length) > 1
        ]
        return [Batch.of(rows) for rows in apart + alike]


def shapes(tokens: int, longest: int, most: int | None = None) -> list[tuple[int, int]]:
    """Rows and their length of each micro-batch, in order: at most `tokens` in `most` rows (None: any number), of at
    most `longest` tokens each.

    Sizes that are equal by chance would be compiled as one size: so the rows of the full one are not as many as each
    has tokens, nor one less, since a table of their bounds has one entry more.
    """
    most = most or tokens
    full = min(most, max(3, -(-tokens // longest)))
    length = min(longest, tokens // full)
    if full in (length, length - 1):
        length = max(1, length - 2)
    return [(min(most, 2), max(1, 3 * length // 4)), (full, length), (1, max(1, length // 2))]


def empty_row(
    length: int, vocabulary: int, number: int = 0, prefix: Sequence[int] | NDArray[np.int32] = ()
) -> TrainSequence:
    """A row that any loss takes; rows of several numbers share only their prefix, as far as words suffice."""
    zeros, mask = np.zeros(length, np.float32), np.ones(length, np.uint8)
    mask[0] = 0
    tokens = (np.arange(length, dtype=np.int32) * (1 + number // vocabulary) + number) % vocabulary
    tokens[: len(prefix)] = prefix
    return TrainSequence(
        tokens, mask, sampler_logprobs=zeros, proximal=zeros, reference=zeros, values=zeros, returns=zeros
    )


def rows_with_shared_prefix(count: int, length: int, vocabulary: int, number: int) -> list[TrainSequence]:
    """A row of half the length, and others that begin with it: what is laid of the longest is shorter than what
    attention reads of it, so a kernel sees two sizes."""
    first = empty_row(length // 2, vocabulary, number)
    return [first, *(empty_row(length, vocabulary, number + more, first.tokens) for more in range(1, count))]


def drop_gradients(worker: ModelWorker) -> None:
    """On every rank."""
    worker.model.zero_grad(set_to_none=True)
