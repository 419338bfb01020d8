"""Every loss once more in plain Python, one row and one token at a time, and the tokens that the tests draw."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from pipeline.algorithms.loss_metrics import combine, means
from pipeline.algorithms.loss_tokens import LossTokens, ValueTokens
from pipeline.config import LossConfig
from pipeline.train.loss_specs import PolicyLossSpec
from pipeline.train.total_loss import total

Correction = Literal["none", "truncate", "mask"]
Estimator = Literal["k1", "k2", "k3"]
LENGTHS = (3, 1, 4)
N = sum(LENGTHS)
NAMES: tuple[Any, ...] = get_args(LossConfig.model_fields["name"].annotation)
BOUNDS = {"clip_low": 0.2, "clip_high": 0.4, "ratio_cap": 1.3, "beta": 0.3}
LOW, HIGH, CAP, BETA = 0.8, 1.4, 1.3, 0.3

KL: dict[Estimator, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-max(d, -20)) - 1 + max(d, -20),
}


@dataclass(frozen=True)
class Token:
    """One token; `frozen` is the log-probability wherever the gradient is stopped."""

    logprob: float
    frozen: float
    old_logprobs: float
    sampler_logprobs: float
    reference: float
    advantage: float
    entropy: float
    weight: float


Row = list[Token]


def log_ratios(row: Row) -> list[float]:
    return [t.logprob - t.old_logprobs for t in row]


def surrogate(ratio: float, advantage: float) -> float:
    return -min(ratio * advantage, min(max(ratio, LOW), HIGH) * advantage)


def clipped(row: Row) -> list[float]:
    return [surrogate(math.exp(d), t.advantage) for d, t in zip(log_ratios(row), row, strict=True)]


def sequence_clipped(row: Row) -> list[float]:
    ratio = math.exp(sum(log_ratios(row)) / len(row))
    return [surrogate(ratio, t.advantage) for t in row]


def reinforce(row: Row) -> list[float]:
    return [-min(math.exp(t.frozen - t.old_logprobs), CAP) * t.advantage * t.logprob for t in row]


def whole_row(row: Row) -> list[float]:
    product = math.prod(math.exp(t.frozen - t.old_logprobs) for t in row)
    return [-min(product, CAP) * t.advantage * t.logprob for t in row]


def cispo(row: Row) -> list[float]:
    return [-min(max(math.exp(t.frozen - t.old_logprobs), LOW), HIGH) * t.advantage * t.logprob for t in row]


def dro(row: Row) -> list[float]:
    return [-(t.advantage * t.logprob - BETA / 2 * (t.logprob - t.sampler_logprobs) ** 2) for t in row]


FORMULAS: dict[str, Callable[[Row], list[float]]] = {
    "reinforce": reinforce,
    "ppo": clipped,
    "grpo": clipped,
    "gspo": sequence_clipped,
    "dr_grpo": clipped,
    "dapo": clipped,
    "cispo": cispo,
    "rloo": whole_row,
    "reinforce_pp": clipped,
    "dro": dro,
}


def correction(token: Token, config: LossConfig) -> float:
    w = math.exp(token.old_logprobs - token.sampler_logprobs)
    if config.tis == "truncate":
        return min(w, config.tis_cap)
    if config.tis == "mask":
        return w if config.tis_low <= w <= config.tis_cap else 0.0
    return 1.0


def loss_by_hand(rows: list[Row], config: LossConfig) -> float:
    whole = 0.0
    for row in rows:
        for token, policy in zip(row, FORMULAS[config.name](row), strict=True):
            loss = correction(token, config) * policy - config.entropy * token.entropy
            if config.kl_in == "loss":
                loss += config.kl * KL[config.kl_estimator](token.logprob - token.reference)
            whole += token.weight * loss
    return whole


def slopes_by_hand(rows: list[Row], config: LossConfig, step: float = 1e-6) -> list[float]:
    """The central difference in each token's log-probability, all else held."""
    slopes = []
    for r, row in enumerate(rows):
        for t, token in enumerate(row):

            def moved(by: float, r: int = r, t: int = t, row: Row = row, token: Token = token) -> float:
                other = replace(token, logprob=token.logprob + by)
                return loss_by_hand([*rows[:r], [*row[:t], other, *row[t + 1 :]], *rows[r + 1 :]], config)

            slopes.append((moved(step) - moved(-step)) / (2 * step))
    return slopes


def tokens(seed: int = 0, **changed: torch.Tensor | None) -> LossTokens:
    """Eight tokens of three rows, far enough from the other policies that some ratios are clipped on either side."""
    draw = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(N, generator=draw, dtype=torch.float64)

    plain = LossTokens(
        logprobs_N=(normal() - 2).requires_grad_(),
        weights_N=normal().abs(),
        advantages_N=normal(),
        sampler_logprobs_N=normal() * 0.5 - 2,
        rows_N=torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS)),
        rows=3,
        reference_N=normal() * 0.5 - 2,
        entropy_N=normal().abs(),
        old_logprobs_N=normal() * 0.5 - 2,
    )
    return replace(plain, **changed)


def value_tokens(seed: int = 0) -> ValueTokens:
    draw = torch.Generator().manual_seed(seed)
    values, old, returns, weights = torch.randn(4, N, generator=draw, dtype=torch.float64)
    return ValueTokens(values.requires_grad_(), old, returns, weights.abs())


def rows_by_hand(t: LossTokens) -> list[Row]:
    """The same tokens as plain numbers."""
    assert t.reference_N is not None
    assert t.entropy_N is not None
    old_logprobs_N = t.sampler_logprobs_N if t.old_logprobs_N is None else t.old_logprobs_N
    columns = [
        t.logprobs_N,
        t.logprobs_N,
        old_logprobs_N,
        t.sampler_logprobs_N,
        t.reference_N,
        t.advantages_N,
        t.entropy_N,
    ]
    flat = [Token(*numbers) for numbers in zip(*(c.tolist() for c in [*columns, t.weights_N]), strict=True)]
    return [[token for token, row in zip(flat, t.rows_N.tolist(), strict=True) if row == r] for r in range(t.rows)]


def rows_of(whole: LossTokens, rows: list[int]) -> LossTokens:
    """The tokens of some rows, renumbered as their own micro-batch would number them."""
    chosen = torch.isin(whole.rows_N, torch.tensor(rows))
    number = {row: index for index, row in enumerate(rows)}
    fields = (
        "logprobs_N",
        "weights_N",
        "advantages_N",
        "sampler_logprobs_N",
        "reference_N",
        "entropy_N",
        "old_logprobs_N",
    )
    flat = {field: getattr(whole, field)[chosen] for field in fields}
    renumbered = torch.tensor([number[row] for row in whole.rows_N[chosen].tolist()], dtype=torch.int64)
    return LossTokens(rows_N=renumbered, rows=max(1, len(rows)), **flat)


def everything(name: str) -> LossConfig:
    """The loss with all the terms that may stand beside it."""
    more = {"tis": "mask", "kl": 0.1, "entropy": 0.1}
    return LossConfig.model_validate({"name": name, **BOUNDS, **more})


def numbers(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in sums.items()}


def measured(parts: list[LossTokens], objective: PolicyLossSpec) -> dict[str, float]:
    """The metrics of micro-batches that are all of the `N` tokens together."""
    return means(combine(numbers(total(part, objective)[1]) for part in parts), N)
