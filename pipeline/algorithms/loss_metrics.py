"""Metrics of a batch from the sums of its micro-batches and ranks.

Owns the combination of sums and their divisors. Promises that the metrics do not depend on how the batch was split:
sums are added in float64, extremes are taken over all parts, and only this module, on the controller, divides, by the
counted tokens of the whole batch. docs/metrics.md has every name with its formula. Pure Python; must not know torch.
"""

from collections.abc import Callable, Iterable, Mapping
from operator import add

Means = Mapping[str, float]


def combine(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Combine the parts of micro-batches or ranks: the maximum of `…_max`, the minimum of `…_min`, sums of the rest."""
    whole: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            whole[name] = _combiner(name)(whole[name], value) if name in whole else value
    return whole


def means(sums: Mapping[str, float], counted: int) -> dict[str, float]:
    """Metrics of a batch of `counted` tokens.

    Losses and extremes are copied, all others are divided by `counted`. Squares (`…_squared`) are inputs of the derived
    metrics only:

    - `ess` = (Σ r)² / (counted · Σ r²), the effective sample size of the importance ratios as a fraction
      of the tokens: 0 … 1; `tis_ess` is the same of the correction's weights;
    - `advantage_std`, `return_std` = √(mean of the squares − square of the mean);
    - `explained_variance` = 1 − Var(return − value) / Var(return): at most 1; omitted when all returns are equal.
    """
    divisor = max(1, counted)
    averages = {name: value if _is_undivided(name) else value / divisor for name, value in sums.items()}
    derived = {name: derive(averages) for name, (needs, derive) in _DERIVED.items() if needs in averages}
    reported = {name: value for name, value in averages.items() if not name.endswith("_squared")}
    return reported | {name: value for name, value in derived.items() if value is not None}


def _is_undivided(name: str) -> bool:
    return name in ("loss", "experts/aux_loss") or name.endswith(("_max", "_min"))


def _combiner(name: str) -> Callable[[float, float], float]:
    if name.endswith("_max"):
        return max
    return min if name.endswith("_min") else add


def _variance(averages: Means, name: str) -> float:
    # E[x²] − E[x]², which rounding can make slightly negative
    return max(0.0, averages[f"{name}_squared"] - averages[name] ** 2)


def _effective_samples(averages: Means, weight: str) -> float | None:
    squared = averages[f"{weight}_squared"]
    return averages[weight] ** 2 / squared if squared else None


def _explained_variance(averages: Means) -> float | None:
    variance = _variance(averages, "return")
    return 1 - _variance(averages, "error") / variance if variance else None


_DERIVED: dict[str, tuple[str, Callable[[Means], float | None]]] = {
    "ess": ("ratio_squared", lambda averages: _effective_samples(averages, "ratio")),
    "tis_ess": ("tis_weight_squared", lambda averages: _effective_samples(averages, "tis_weight")),
    "advantage_std": ("advantage_squared", lambda averages: _variance(averages, "advantage") ** 0.5),
    "return_std": ("return_squared", lambda averages: _variance(averages, "return") ** 0.5),
    "explained_variance": ("error_squared", _explained_variance),
}
"""The required sum and the formula of each derived metric."""
