"""A micro-batch as tensors.

Owns the step from rows (numpy) to what the models and the losses read. Promises that only counted tokens reach the head
and the losses, in the order of rows and tokens, and that an empty micro-batch becomes two tokens that count nothing, so
that a short rank can take part in the collective operations of the others (one token is a size that layers are compiled
for once more). Of a line that several ranks share, each gets its part. Must not know models or losses' formulas.

Notation: B × T the rectangle that the model reads here, N counted tokens, M of them predicted here, R rows.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.errors import TrainingError
from pipeline.train.algorithms.loss_tokens import LossTokens, ValueTokens
from pipeline.train.batching import packing
from pipeline.train.batching.packing import Layout, Packing
from pipeline.train.batching.sequences import Batch, Column, TrainSequence
from pipeline.train.model.context_parallel import ContextParallel
from pipeline.train.model.packed_attention import Segments
from pipeline.train.model.to_device import to_device

_NOTHING = Batch((TrainSequence(np.zeros(2, np.int32), np.zeros(2, np.uint8)),), (0.0,))


@dataclass(frozen=True)
class MicroBatch:
    """What a model reads of a micro-batch, and the numpy side that the losses need.

    Attributes:
        tokens_BT, positions_BT: int64; padding is token 0.
        segments: tables that keep attention inside the rows of a packed line; None when each line is a row.
        before_M: int64, index in the flattened rectangle of the token before each that is predicted here.
        targets_M: int64, the tokens that are predicted.
        batch: the rows themselves.
        rows_T: int64, how many rows have each token of the flattened rectangle; 0 of padding. On the host.
        own_M: int64, which of the N counted tokens are predicted here: those whose predecessor is; None: all of them.
    """

    tokens_BT: Tensor
    positions_BT: Tensor
    segments: Segments | None
    before_M: Tensor
    targets_M: Tensor
    batch: Batch
    rows_T: NDArray[np.int64]
    own_M: Tensor | None = None

    def complete(self, answer_M: Tensor) -> Tensor:
        """The answers about all N counted tokens, from those of each rank that shares the line. Collective over these.

        Losses need all of them: some are of whole rows, which may lie on several ranks.
        """
        if self.own_M is None or self.segments is None or self.segments.context is None:
            return answer_M
        return self.segments.context.merge(answer_M, self.own_M, self.batch.counted)

    def loss_tokens(self, logprobs_N: Tensor, entropy_N: Tensor | None) -> LossTokens:
        """The counted tokens with the policy's answer about them; numbers in the type of `logprobs_N`.

        Rows without sampler log-probabilities, which only supervised losses are given, get the policy's own.
        """
        rows = self.batch.rows
        sampler_logprobs_N = self._given("sampler_logprobs", logprobs_N)
        numbers = np.repeat(np.arange(len(rows)), self._counts)
        return LossTokens(
            logprobs_N=logprobs_N,
            weights_N=self._weights(logprobs_N),
            advantages_N=_like(_flat(rows, "advantages"), logprobs_N),
            sampler_logprobs_N=logprobs_N.detach() if sampler_logprobs_N is None else sampler_logprobs_N,
            rows_N=to_device(numbers, logprobs_N.device),
            rows=max(1, len(rows)),
            reference_N=self._given("reference", logprobs_N),
            entropy_N=entropy_N,
            old_logprobs_N=self._given("old_logprobs", logprobs_N),
        )

    def value_tokens(self, values_N: Tensor) -> ValueTokens:
        """The counted tokens with the critic's answer about them; `TrainingError` for rows without `returns` or the
        `values` of the step's beginning."""
        old_values_N, returns_N = (self._given(field, values_N) for field in ("values", "returns"))
        if old_values_N is None or returns_N is None:
            raise TrainingError("a critic is trained on rows with values and returns, and these have none")
        return ValueTokens(values_N, old_values_N, returns_N, self._weights(values_N))

    @property
    def _counts(self) -> list[int]:
        return [row.counted for row in self.batch.rows]

    def _weights(self, like: Tensor) -> Tensor:
        return _like(np.repeat(np.asarray(self.batch.weights, np.float64), self._counts), like)

    def _given(self, field: Column, like: Tensor) -> Tensor | None:
        rows = self.batch.rows
        return None if any(getattr(row, field) is None for row in rows) else _like(_flat(rows, field), like)


def collate(batch: Batch, how: Packing, device: torch.device, context: ContextParallel | None = None) -> MicroBatch:
    """The tensors of a micro-batch on `device`; with `context`, of this rank's part of it."""
    laid = batch if batch.rows else _NOTHING
    rows = laid.rows
    tokens_R = np.concatenate([row.tokens for row in rows]).astype(np.int64)
    counted_N = np.flatnonzero(np.concatenate([row.mask for row in rows]))
    layout = packing.make_layout(laid.lengths, how, laid.prefix_groups(how))
    before_N, own_M, first = layout.where[counted_N - 1], None, 0
    if context is not None:
        layout = _filled(layout, context)
        part = context.own_part(len(layout.positions))
        own_M, first = np.flatnonzero((before_N >= part.start) & (before_N < part.stop)), part.start
    held_T = np.bincount(layout.where[: len(tokens_R)], minlength=len(layout.positions)) * bool(batch.rows)
    mine = slice(None) if own_M is None else own_M
    return MicroBatch(
        *model_input(layout, tokens_R, device, context),
        before_M=to_device(before_N[mine] - first, device),
        targets_M=to_device(tokens_R[counted_N[mine]], device),
        batch=batch,
        rows_T=held_T if context is None else held_T[context.own_part(len(held_T))],
        own_M=None if own_M is None else to_device(own_M, device),
    )


def model_input(
    layout: Layout, tokens_R: NDArray[np.int64], device: torch.device, context: ContextParallel | None = None
) -> tuple[Tensor, Tensor, Segments | None]:
    """What a model reads of rows whose tokens, row after row, are these: `tokens_BT`, `positions_BT`, `segments`.

    With `context`, of a line whose length the ranks can share, this rank's part; the segments are those of all of it.
    """
    tokens, segments = np.zeros(len(layout.positions), np.int64), None
    tokens[layout.where[: len(tokens_R)]] = tokens_R  # a row that fills a line up has no tokens of the batch
    if layout.packing != "padded":
        where = layout.where if layout.packing == "shared" else None
        segments = Segments.of(layout.lengths.tolist(), device, where, context)
    part = slice(None) if context is None else context.own_part(len(tokens))
    whole = (each.reshape(layout.shape)[:, part] for each in (tokens, layout.positions))
    tokens_BT, positions_BT = (to_device(each, device) for each in whole)
    return tokens_BT, positions_BT, segments


def _filled(layout: Layout, context: ContextParallel) -> Layout:
    """The layout with a line that the ranks of `context` can share evenly."""
    if layout.packing == "padded":
        raise TrainingError("padded rows cannot be spread over ranks: only packed ones can (training.mesh.cp)")
    return packing.fill(layout, context.whole_length(len(layout.positions)))


def _like(values: NDArray[np.float64], like: Tensor) -> Tensor:
    return to_device(values, like.device, like.dtype)


def _flat(rows: tuple[TrainSequence, ...], field: Column) -> NDArray[np.float64]:
    """A field's number for each counted token of all rows, in order."""
    parts = [np.zeros(0)]
    for row in rows:
        whole = np.broadcast_to(np.asarray(getattr(row, field), np.float64), len(row))
        parts.append(whole[np.asarray(row.mask, bool)])
    return np.concatenate(parts)
