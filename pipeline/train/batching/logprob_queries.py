"""Rows that ask for the log-probabilities of given tokens at given places.

Owns `QueryRow`, for callers that decide themselves what each position is to predict: the token that follows, another
one, or several. Numpy only, cheap to pickle; must not know torch, ranks or models.

Notation: T tokens of a row, Q questions about it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class QueryRow:
    """One sequence, and what is asked about it.

    Attributes:
        tokens: int32[T].
        at: int64[Q], positions 0 … T − 1: each question is about what follows the tokens up to there, inclusive.
        targets: int32[Q], the token whose log-probability is asked for.
        columns: float32[Q] each, what a loss reads of every question.
    """

    tokens: NDArray[np.int32]
    at: NDArray[np.int64]
    targets: NDArray[np.int32]
    columns: Mapping[str, NDArray[np.float32]]

    def __len__(self) -> int:
        return len(self.tokens)
