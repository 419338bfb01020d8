"""Whether the servers compute with the trainer's weights.

Owns the check of the first batch without lag: the trainer's log-probabilities of its tokens are those of the servers,
but for rounding. Weights that a server takes and does not use, as after a reload that leaves some of them out, are
noticed nowhere else: requests go on, versions are right, and rewards only look poor. Pure; must not know models.
"""

from collections.abc import Mapping
from math import isfinite, nan

from pipeline.errors import TrainingError

MAX_MISMATCH = 0.25
"""Nats, the mean over tokens. Measured: bfloat16 makes 0.006 (0.6B, one H100); experts that a server
did not pack again make 0.41 to 0.74 in tiny models of random weights."""


class Agreement:
    """Compares trainer and servers once in an attempt.

    Attributes:
        known: whether they were found to agree.
    """

    known = False

    def check(self, metrics: Mapping[str, float]) -> None:
        """Compare, if `metrics` are of a batch that the weights of its own step sampled. Numbers that are not finite
        are checked by `step_metrics.NonFiniteGuard`.

        Raises `TrainingError` if log-probabilities differ by more than `MAX_MISMATCH` nats in the mean.
        """
        mismatch = metrics.get("mismatch", metrics.get("log_ratio", nan))
        if self.known or not isfinite(mismatch) or metrics["lag/max"]:
            return
        if mismatch > MAX_MISMATCH:
            raise TrainingError(
                f"the servers' log-probabilities differ from the trainer's by {mismatch:.2f} nats a token in a batch of"
                f" the same weights: expected at most {MAX_MISMATCH}; vLLM does not compute as the trainer does, or did"
                " not take all weights: look for warnings in the servers' logs, try another release of vLLM, or another"
                " model"
            )
        self.known = True
