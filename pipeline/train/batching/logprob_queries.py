"""Rows with queries for the log-probabilities of given tokens at given positions.

Owns `QueryRow`, for callers that choose the targets of each position: the next token, another one, or several. Numpy
only, cheap to pickle; must not know torch, ranks or models.

Notation: T tokens of a row, Q queries of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class QueryRow:
    """One sequence and its queries.

    Attributes:
        tokens: int32[T].
        at: int64[Q], positions 0 … T − 1: query q asks for the token after tokens 0 … at[q].
        targets: int32[Q], the token whose log-probability is computed.
        columns: float32[Q] each, the inputs of a loss for every query.
    """

    tokens: NDArray[np.int32]
    at: NDArray[np.int64]
    targets: NDArray[np.int32]
    columns: Mapping[str, NDArray[np.float32]]

    def __len__(self) -> int:
        return len(self.tokens)
