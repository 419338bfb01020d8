"""The common prefix of two token sequences."""

import numpy as np
from numpy.typing import NDArray


def common_prefix(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Length of the common prefix, in tokens."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
