"""From sums to metrics.

Owns how the sums of micro-batches and ranks combine and what they are divided by. Promises that the metrics of a batch
do
not depend on how it was cut: sums are added in float64, maxima are maximised, and only here, on the controller, is
anything divided, by the counted tokens of the whole batch. Pure Python; must not know torch.
"""

from collections.abc import Iterable, Mapping


def combine(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums added up, and maxima (`…_max`) maximised, over micro-batches or ranks."""
    whole: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in whole:
                whole[name] = value
            elif name.endswith("_max"):
                whole[name] = max(whole[name], value)
            else:
                whole[name] += value
    return whole


def means(sums: Mapping[str, float], counted: int) -> dict[str, float]:
    """Metrics of a batch of `counted` tokens.

    `loss` and maxima as they are; the others divided by `counted`. `ratio_squared` becomes `effective_samples`, the
    effective sample size of the importance ratios as a fraction of the tokens: (Σ r)² / (counted · Σ r²), in 0 … 1.
    """
    divisor = max(1, counted)
    kept = {name: value for name, value in sums.items() if name != "ratio_squared"}
    metrics = {name: value if _whole(name) else value / divisor for name, value in kept.items()}
    squared = sums.get("ratio_squared", 0.0)
    if squared:
        metrics["effective_samples"] = sums["ratio"] ** 2 / (divisor * squared)
    return metrics


def _whole(name: str) -> bool:
    return name == "loss" or name.endswith("_max")
