"""A micro-batch as tensors.

Owns the step from rows (numpy) to what the models and the losses read. Promises that only counted tokens reach the head
and the losses, in the order of rows and tokens, and that an empty micro-batch becomes two tokens that count nothing, so
that a short rank can take part in the collective operations of the others (one token is a size that layers are compiled
for once more). Must not know models, ranks or losses' formulas.

Notation: B × T the rectangle that the model reads, N counted tokens, R rows.
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
from pipeline.train.batching.sequences import Batch, Column, Row
from pipeline.train.model.packed_attention import Segments
from pipeline.train.model.to_device import to_device

_NOTHING = Batch((Row(np.zeros(2, np.int32), np.zeros(2, np.uint8)),), (0.0,))


@dataclass(frozen=True)
class MicroBatch:
    """What a model reads of a micro-batch, and the numpy side that the losses need.

    Attributes:
        tokens_BT, positions_BT: int64; padding is token 0.
        segments: tables that keep attention inside the rows of a packed line; None when each line is a row.
        before_N: int64, index in the flattened rectangle of the token before each counted one.
        targets_N: int64, the counted tokens.
        batch: the rows themselves.
    """

    tokens_BT: Tensor
    positions_BT: Tensor
    segments: Segments | None
    before_N: Tensor
    targets_N: Tensor
    batch: Batch

    def loss_tokens(self, logprobs_N: Tensor, entropy_N: Tensor | None) -> LossTokens:
        """The counted tokens with the policy's answer about them; numbers in the type of `logprobs_N`.

        Rows without behaviour log-probabilities, which only supervised losses are given, get the policy's own.
        """
        rows = self.batch.rows
        behaviour_N = self._given("behaviour", logprobs_N)
        numbers = np.repeat(np.arange(len(rows)), self._counts)
        return LossTokens(
            logprobs_N=logprobs_N,
            weights_N=self._weights(logprobs_N),
            advantages_N=_like(_flat(rows, "advantages"), logprobs_N),
            behaviour_N=logprobs_N.detach() if behaviour_N is None else behaviour_N,
            rows_N=to_device(numbers, logprobs_N.device),
            rows=max(1, len(rows)),
            reference_N=self._given("reference", logprobs_N),
            entropy_N=entropy_N,
            proximal_N=self._given("proximal", logprobs_N),
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


def collate(batch: Batch, how: Packing, device: torch.device) -> MicroBatch:
    """The tensors of a micro-batch on `device`."""
    laid = batch if batch.rows else _NOTHING
    rows = laid.rows
    tokens_R = np.concatenate([row.tokens for row in rows]).astype(np.int64)
    counted_N = np.flatnonzero(np.concatenate([row.mask for row in rows]))
    layout = packing.lay(laid.lengths, how, laid.kin(how))
    return MicroBatch(
        *model_input(layout, tokens_R, device),
        before_N=to_device(layout.where[counted_N - 1], device),
        targets_N=to_device(tokens_R[counted_N], device),
        batch=batch,
    )


def model_input(
    layout: Layout, tokens_R: NDArray[np.int64], device: torch.device
) -> tuple[Tensor, Tensor, Segments | None]:
    """What a model reads of rows whose tokens, row after row, are these: `tokens_BT`, `positions_BT`, `segments`."""
    tokens = np.zeros(len(layout.positions), np.int64)
    tokens[layout.where] = tokens_R
    segments = None
    if layout.packing != "padded":
        segments = Segments.of(layout.lengths.tolist(), device, layout.where if layout.packing == "shared" else None)
    tokens_BT, positions_BT = (to_device(each.reshape(layout.shape), device) for each in (tokens, layout.positions))
    return tokens_BT, positions_BT, segments


def _like(values: NDArray[np.float64], like: Tensor) -> Tensor:
    return to_device(values, like.device, like.dtype)


def _flat(rows: tuple[Row, ...], field: Column) -> NDArray[np.float64]:
    """A field's number for each counted token of all rows, in order."""
    parts = [np.zeros(0)]
    for row in rows:
        whole = np.broadcast_to(np.asarray(getattr(row, field), np.float64), len(row))
        parts.append(whole[np.asarray(row.mask, bool)])
    return np.concatenate(parts)
