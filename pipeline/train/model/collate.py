"""A micro-batch as tensors.

Owns the conversion of rows (numpy) to the tensors of models and losses. Promises that only counted tokens reach the LM
head and the losses, in the order of rows and tokens. An empty micro-batch becomes two tokens that do not count, so that
a rank without rows can take part in the collective operations of the others (two, since layers are compiled once more
for a single token). If several ranks share a line, each gets its part. Must not know models or formulas of losses.

Notation: the model reads a rectangle of B × T tokens on this rank; N counted tokens, M of them predicted on this rank;
R rows; K tokens of a teacher's support.

    tokens      a b c d          mask 0 0 1 1: the counted tokens are c and d (N = 2)
    before_M        1 2          a token is predicted from the hidden state of its predecessor
    targets_M       c d
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.algorithms.loss_tokens import LossTokens, ValueTokens
from pipeline.errors import TrainingError
from pipeline.train.batching import packing
from pipeline.train.batching.packing import Layout, Packing
from pipeline.train.batching.sequences import Batch, Column, TrainSequence
from pipeline.train.model.context_parallel import ContextParallel
from pipeline.train.model.packed_attention import Segments
from pipeline.train.model.routing_replay import RoutedTokens
from pipeline.train.model.to_device import to_device

_NOTHING = Batch((TrainSequence(np.zeros(2, np.int32), np.zeros(2, np.uint8)),), (0.0,))


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of a model for a micro-batch, and its rows for the losses.

    Attributes:
        tokens_BT, positions_BT: int64; padding is token 0.
        segments: tables that keep attention inside the rows of a packed line; None if each line is one row.
        before_M: int64, index in the flattened rectangle of the predecessor of each token that is predicted here.
        targets_M: int64, the tokens that are predicted here.
        support_MK: int64, these tokens, and at each a teacher's likeliest tokens; None without them.
        batch: the rows.
        rows_T: int64, number of rows that have each token of the flattened rectangle; 0 of padding. On the host.
        where_R: int64, index in the flattened rectangle of each token of each row, row after row; below 0 or beyond it
            if the token is on another rank. On the host.
        own_M: int64, indices among the N counted tokens of those predicted here, because their predecessors are on this
            rank; None: all of them.
        routed: the recorded experts of the flattened rectangle; None if no row has any.
    """

    tokens_BT: Tensor
    positions_BT: Tensor
    segments: Segments | None
    before_M: Tensor
    targets_M: Tensor
    batch: Batch
    rows_T: NDArray[np.int64]
    where_R: NDArray[np.int64]
    own_M: Tensor | None = None
    routed: RoutedTokens | None = None
    support_MK: Tensor | None = None

    def complete(self, answer_M: Tensor) -> Tensor:
        """The outputs of all N counted tokens, from the M of each rank that shares the line: [M] → [N], or
        [M, K] → [N, K]. Collective over these ranks.

        A loss needs all of them, since some losses read whole rows, which may be spread over several ranks.
        """
        if self.own_M is None or self.segments is None or self.segments.context is None:
            return answer_M
        return self.segments.context.merge(answer_M, self.own_M, self.batch.counted)

    def row_means(self) -> tuple[Tensor, Tensor]:
        """The share of each row in a mean loss, [rows], and the matrix [rows, B · T] for the means over all
        tokens of each row; each rank of a shared line has its columns. Float32 on the host."""
        rows, lengths = self.batch.rows, self.batch.lengths
        shares = [weight * row.counted for row, weight in zip(rows, self.batch.weights, strict=True)]
        means = np.zeros((len(rows), len(self.rows_T)), np.float32)
        numbers, where_R = np.repeat(np.arange(len(rows)), lengths), self.where_R[: sum(lengths)]
        own = (where_R >= 0) & (where_R < len(self.rows_T))
        means[numbers[own], where_R[own]] = np.repeat(1 / np.asarray(lengths, np.float64), lengths)[own]
        return torch.tensor(shares, dtype=torch.float32), torch.from_numpy(means)

    def loss_tokens(self, logprobs: Tensor, entropy_N: Tensor | None) -> LossTokens:
        """The inputs of a policy loss, in the type of `logprobs`: of the counted tokens [N], or of the support [N, K].

        Rows of supervised losses have no sampler log-probabilities; they get the policy's own.
        """
        rows = self.batch.rows
        logprobs_N, support_NK = (logprobs, None) if logprobs.ndim == 1 else (logprobs[:, 0], logprobs)
        sampler_logprobs_N = self._column("sampler_logprobs", logprobs_N)
        numbers = np.repeat(np.arange(len(rows)), self._counts)  # [R] → [N], the row of each counted token
        return LossTokens(
            logprobs_N=logprobs_N,
            weights_N=self.weights(logprobs_N),
            advantages_N=_like(_flat(rows, "advantages"), logprobs_N),
            sampler_logprobs_N=logprobs_N.detach() if sampler_logprobs_N is None else sampler_logprobs_N,
            rows_N=to_device(numbers, logprobs_N.device),
            rows=max(1, len(rows)),
            reference_N=self._column("reference", logprobs_N),
            entropy_N=entropy_N,
            old_logprobs_N=self._column("old_logprobs", logprobs_N),
            support_NK=support_NK,
            teacher_support_NK=None if support_NK is None else self._teacher_support(logprobs_N),
        )

    def _teacher_support(self, like_N: Tensor) -> Tensor:
        """The teacher's log-probabilities of the support, [N, K], with the type and device of `like_N`."""
        top_Nk = np.concatenate([row.top_logprobs for row in self.batch.rows if row.top_logprobs is not None])
        sampled_N1 = _flat(self.batch.rows, "reference")[:, None]
        return _like(np.concatenate([sampled_N1, top_Nk], axis=1), like_N)

    def value_tokens(self, values_N: Tensor) -> ValueTokens:
        """The inputs of a critic's loss; `TrainingError` for rows without `returns` or without the `values` of the
        step's begin."""
        old_values_N, returns_N = (self._column(field, values_N) for field in ("values", "returns"))
        if old_values_N is None or returns_N is None:
            raise TrainingError("a critic is trained on rows with values and returns, and these have none")
        return ValueTokens(values_N, old_values_N, returns_N, self.weights(values_N))

    @property
    def _counts(self) -> list[int]:
        return [row.counted for row in self.batch.rows]

    def weights(self, like: Tensor) -> Tensor:
        """The weight of each counted token in the loss, [N], with the type and device of `like`."""
        return _like(np.repeat(np.asarray(self.batch.weights, np.float64), self._counts), like)

    def _column(self, field: Column, like: Tensor) -> Tensor | None:
        """A column of the rows at the counted tokens, [N]; None if a row lacks it."""
        rows = self.batch.rows
        return None if any(getattr(row, field) is None for row in rows) else _like(_flat(rows, field), like)


def collate(batch: Batch, how: Packing, device: torch.device, context: ContextParallel | None = None) -> MicroBatch:
    """The tensors of a micro-batch on `device`; with `context`, of this rank's part of the line."""
    laid_out = batch if batch.rows else _NOTHING
    rows = laid_out.rows
    tokens_R = np.concatenate([row.tokens for row in rows]).astype(np.int64)
    counted_N = np.flatnonzero(np.concatenate([row.mask for row in rows]))
    layout = packing.make_layout(laid_out.lengths, how, laid_out.prefix_groups(how))
    # The mask of a row's first token is 0, so `counted_N - 1` is always in the same row.
    before_N, own_M, first = layout.where[counted_N - 1], None, 0
    if context is not None:
        layout = _filled(layout, context)
        part = context.own_part(len(layout.positions))
        own_M, first = np.flatnonzero((before_N >= part.start) & (before_N < part.stop)), part.start
    # [B · T], a token that several rows share counts for each; 0 of the placeholder, which stands for no row.
    held_T = np.bincount(layout.where[: len(tokens_R)], minlength=len(layout.positions)) * bool(batch.rows)
    own = slice(None) if own_M is None else own_M
    support_NK = _support(rows, tokens_R[counted_N])
    here = slice(None) if context is None else context.own_part(len(held_T))
    return MicroBatch(
        *model_input(layout, tokens_R, device, context),
        before_M=to_device(before_N[own] - first, device),
        targets_M=to_device(tokens_R[counted_N[own]], device),
        batch=batch,
        rows_T=held_T[here],
        where_R=layout.where - first,
        own_M=None if own_M is None else to_device(own_M, device),
        routed=RoutedTokens.from_rows(rows, layout.where, len(held_T), here, device),
        support_MK=None if support_NK is None else to_device(support_NK[own], device),
    )


def _support(rows: tuple[TrainSequence, ...], targets_N: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The counted tokens, and a teacher's likeliest tokens at each: [N, K]; None without a teacher's tokens."""
    top = [row.top_ids for row in rows if row.top_ids is not None]
    return np.concatenate([targets_N[:, None], np.concatenate(top)], axis=1) if top else None


def model_input(
    layout: Layout, tokens_R: NDArray[np.int64], device: torch.device, context: ContextParallel | None = None
) -> tuple[Tensor, Tensor, Segments | None]:
    """The inputs of a model for rows with the tokens `tokens_R`, row after row: `tokens_BT`, `positions_BT`,
    `segments`.

    With `context`, tokens and positions are this rank's part of the line, whose length the ranks divide; the segments
    are those of the whole line, since attention sees all of it.
    """
    tokens, segments = np.zeros(len(layout.positions), np.int64), None
    tokens[layout.where[: len(tokens_R)]] = tokens_R  # a last row from `packing.fill` has no tokens of the batch
    if layout.packing != "padded":
        where = layout.where if layout.packing == "shared" else None
        segments = Segments.of(layout.lengths.tolist(), device, where, context)
    part = slice(None) if context is None else context.own_part(len(tokens))
    rectangles = (values.reshape(layout.shape)[:, part] for values in (tokens, layout.positions))  # [B · T] → [B, T]
    tokens_BT, positions_BT = (to_device(rectangle, device) for rectangle in rectangles)
    return tokens_BT, positions_BT, segments


def _filled(layout: Layout, context: ContextParallel) -> Layout:
    """The layout, extended so that the ranks of `context` divide its line evenly."""
    if layout.packing == "padded":
        raise TrainingError("padded rows cannot be spread over ranks: only packed ones can (training.mesh.cp)")
    return packing.fill(layout, context.whole_length(len(layout.positions)))


def _like(values: NDArray[np.float64], like: Tensor) -> Tensor:
    return to_device(values, like.device, like.dtype)


def _flat(rows: tuple[TrainSequence, ...], field: Column) -> NDArray[np.float64]:
    """A field's values at the counted tokens of all rows, in order: [N]."""
    parts = [np.zeros(0)]
    for row in rows:
        values = np.broadcast_to(np.asarray(getattr(row, field), np.float64), len(row))  # a scalar advantage → [T]
        parts.append(values[np.asarray(row.mask, bool)])
    return np.concatenate(parts)
