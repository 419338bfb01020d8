"""Metrics of a step from those of its optimizer steps, and checks of several steps in a row.

Owns the aggregation, the error for a diverged model, and the warnings for equal rewards and truncated samples. The
metrics of a single optimizer step stay unchanged. Must not know models.
"""

import logging
from collections.abc import Mapping, Sequence
from math import fsum

from pipeline.config import LossConfig
from pipeline.errors import TrainingError
from pipeline.utils.user_commands import user_command

log = logging.getLogger(__name__)

UNREDUCED = ("loss", "grad_norm")
"""Means with equal weight for every optimizer step, since they are not means over tokens."""


MAX_EQUAL = 5
"""Steps in a row with equal rewards before the warning; one or two are chance in small batches."""
LIKELY_FRACTION = (
    "Likely reasons: the prompts are too hard or too easy for this model; answers are cut off before they are scored "
    "(samples/truncated, rollout.max_tokens); or the reward looks for another form than the model writes. Read some: "
    f"{user_command('samples')}"
)
MAX_TRUNCATED = 0.05
"""Largest fraction of truncated samples that is not reported."""
MAX_TRUNCATED_STEPS = 5
"""Steps in a row with more truncated samples before the warning; one or two are chance in small batches."""
MAX_SKIPPED = 5
"""Steps in a row without a finite gradient before the error."""


def is_lost(metrics: Mapping[str, float]) -> bool:
    """Whether all optimizer steps of a step were skipped, because no gradient was finite."""
    return 0 < metrics.get("optimizer_steps", 1.0) == metrics["skipped"]


class NonFiniteGuard:
    """Counts steps in a row without any update, because of gradients that are not finite.

    A step of float16 is among them once its batch was trained at several loss scales (`overflow_retries`).

    guard.note(metrics)      # after every step
    guard.check()            # once the step is published
    """

    def __init__(self) -> None:
        self._row, self._hint = 0, "lower optim.lr"

    def note(self, metrics: Mapping[str, float]) -> bool:
        """Count a step; returns whether it was without any update."""
        lost = is_lost(metrics)
        if "overflows" in metrics:
            self._hint = "set model.dtype=bfloat16 in a new run, or lower optim.lr"
        self._row = self._row + 1 if lost else 0
        return lost

    def check(self) -> None:
        """Raise `TrainingError` if the last `MAX_SKIPPED` steps had no update: the model has diverged."""
        if self._row >= MAX_SKIPPED:
            raise TrainingError(f"the gradient was not finite in {self._row} steps in a row; {self._hint}")


class EqualRewards:
    """Warns once when rewards give no gradient for several steps in a row.

    With a baseline of the group, this is a step in which the samples of every prompt have one reward. With a baseline
    of the batch, it is one reward for all samples.
    """

    def __init__(self, loss: LossConfig) -> None:
        self._within_group = loss.estimator.within_group
        self._row, self._warned = 0, False

    def note(self, groups: Sequence[Sequence[float]]) -> None:
        """Count a step, from the rewards of its samples by prompt."""
        everything = {reward for group in groups for reward in group}
        equal = all(len(set(group)) == 1 for group in groups) if self._within_group else len(everything) == 1
        self._row = self._row + 1 if equal else 0
        if self._row < MAX_EQUAL or self._warned:
            return
        self._warned = True
        pattern = f"every reward is {everything.pop():g}" if len(everything) == 1 else "a prompt's samples score alike"
        log.warning("in %d steps in a row, %s: nothing is learned from them. %s", self._row, pattern, LIKELY_FRACTION)


class TruncatedSamples:
    """Warns once when more than `MAX_TRUNCATED` of the samples are truncated in several steps in a row.

    Their rewards are of unfinished answers. A model that thinks needs thousands of tokens, so a small
    `rollout.max_tokens` teaches it to think less, or with `training.mask_truncated` trains on short answers alone.
    """

    def __init__(self) -> None:
        self._row, self._warned = 0, False

    def note(self, fraction: float) -> None:
        """Count a step, of whose samples this fraction was truncated."""
        self._row = self._row + 1 if fraction > MAX_TRUNCATED else 0
        if self._row < MAX_TRUNCATED_STEPS or self._warned:
            return
        self._warned = True
        log.warning(
            "in %d steps in a row, more than %.0f %% of the samples are truncated (%.0f %% now): raise "
            "rollout.max_tokens and model.max_length",
            *(self._row, 100 * MAX_TRUNCATED, 100 * fraction),
        )


class StepMetrics:
    """Aggregates the metrics of one model's optimizer steps.

    Names in `_max` and `_min` are extremes, `skipped`, `overflows` and `flops` are sums, `lr` and `loss_scale` are the
    last ones. All others are means over the optimizer steps that have them, weighted by counted tokens, except those in
    `UNREDUCED`. `grad_norm` adds `grad_norm_max`.
    """

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[float, int]]] = {}

    def add(self, metrics: Mapping[str, float], counted: int) -> None:
        """Add the metrics of one optimizer step over `counted` tokens."""
        extremes = {"grad_norm_max": metrics["grad_norm"]} if "grad_norm" in metrics else {}
        for name, value in {**metrics, **extremes}.items():
            self._seen.setdefault(name, []).append((value, counted))

    def metrics(self) -> dict[str, float]:
        """The metrics of the whole step."""
        return {name: _whole(name, seen) for name, seen in self._seen.items()}


def _whole(name: str, seen: Sequence[tuple[float, int]]) -> float:
    values = [value for value, _ in seen]
    if name.endswith("_max"):
        return max(values)
    if name.endswith("_min"):
        return min(values)
    if name in ("skipped", "overflows", "flops"):
        return fsum(values)
    if name in ("lr", "loss_scale"):
        return values[-1]
    weights = [1 if name in UNREDUCED else counted for _, counted in seen]
    if len(values) == 1:
        return values[0]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
