"""One set of metrics from the several optimizer steps of a step.

Owns how the metrics of optimizer steps become those of the whole step, and when a model is given up for lost. Promises
that those of a single one stay what they are. Pure; must not know models or losses.
"""

from collections.abc import Mapping, Sequence
from math import fsum

from pipeline.errors import TrainingError

PLAIN = ("loss", "grad_norm")
"""Means in which every optimizer step counts alike: they are none over tokens."""


MOST_SKIPPED = 5
"""Steps in a row whose gradient may be not finite."""


def is_lost(metrics: Mapping[str, float]) -> bool:
    """Whether no optimizer step of a step could be taken, because no gradient was finite."""
    return 0 < metrics.get("optimizer_steps", 1.0) == metrics["skipped"]


class Skips:
    """Counts steps in a row that were lost.

    skips.note(metrics)      # after every step
    skips.check()            # once it counts
    """

    def __init__(self) -> None:
        self._row = 0

    def note(self, metrics: Mapping[str, float]) -> bool:
        """Whether the step was lost."""
        self._row = self._row + 1 if is_lost(metrics) else 0
        return self._row > 0

    def check(self) -> None:
        """`TrainingError` when the last `MOST_SKIPPED` steps were lost: so is the model."""
        if self._row >= MOST_SKIPPED:
            raise TrainingError(f"the gradient was not finite in {self._row} steps in a row; lower optim.lr")


class Tally:
    """Collects the metrics of one model's optimizer steps.

    Names in `_max` and `_min` are extremes, `skipped` is a sum, `lr` the last one; all others are means over the
    optimizer steps that have them, weighed by counted tokens but for those in `PLAIN`. With `grad_norm` comes
    `grad_norm_max`.
    """

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[float, int]]] = {}

    def add(self, metrics: Mapping[str, float], counted: int) -> None:
        """The metrics of one optimizer step over `counted` tokens."""
        extremes = {"grad_norm_max": metrics["grad_norm"]} if "grad_norm" in metrics else {}
        for name, value in {**metrics, **extremes}.items():
            self._seen.setdefault(name, []).append((value, counted))

    def metrics(self) -> dict[str, float]:
        """Those of the whole step."""
        return {name: _whole(name, seen) for name, seen in self._seen.items()}


def _whole(name: str, seen: Sequence[tuple[float, int]]) -> float:
    values = [value for value, _ in seen]
    if name.endswith("_max"):
        return max(values)
    if name.endswith("_min"):
        return min(values)
    if name == "skipped":
        return fsum(values)
    if name == "lr":
        return values[-1]
    weights = [1 if name in PLAIN else counted for _, counted in seen]
    if len(values) == 1:
        return values[0]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
