"""The input tensors of every loss.

Owns `LossTokens`: the counted tokens of one micro-batch, flat, independent of rows, padding and packing. Must not know
models or ranks.

Notation: N counted tokens of the micro-batch, R its rows, K tokens of a teacher's support. A suffix names a tensor's
dimensions.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossTokens:
    """Counted tokens of one micro-batch.

    Attributes:
        logprobs_N: log-probability (nats, at the batch's temperature) of each token under the policy; has a gradient.
        weights_N: factor of each token in the global loss; contains the normalization, so a loss only sums.
        advantages_N: advantage of each token.
        sampler_logprobs_N: log-probability under the policy that sampled it; equals `logprobs_N.detach()` in supervised
            rows.
        proximal_N: log-probability under the old policy, the denominator of the ratio; None: `sampler_logprobs_N`
            or `logprobs_N.detach()`, by `LossConfig.old_logprobs`.
        rows_N: int64, row of each token, 0 … rows − 1.
        rows: R.
        reference_N: log-probability under the reference model, or None.
        entropy_N: entropy (nats) of the policy's distribution at each token, or None if it was not requested.
        support_NK: log-probability under the policy of the sampled token, `logprobs_N`, and then of the teacher's
            likeliest tokens; has a gradient. None with `teacher.top_k` 0.
        teacher_support_NK: their log-probabilities under the teacher; −∞ for an entry without a token.
    """

    logprobs_N: Tensor
    weights_N: Tensor
    advantages_N: Tensor
    sampler_logprobs_N: Tensor
    rows_N: Tensor
    rows: int
    reference_N: Tensor | None = None
    entropy_N: Tensor | None = None
    old_logprobs_N: Tensor | None = None
    support_NK: Tensor | None = None
    teacher_support_NK: Tensor | None = None

    @property
    def log_ratio_N(self) -> Tensor:
        """log(policy / old policy) of each token."""
        return self.logprobs_N - (self.sampler_logprobs_N if self.old_logprobs_N is None else self.old_logprobs_N)

    def row_mean(self, values_N: Tensor) -> Tensor:
        """Mean of the values over each token's row, for every token: [N] → [N]. Exact, since no row is ever split."""
        counts_R = self.rows_N.bincount(minlength=self.rows)
        return self.row_sum(values_N) / counts_R[self.rows_N]

    def row_sum(self, values_N: Tensor) -> Tensor:
        """Sum of the values over each token's row, for every token: [N] → [N]."""
        # [N] → scatter-add → [R] → gather → [N]
        sums_R = values_N.new_zeros(self.rows)
        return sums_R.index_add(0, self.rows_N, values_N)[self.rows_N]


@dataclass(frozen=True)
class ValueTokens:
    """Counted tokens of one micro-batch, as the loss of a critic reads them.

    Attributes:
        values_N: the critic's value of the tokens before each counted one; has a gradient.
        old_values_N: these values when the step began.
        returns_N: targets of the values.
        weights_N: factor of each token in the global loss, as in `LossTokens`.
    """

    values_N: Tensor
    old_values_N: Tensor
    returns_N: Tensor
    weights_N: Tensor
