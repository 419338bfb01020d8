"""What is measured on the way: levels, sums that do not depend on the cut, and the metrics made of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.algorithms.loss_metrics import combine, means
from pipeline.algorithms.loss_tokens import ValueTokens
from pipeline.config import LossConfig
from pipeline.errors import TrainingError
from pipeline.train.loss_specs import SFT, PolicyLossSpec, ValueLoss
from pipeline.train.total_loss import total, total_value
from tests.unit.train.losses_by_hand import NAMES, N, everything, measured, numbers, rows_of, tokens, value_tokens


@pytest.mark.parametrize("name", [*NAMES, "sft"])
@settings(max_examples=8, deadline=None)
@given(cut=st.permutations([0, 1, 2]), at=st.integers(0, 3))
def test_metrics_do_not_depend_on_where_rows_are_cut(name: str, cut: list[int], at: int) -> None:
    objective = SFT if name == "sft" else everything(name)
    whole = tokens()
    parts = [rows_of(whole, cut[:at]), rows_of(whole, cut[at:])]
    assert measured(parts, objective) == pytest.approx(measured([whole], objective), abs=1e-12)


def test_a_critics_metrics_do_not_depend_on_where_rows_are_cut() -> None:
    t = value_tokens()
    columns = (t.values_N, t.old_values_N, t.returns_N, t.weights_N)
    parts = [ValueTokens(*(c[start:stop] for c in columns)) for start, stop in ((0, 3), (3, 3), (3, N))]
    cut = combine(numbers(total_value(part, ValueLoss(0.2))[1]) for part in parts)
    whole = numbers(total_value(t, ValueLoss(0.2))[1])
    assert means(cut, N) == pytest.approx(means(whole, N))


@pytest.mark.parametrize("name", [*NAMES, "sft"])
def test_of_no_tokens_nothing_is_measured_but_a_loss_of_zero(name: str) -> None:
    loss, sums = total(rows_of(tokens(), []), SFT if name == "sft" else everything(name))
    assert loss.item() == 0
    assert numbers(sums) == {"loss": 0.0}
    assert means(numbers(sums), 0) == {"loss": 0.0}


def test_the_levels_measure_nothing_the_cheap_and_the_entropy() -> None:
    bare = LossConfig(name="grpo")
    without = tokens(entropy_N=None)
    assert set(total(without, bare, "none")[1]) == {"loss"}
    basic = set(total(without, bare, "basic")[1])
    assert {"ratio", "clip_fraction", "logprob"} < basic
    assert set(total(tokens(), bare, "with_entropy")[1]) == basic | {"entropy"}
    assert set(total_value(value_tokens(), ValueLoss(0.2), "none")[1]) == {"loss"}


@pytest.mark.parametrize(("objective", "level"), [(SFT, "with_entropy"), (LossConfig(name="grpo", entropy=1), "basic")])
def test_an_entropy_that_was_not_computed_is_missed(objective: PolicyLossSpec, level: str) -> None:
    with pytest.raises(TrainingError, match="did not compute it"):
        total(tokens(entropy_N=None), objective, level)  # type: ignore[arg-type]


def test_levels_change_neither_the_loss_nor_its_gradient() -> None:
    t = tokens()
    slopes = []
    for level in ("none", "basic", "with_entropy"):
        loss, _ = total(t, everything("gspo"), level)  # type: ignore[arg-type]
        slopes.append(torch.autograd.grad(loss, t.logprobs_N)[0].tolist())
    assert slopes[0] == slopes[1] == slopes[2]


def test_sums_combine_by_their_names() -> None:
    parts = [
        {"loss": 0.5, "ratio": 3.0, "ratio_max": 0.1, "ratio_min": 0.1},
        {"loss": 0.0},
        {"loss": 0.25, "ratio": 1.0, "ratio_max": 0.7, "ratio_min": 0.7},
    ]
    assert means(combine(parts), 8) == {"loss": 0.75, "ratio": 0.5, "ratio_max": 0.7, "ratio_min": 0.1}


def test_ratios_and_their_clips_are_counted_on_either_side() -> None:
    def column(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    logs = column(0.5, -0.5, 0.5, -0.5, 0.0, 0.0, 0.0, 0.0)  # ratios 1.65, 0.61, 1.65, 0.61, 1 …
    advantages = column(1, 1, -1, -1, 1, 1, 1, 1)  # the first is clipped from above, the fourth from below
    t = tokens(logprobs_N=logs, old_logprobs_N=0 * logs, advantages_N=advantages)
    found = measured([t], LossConfig(name="grpo"))
    assert found["clip_fraction_high"] == found["clip_fraction_low"] == 1 / 8
    assert found["clip_fraction"] == 2 / 8
    assert found["ratio_max"] == pytest.approx(np.exp(0.5))
    assert found["ratio_min"] == pytest.approx(np.exp(-0.5))
    assert found["log_ratio"] == 0.25
    assert found["log_ratio_max"] == 0.5
    ratios = logs.exp()
    assert found["ess"] == pytest.approx((ratios.sum() ** 2 / (8 * (ratios**2).sum())).item())
    assert found["ratio_kl"] == pytest.approx((ratios - 1 - logs).mean().item())
    assert found["advantage"] == pytest.approx(advantages.mean().item())
    assert found["advantage_std"] == pytest.approx(advantages.std(correction=0).item())


def test_the_mismatch_is_that_of_the_trainer_and_the_sampler_not_of_the_ratio() -> None:
    t = tokens()
    assert t.old_logprobs_N is not None
    log_w = t.old_logprobs_N - t.sampler_logprobs_N
    found = measured([t], LossConfig(name="grpo", tis="truncate", tis_cap=1.5))
    assert found["mismatch"] == pytest.approx(log_w.abs().mean().item())
    assert found["mismatch_max"] == pytest.approx(log_w.abs().max().item())
    assert found["mismatch_kl"] == pytest.approx((log_w.exp() - 1 - log_w).mean().item())
    assert found["tis_weight"] == pytest.approx(log_w.exp().clamp(max=1.5).mean().item())
    assert found["tis_fraction"] == pytest.approx((log_w.exp() > 1.5).double().mean().item())
    factors = log_w.exp().clamp(max=1.5)
    assert found["tis_ess"] == pytest.approx((factors.sum() ** 2 / (len(factors) * (factors**2).sum())).item())
    assert "mismatch" not in measured(
        [tokens(old_logprobs_N=None)], LossConfig(name="grpo", old_logprobs="sampler", tis="none")
    )


def test_effective_samples_are_all_when_every_ratio_is_alike_and_fewer_otherwise() -> None:
    assert means({"ratio": 8.0, "ratio_squared": 8.0}, 8)["ess"] == 1
    assert means({"ratio": 8.0, "ratio_squared": 64.0}, 8)["ess"] == 1 / 8


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_explained_variance_is_one_less_the_unexplained_part(seed: int) -> None:
    t = value_tokens(seed)
    found = means(numbers(total_value(t, ValueLoss(0.2))[1]), N)
    values, returns = t.values_N.detach().numpy(), t.returns_N.numpy()
    assert found["explained_variance"] == pytest.approx(1 - np.var(returns - values) / np.var(returns))
    assert found["value"] == pytest.approx(values.mean())
    assert found["return"] == pytest.approx(returns.mean())
    assert found["return_std"] == pytest.approx(returns.std())
    assert found["error"] == pytest.approx((returns - values).mean())


def test_returns_that_are_all_alike_leave_no_variance_to_explain() -> None:
    sums = {"return": 4.0, "return_squared": 4.0, "error": 1.0, "error_squared": 2.0}
    assert "explained_variance" not in means(sums, 4)
