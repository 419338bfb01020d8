"""Losses against their formulas, written out token by token in plain Python."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import LossConfig
from pipeline.errors import TrainingError
from pipeline.losses import POLICY_LOSSES, SFT, total
from pipeline.losses.measures import combine, means
from pipeline.losses.penalties import ESTIMATORS
from pipeline.losses.tokens import LossTokens

LENGTHS = (3, 1, 4)
N = sum(LENGTHS)
CLIP = {"clip_low": 0.2, "clip_high": 0.4}


def tokens(seed: int = 0, **changed: torch.Tensor) -> LossTokens:
    """Eight tokens of three rows, far enough from the behaviour policy that some ratios are clipped on either side."""
    draw = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(N, generator=draw, dtype=torch.float64)

    plain = LossTokens(
        logprobs_N=(normal() - 2).requires_grad_(),
        weights_N=normal().abs(),
        advantages_N=normal(),
        behaviour_N=normal() * 0.5 - 2,
        rows_N=torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS)),
        rows=3,
        reference_N=normal() * 0.5 - 2,
        entropy_N=normal().abs(),
    )
    return replace(plain, **changed)


def gradient(given_tokens: LossTokens, config: LossConfig) -> list[float]:
    loss, _ = total(given_tokens, config)
    (slope,) = torch.autograd.grad(loss, given_tokens.logprobs_N)
    values: list[float] = slope.tolist()
    return values


def by_hand(t: LossTokens) -> list[tuple[float, float, float]]:
    """(weight, advantage, log ratio) of each token."""
    return list(zip(t.weights_N.tolist(), t.advantages_N.tolist(), t.log_ratio_N.tolist(), strict=True))


@given(st.integers(0, 50))
def test_the_clipped_loss_is_the_smaller_of_the_two_surrogates(seed: int) -> None:
    t = tokens(seed)
    expected = sum(w * -min(math.exp(d) * a, min(max(math.exp(d), 0.8), 1.4) * a) for w, a, d in by_hand(t))
    for name in ("grpo", "ppo"):
        loss, _ = total(t, LossConfig(name=name, **CLIP))
        assert loss.item() == pytest.approx(expected)


def test_a_clipped_token_pulls_no_further_in_its_direction() -> None:
    t = tokens(logprobs_N=torch.full((N,), -1.0, dtype=torch.float64).requires_grad_())
    t = replace(t, behaviour_N=torch.full((N,), -2.0, dtype=torch.float64))  # every ratio is e, above 1 + clip_high
    up = gradient(replace(t, advantages_N=torch.ones(N)), LossConfig(name="grpo", **CLIP))
    down = gradient(replace(t, advantages_N=-torch.ones(N)), LossConfig(name="grpo", **CLIP))
    assert up == [0.0] * N
    assert all(slope > 0 for slope in down)


@given(st.integers(0, 50))
def test_gspo_uses_the_geometric_mean_of_the_row(seed: int) -> None:
    t = tokens(seed)
    parts, expected, start = by_hand(t), 0.0, 0
    for length in LENGTHS:
        row = parts[start : start + length]
        ratio = math.exp(sum(d for _, _, d in row) / length)
        expected += sum(w * -min(ratio * a, min(max(ratio, 0.8), 1.4) * a) for w, a, _ in row)
        start += length
    loss, _ = total(t, LossConfig(name="gspo", **CLIP))
    assert loss.item() == pytest.approx(expected)


def test_gspo_spreads_a_rows_gradient_over_all_its_tokens() -> None:
    t = tokens()
    one_token = torch.zeros(N, dtype=torch.float64)
    one_token[0] = 1.0
    t = replace(t, weights_N=one_token, advantages_N=torch.ones(N), behaviour_N=t.logprobs_N.detach())
    assert gradient(t, LossConfig(name="gspo")) == pytest.approx([-1 / 3] * 3 + [0.0] * 5)


def test_reinforce_weighs_by_the_truncated_ratio_and_does_not_differentiate_it() -> None:
    t = tokens()
    config = LossConfig(name="reinforce", ratio_cap=1.5)
    expected = [-w * a * min(math.exp(d), 1.5) for w, a, d in by_hand(t)]
    assert gradient(t, config) == pytest.approx(expected)


def test_on_policy_all_policy_losses_have_the_gradient_of_reinforce() -> None:
    plain = tokens()
    rows_weight = torch.repeat_interleave(torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64), torch.tensor(LENGTHS))
    t = replace(plain, behaviour_N=plain.logprobs_N.detach(), weights_N=rows_weight, advantages_N=rows_weight - 1)
    slopes = [gradient(t, LossConfig(name=name)) for name in ("reinforce", "ppo", "grpo", "gspo")]
    for slope in slopes[1:]:
        assert slope == pytest.approx(slopes[0])


def test_supervised_loss_is_the_weighted_cross_entropy() -> None:
    t = tokens()
    loss, sums = total(t, SFT)
    assert loss.item() == pytest.approx(-sum((t.weights_N * t.logprobs_N).tolist()))
    assert set(sums) == {"loss", "logprob", "entropy"}


@pytest.mark.parametrize(
    ("name", "formula"),
    [("k1", lambda d: d), ("k2", lambda d: d * d / 2), ("k3", lambda d: math.exp(-d) - 1 + d)],
)
def test_the_kl_term_is_its_estimator_times_its_weight(name: str, formula: Callable[[float], float]) -> None:
    t = tokens()
    assert t.reference_N is not None
    config = LossConfig(name="grpo", kl=0.3, kl_estimator=name)  # type: ignore[arg-type]
    differences = (t.logprobs_N - t.reference_N).tolist()
    kl = [formula(d) for d in differences]
    plain, _ = total(t, LossConfig(name="grpo"))
    loss, sums = total(t, config)
    assert (loss - plain).item() == pytest.approx(
        0.3 * sum(w * k for w, k in zip(t.weights_N.tolist(), kl, strict=True))
    )
    assert sums["reference_kl"].item() == pytest.approx(sum(kl))


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_an_unbiased_estimator_has_the_true_kl_as_its_mean(name: str) -> None:
    policy = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    difference = policy.log() - reference.log()
    assert (policy * ESTIMATORS[name](difference)).sum() == pytest.approx((policy * difference).sum())


def test_the_entropy_bonus_lowers_the_loss() -> None:
    t = tokens()
    assert t.entropy_N is not None
    plain, _ = total(t, LossConfig(name="grpo"))
    loss, _ = total(t, LossConfig(name="grpo", entropy=0.1))
    assert (plain - loss).item() == pytest.approx(0.1 * (t.weights_N * t.entropy_N).sum().item())


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_the_sum_does_not_depend_on_where_rows_are_cut(name: str) -> None:
    config = LossConfig(name=name, kl=0.1, entropy=0.1)  # type: ignore[arg-type]
    whole = tokens()
    loss, sums = total(whole, config)
    parts = [total(rows_of(whole, some), config) for some in ([0, 2], [1])]
    assert sum(part.item() for part, _ in parts) == pytest.approx(loss.item())
    added = combine([{key: value.item() for key, value in part.items()} for _, part in parts])
    assert added == pytest.approx({key: value.item() for key, value in sums.items()})


def rows_of(whole: LossTokens, rows: list[int]) -> LossTokens:
    """The tokens of some rows, renumbered as their own micro-batch would number them."""
    chosen = torch.isin(whole.rows_N, torch.tensor(rows))
    number = {row: index for index, row in enumerate(rows)}
    flat = {
        field: getattr(whole, field)[chosen]
        for field in ("logprobs_N", "weights_N", "advantages_N", "behaviour_N", "reference_N", "entropy_N")
    }
    renumbered = torch.tensor([number[row] for row in whole.rows_N[chosen].tolist()], dtype=torch.int64)
    return LossTokens(rows_N=renumbered, rows=len(rows), **flat)


@pytest.mark.parametrize("name", [*sorted(POLICY_LOSSES), "sft"])
def test_a_micro_batch_without_counted_tokens_costs_nothing(name: str) -> None:
    nothing = rows_of(tokens(), [])
    objective = SFT if name == "sft" else LossConfig(name=name)  # type: ignore[arg-type]
    loss, sums = total(replace(nothing, rows=1), objective)
    assert loss.item() == 0
    assert all(value.item() == 0 for value in sums.values())


def test_a_kl_term_without_reference_log_probabilities_is_refused() -> None:
    with pytest.raises(TrainingError, match="needs reference log-probabilities"):
        total(replace(tokens(), reference_N=None), LossConfig(name="grpo", kl=0.1))


def test_an_unknown_loss_is_refused_with_the_list() -> None:
    unknown = LossConfig.model_construct(name="dpo")  # type: ignore[call-arg]
    with pytest.raises(TrainingError, match="unknown loss 'dpo'; there are reinforce, ppo, grpo, gspo"):
        total(tokens(), unknown)


def test_metrics_are_means_over_the_counted_tokens_of_all_parts() -> None:
    sums = combine(
        [{"loss": 0.5, "ratio": 3.0, "log_ratio_max": 0.1}, {"loss": 0.25, "ratio": 1.0, "log_ratio_max": 0.7}]
    )
    assert means(sums, 8) == {"loss": 0.75, "ratio": 0.5, "log_ratio_max": 0.7}


def test_effective_samples_are_all_when_every_ratio_is_alike_and_fewer_otherwise() -> None:
    assert means({"ratio": 8.0, "ratio_squared": 8.0}, 8)["effective_samples"] == 1
    assert means({"ratio": 8.0, "ratio_squared": 64.0}, 8)["effective_samples"] == 1 / 8


def test_metrics_of_a_batch_without_counted_tokens_are_zero() -> None:
    assert means({"loss": 0.0, "ratio": 0.0, "ratio_squared": 0.0}, 0) == {"loss": 0.0, "ratio": 0.0}
