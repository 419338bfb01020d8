"""The check that the servers compute with the trainer's weights.

In the first batch without lag, the trainer's log-probabilities of the tokens must equal those of the servers except for
rounding. No other check detects a server that receives weights and does not use some of them, such as after an
incomplete reload: requests succeed, versions are right, and rewards only look poor. Pure; must not know models.
"""

from collections.abc import Mapping
from math import isfinite, nan

from pipeline.errors import TrainingError

MAX_MISMATCH = 0.25
"""Upper bound of the mean difference over tokens, in nats. Measured: 0.006 from bfloat16 (0.6B, one H100); 0.41 to 0.74
from experts that a server did not pack again, in tiny models of random weights."""


class Agreement:
    """Compares trainer and servers once per attempt.

    Attributes:
        known: whether the comparison was made and succeeded.
    """

    known = False

    def check(self, metrics: Mapping[str, float]) -> None:
        """Compare, if `metrics` are of a batch without lag; `step_metrics.NonFiniteGuard` checks values that are not
        finite.

        Raises `TrainingError` if log-probabilities differ by more than `MAX_MISMATCH` nats on average.
        """
        mismatch = metrics.get("mismatch", metrics.get("log_ratio", nan))
        if self.known or not isfinite(mismatch) or metrics["staleness/max"]:
            return
        if mismatch > MAX_MISMATCH:
            raise TrainingError(
                f"the servers' log-probabilities differ from the trainer's by {mismatch:.2f} nats a token in a batch of"
                f" the same weights: expected at most {MAX_MISMATCH}; the servers do not compute as the trainer does,"
                " or did not take all weights: look for warnings in their logs, try another release of their engine,"
                " or another model"
            )
        self.known = True
