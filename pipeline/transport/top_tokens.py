"""The likeliest tokens of a teacher, as they travel with a group.

Owns the bytes of one row's record, 8 for each token. Only sampled tokens have one: a prompt of thousands of tokens adds
nothing to the record. Must not know models or losses.

Notation: n sampled tokens of a row, k = `teacher.top_k`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import RecordError

ENTRY_BYTES = 8
"""Bytes of one likely token: its id and its log-probability."""
ABSENT = float("-inf")
"""The log-probability of an entry that stands for no token, with id 0: the teacher returned fewer than k."""


class TopTokens(NamedTuple):
    """The teacher's likeliest tokens where the policy sampled: int32[n, k] ids and float32[n, k] log-probabilities
    (nats), little-endian, the likeliest first, without the sampled token itself."""

    ids: bytes
    logprobs: bytes

    def arrays(self, top_k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Both as read-only views [n, k]; `ValueError` if they do not fit k."""
        return (
            np.frombuffer(self.ids, "<i4").reshape(-1, top_k),
            np.frombuffer(self.logprobs, "<f4").reshape(-1, top_k),
        )

    def within(self, vocabulary: int) -> "TopTokens":
        """With ids from `vocabulary` on made absent: a teacher of the same family may have more rows of padding, so
        that their probability belongs to all tokens that are not among the k."""
        ids, logprobs = np.frombuffer(self.ids, "<i4"), np.frombuffer(self.logprobs, "<f4")
        outside = ids >= vocabulary
        if not outside.any():
            return self
        return TopTokens(
            np.where(outside, ids.dtype.type(0), ids).tobytes(),
            np.where(outside, np.float32(ABSENT), logprobs).tobytes(),
        )

    def check(self, sampled: int, top_k: int) -> None:
        """Raise `RecordError` unless there are k entries for each of `sampled` tokens, with ids that are not negative
        and log-probabilities that are numbers or `ABSENT`."""
        size = 4 * sampled * top_k
        if (len(self.ids), len(self.logprobs)) != (size, size):
            raise RecordError(f"a teacher's likeliest tokens do not fit {sampled} sampled tokens with {top_k} each")
        ids, logprobs = self.arrays(top_k)
        if size and ids.min() < 0:
            raise RecordError(f"a teacher's token has the id {ids.min()}")
        if not (logprobs < np.inf).all():  # also false for NaN
            raise RecordError("a log-probability of a teacher's likeliest tokens is not a number")


def check_rows(rows: Sequence[TopTokens], sampled: Sequence[int], top_k: int) -> None:
    """Raise `RecordError` unless there is a record for each row of `sampled` tokens, or none with k = 0, and each fits;
    see `TopTokens.check`."""
    expected = sampled if top_k else []
    if len(rows) != len(expected):
        raise RecordError(f"a teacher's likeliest tokens of {len(rows)} rows; expected {len(expected)}")
    for tokens, count in zip(rows, expected, strict=True):
        tokens.check(count, top_k)
