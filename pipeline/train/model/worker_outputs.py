"""Results of passes as numbers on the host: one transfer for all micro-batches, since each waits for the device."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.train.batching.sequences import Batch


def numbers(parts: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """The scalars of each micro-batch as floats."""
    scalars = [value.double() for part in parts for value in part.values()]
    values = iter(torch.stack(scalars).tolist() if scalars else ())
    return [{name: next(values) for name in part} for part in parts]


def by_row(batches: Sequence[Batch], answers: Sequence[Tensor]) -> list[NDArray[np.float32]]:
    """Scatter the answers of the N counted tokens of each batch, in the order of rows, to float32[T] of each row."""
    flat = torch.cat([answer_N.float() for answer_N in answers]).cpu().numpy() if answers else np.zeros(0, np.float32)
    rows: list[NDArray[np.float32]] = []
    used = 0
    for row in (row for batch in batches for row in batch.rows):
        whole = np.zeros(len(row), np.float32)
        whole[np.asarray(row.mask, bool)] = flat[used : used + row.counted]
        used += row.counted
        rows.append(whole)
    return rows
