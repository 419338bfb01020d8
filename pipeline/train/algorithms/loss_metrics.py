"""From sums to metrics.

Owns how the sums of micro-batches and ranks combine and what they are divided by. Promises that the metrics of a batch
do not depend on how it was cut: sums are added in float64, extremes are extremes of all parts, and only here, on the
controller, is anything divided, by the counted tokens of the whole batch. docs/metrics.md has every name with its
formula. Pure Python; must not know torch.
"""

from collections.abc import Callable, Iterable, Mapping
from operator import add

Means = Mapping[str, float]


def combine(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums added up, maxima (`…_max`) maximised and minima (`…_min`) minimised, over micro-batches or ranks."""
    whole: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            whole[name] = _combiner(name)(whole[name], value) if name in whole else value
    return whole


def means(sums: Mapping[str, float], counted: int) -> dict[str, float]:
    """Metrics of a batch of `counted` tokens.

    `loss` and extremes as they are, the others divided by `counted`; squares (`…_squared`) only serve what is derived:

    - `effective_samples` = (Σ r)² / (counted · Σ r²), the effective sample size of the importance ratios as a fraction
      of the tokens: 0 … 1;
    - `advantage_std`, `return_std` = √(mean of the squares − square of the mean);
    - `explained_variance` = 1 − Var(return − value) / Var(return): at most 1; left out when all returns are alike.
    """
    divisor = max(1, counted)
    found = {name: value if _whole(name) else value / divisor for name, value in sums.items()}
    derived = {name: derive(found) for name, (needs, derive) in _DERIVED.items() if needs in found}
    kept = {name: value for name, value in found.items() if not name.endswith("_squared")}
    return kept | {name: value for name, value in derived.items() if value is not None}


def _whole(name: str) -> bool:
    return name == "loss" or name.endswith(("_max", "_min"))


def _combiner(name: str) -> Callable[[float, float], float]:
    if name.endswith("_max"):
        return max
    return min if name.endswith("_min") else add


def _variance(found: Means, name: str) -> float:
    return max(0.0, found[f"{name}_squared"] - found[name] ** 2)


def _effective_samples(found: Means) -> float | None:
    squared = found["ratio_squared"]
    return found["ratio"] ** 2 / squared if squared else None


def _explained_variance(found: Means) -> float | None:
    spread = _variance(found, "return")
    return 1 - _variance(found, "error") / spread if spread else None


_DERIVED: dict[str, tuple[str, Callable[[Means], float | None]]] = {
    "effective_samples": ("ratio_squared", _effective_samples),
    "advantage_std": ("advantage_squared", lambda found: _variance(found, "advantage") ** 0.5),
    "return_std": ("return_squared", lambda found: _variance(found, "return") ** 0.5),
    "explained_variance": ("error_squared", _explained_variance),
}
"""For each derived metric, the sum that it needs and its formula."""
