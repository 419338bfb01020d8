"""DAPO's soft overlong punishment: a penalty that grows with the length of an answer near its limit.

Pure. The penalty is a part of the rewards that give advantages; a sample's recorded reward stays the task's.
"""


def overlong_penalty(length: int, limit: int, buffer: float, *, truncated: bool) -> float:
    """The penalty of an answer of `length` sampled tokens, from 0 to 1 (Yu et al. 2025, equation 13).

    It is 0 up to (1 − `buffer`) · `limit` tokens, rises linearly over the rest, and is 1 at the limit and for every
    answer that was `truncated`. With `buffer` 0 there is no penalty.

    >>> [overlong_penalty(length, 100, 0.2, truncated=False) for length in (80, 90, 100)]
    [0.0, 0.5, 1.0]
    """
    if not buffer:
        return 0.0
    if truncated:
        return 1.0
    margin = buffer * limit
    return min(1.0, max(0.0, (length - (limit - margin)) / margin))
