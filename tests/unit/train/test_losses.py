"""Losses against their formulas, written out token by token in plain Python."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import conf
from pipeline.algorithms.advantage_estimators import ADVANTAGE_ESTIMATORS
from pipeline.algorithms.kl_estimators import KL_ESTIMATORS
from pipeline.algorithms.loss_tokens import LossTokens, ValueTokens
from pipeline.algorithms.policy_losses import POLICY_LOSSES
from pipeline.config import LossConfig
from pipeline.config.key_relevance import READ_WITH
from pipeline.errors import TrainingError
from pipeline.train.loss_specs import SFT, ValueLoss
from pipeline.train.total_loss import total, total_value
from tests.fakes.configs import make_config
from tests.support.oracle.losses import divergence
from tests.unit.train.losses_by_hand import (
    BOUNDS,
    FORMULAS,
    NAMES,
    Correction,
    Estimator,
    N,
    loss_by_hand,
    rows_by_hand,
    slopes_by_hand,
    tokens,
    value_tokens,
)

CORRECTIONS = st.sampled_from(["none", "truncate", "mask"])
OVER_SAMPLER = {"old_logprobs": "sampler", "tis": "none"}
"""The ratio over the sampling policy, without a correction."""
PLAIN = {"reference_N": None, "entropy_N": None, "old_logprobs_N": None}


def gradient(given_tokens: LossTokens, config: LossConfig) -> list[float]:
    loss, _ = total(given_tokens, config)
    (slope,) = torch.autograd.grad(loss, given_tokens.logprobs_N)
    values: list[float] = slope.tolist()
    return values


def all_at(value: float) -> torch.Tensor:
    return torch.full((N,), value, dtype=torch.float64)


def test_every_name_of_the_config_has_a_formula_and_a_file() -> None:
    files = {path.stem for path in (Path(conf.__file__).parent / "loss").glob("*.yaml")}
    assert set(NAMES) == set(POLICY_LOSSES) == set(FORMULAS) == files


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), correction=CORRECTIONS, kl=st.sampled_from(["k1", "k2", "k3"]))
def test_a_loss_and_its_gradient_are_those_of_the_formula(
    name: str, seed: int, correction: Correction, kl: Estimator
) -> None:
    config = LossConfig.model_validate(
        {"name": name, **BOUNDS, "tis": correction, "kl": 0.3, "kl_estimator": kl, "entropy": 0.1}
    )
    t = tokens(seed)
    rows = rows_by_hand(t)
    assert total(t, config)[0].item() == pytest.approx(loss_by_hand(rows, config))
    assert gradient(t, config) == pytest.approx(slopes_by_hand(rows, config), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("changed", [{"clip_low": 0.9}, {"clip_high": 3.0}, {"ratio_cap": 1.1}, {"beta": 0.9}], ids=str)
def test_a_loss_reads_the_keys_that_the_table_says(name: str, changed: dict[str, float]) -> None:
    config = make_config(loss={"name": name, **BOUNDS})
    (key,) = changed
    other = config.loss.model_copy(update=changed)
    same = all(total(tokens(seed), config.loss)[0] == total(tokens(seed), other)[0] for seed in range(5))
    assert READ_WITH[f"loss.{key}"].reads(config) != same


@pytest.mark.parametrize("name", NAMES)
def test_without_a_proximal_policy_the_ratio_is_over_the_one_that_sampled(name: str) -> None:
    config = LossConfig.model_validate({"name": name, **BOUNDS, **OVER_SAMPLER})
    t = tokens()
    same = replace(t, old_logprobs_N=t.sampler_logprobs_N)
    assert total(replace(t, old_logprobs_N=None), config)[0].item() == total(same, config)[0].item()
    assert total(t, config)[0].item() != total(same, config)[0].item() or name == "dro"


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str) -> None:
    plain = tokens()
    of_rows = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)[plain.rows_N]
    here = plain.logprobs_N.detach()
    t = replace(plain, sampler_logprobs_N=here, old_logprobs_N=here, weights_N=of_rows, advantages_N=of_rows - 1)
    assert gradient(t, LossConfig(name=name)) == pytest.approx((-of_rows * (of_rows - 1)).tolist())


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo", "dapo", "reinforce_pp", "gspo"])
def test_a_clipped_token_pulls_no_further_in_its_direction(name: str) -> None:
    t = tokens(
        logprobs_N=all_at(-1).requires_grad_(), old_logprobs_N=all_at(-2)
    )  # every ratio is e, above 1 + clip_high
    config = LossConfig.model_validate({"name": name, **BOUNDS})
    up, down = (gradient(replace(t, advantages_N=all_at(advantage)), config) for advantage in (1, -1))
    assert up == [0.0] * N
    assert all(slope > 0 for slope in down)


def test_cispo_leaves_a_clipped_token_its_gradient() -> None:
    t = tokens(logprobs_N=all_at(-1).requires_grad_(), old_logprobs_N=all_at(-2), advantages_N=all_at(1))
    assert gradient(t, LossConfig(name="cispo", clip_high=0.4, tis="none")) == pytest.approx(
        (-1.4 * t.weights_N).tolist()
    )


def test_gspo_spreads_a_rows_gradient_over_all_its_tokens() -> None:
    t = tokens()
    one_token = torch.zeros(N, dtype=torch.float64)
    one_token[0] = 1.0
    t = replace(t, weights_N=one_token, advantages_N=all_at(1), old_logprobs_N=t.logprobs_N.detach())
    assert gradient(t, LossConfig(name="gspo", tis="none")) == pytest.approx([-1 / 3] * 3 + [0.0] * 5)


def test_rloo_weighs_all_tokens_of_a_row_alike() -> None:
    t = tokens(weights_N=all_at(1), advantages_N=all_at(1), old_logprobs_N=all_at(-2), logprobs_N=all_at(-1.9))
    slopes = gradient(
        replace(t, logprobs_N=t.logprobs_N.requires_grad_()), LossConfig(name="rloo", ratio_cap=1.4, tis="none")
    )
    e = 2.718281828459045
    assert slopes == pytest.approx([-(e**0.3)] * 3 + [-(e**0.1)] + [-1.4] * 4)


def test_dro_pulls_no_more_where_the_penalty_balances_the_advantage() -> None:
    t = tokens(advantages_N=all_at(0.6), sampler_logprobs_N=all_at(-3), logprobs_N=all_at(-1).requires_grad_())
    assert gradient(t, LossConfig(name="dro", beta=0.3)) == pytest.approx([0.0] * N)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("distance", [200.0, -200.0])
def test_a_policy_far_off_makes_nothing_infinite(name: str, distance: float) -> None:
    t = tokens(old_logprobs_N=all_at(-2 - distance).float(), advantages_N=all_at(0).float())
    t = replace(t, logprobs_N=t.logprobs_N.detach().float().requires_grad_(), sampler_logprobs_N=all_at(-2).float())
    loss, sums = total(replace(t, reference_N=None), LossConfig(name=name, tis="truncate"))
    assert loss.isfinite()
    assert all(value.isfinite() for value in sums.values())


def test_masked_tokens_keep_their_kl_and_lose_their_policy_term() -> None:
    t = tokens(old_logprobs_N=all_at(-2), sampler_logprobs_N=all_at(-4))  # e², above the cap of every token
    config = LossConfig(name="grpo", tis="mask", tis_cap=2.0)
    loss, sums = total(t, config)
    assert loss.item() == 0
    assert sums["tis_fraction"] == N
    assert total(t, config.model_copy(update={"kl": 0.1}))[0].item() != 0


def test_a_row_far_from_the_sampling_policy_is_dropped_whole() -> None:
    t = tokens()
    distances = 0.001 + 0.2 * (t.rows_N == 1)  # the second row's tokens are each a factor of 1.22 off
    t = replace(t, old_logprobs_N=all_at(-2), sampler_logprobs_N=all_at(-2) - distances)
    plain, masked = (LossConfig(name="grpo", sequence_mask=bound) for bound in (0.0, 0.01))
    assert total(t, plain)[1]["tis_fraction"] == 0
    assert total(t, masked)[1]["tis_fraction"] == (t.rows_N == 1).sum()
    assert total(t, masked.model_copy(update={"sequence_mask": 0.3}))[0] == total(t, plain)[0]


def test_a_correction_without_a_proximal_policy_is_refused() -> None:
    with pytest.raises(TrainingError, match="tis=mask needs old log-probabilities"):
        total(tokens(old_logprobs_N=None), LossConfig(name="grpo", old_logprobs="sampler", tis="mask"))


def test_a_kl_in_the_reward_is_no_term_of_the_loss_but_is_watched() -> None:
    plain, _ = total(tokens(), LossConfig(name="grpo"))
    loss, sums = total(tokens(), LossConfig(name="grpo", kl=0.3, kl_in="reward"))
    assert loss.item() == plain.item()
    assert "reference_kl" in sums


def test_a_kl_term_without_reference_log_probabilities_is_refused() -> None:
    with pytest.raises(TrainingError, match="needs reference log-probabilities"):
        total(tokens(reference_N=None), LossConfig(name="grpo", kl=0.1))


@pytest.mark.parametrize("difference", [-3000.0, -88.8, -20.1, -20.0, -19.9, -1.0, 0.0, 1.0, 20.1, 3000.0])
def test_k3_and_its_gradient_stay_finite_and_are_the_oracles(difference: float) -> None:
    mine, theirs = (torch.tensor(difference, dtype=torch.float64, requires_grad=True) for _ in range(2))
    k3, expected = KL_ESTIMATORS["k3"](mine), divergence(theirs, "k3")
    k3.backward()
    expected.backward()
    assert k3.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-15)
    assert KL_ESTIMATORS["k3"](torch.tensor(difference)).isfinite()
    if difference < -20:
        assert mine.grad == 0


def test_a_reference_far_off_makes_no_loss_and_no_gradient_infinite() -> None:
    t = tokens()
    far = replace(t, logprobs_N=all_at(-200).float().requires_grad_(), reference_N=all_at(0).float())
    far = replace(
        far, **{name: getattr(t, name).float() for name in ("weights_N", "advantages_N", "sampler_logprobs_N")}
    )
    loss, sums = total(replace(far, old_logprobs_N=far.logprobs_N.detach()), LossConfig(name="grpo", kl=0.1))
    (slopes,) = torch.autograd.grad(loss, far.logprobs_N)
    assert loss.isfinite()
    assert slopes.isfinite().all()
    assert all(value.isfinite() for value in sums.values())


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_an_unbiased_estimator_has_the_true_kl_as_its_mean(name: str) -> None:
    policy = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    difference = policy.log() - reference.log()
    assert (policy * KL_ESTIMATORS[name](difference)).sum() == pytest.approx((policy * difference).sum())


def test_supervised_loss_is_the_weighted_cross_entropy() -> None:
    t = tokens(**PLAIN)
    loss, sums = total(t, SFT)
    assert loss.item() == pytest.approx(-sum((t.weights_N * t.logprobs_N).tolist()))
    assert set(sums) == {"loss", "logprob"}


def test_an_unknown_loss_is_refused_with_the_list() -> None:
    unknown = LossConfig.model_construct(name="dpo")  # type: ignore[call-arg]
    with pytest.raises(TrainingError, match="unknown loss 'dpo'; there are reinforce, rloo, cispo, ppo"):
        total(tokens(), unknown)


def value_by_hand(value: float, old: float, target: float, clip: float) -> float:
    bounded = min(max(value, old - clip), old + clip) if clip else value
    return max((value - target) ** 2, (bounded - target) ** 2) / 2


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.2, 0.5]))
def test_the_critics_loss_and_its_gradient_are_those_of_the_formula(seed: int, clip: float) -> None:
    t = value_tokens(seed)
    numbers = list(zip(*(c.tolist() for c in (t.values_N, t.old_values_N, t.returns_N, t.weights_N)), strict=True))
    loss, _ = total_value(t, ValueLoss(clip))
    assert loss.item() == pytest.approx(sum(w * value_by_hand(v, o, r, clip) for v, o, r, w in numbers))
    (slopes,) = torch.autograd.grad(loss, t.values_N)
    step = 1e-6
    expected = [
        w * (value_by_hand(v + step, o, r, clip) - value_by_hand(v - step, o, r, clip)) / (2 * step)
        for v, o, r, w in numbers
    ]
    assert slopes.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_a_value_that_moved_its_bound_towards_the_return_is_pulled_no_more() -> None:
    t = replace(value_tokens(), values_N=all_at(0.5).requires_grad_(), old_values_N=all_at(0))
    for target, pulled in ((1.0, False), (-1.0, True)):
        loss, sums = total_value(replace(t, returns_N=all_at(target)), ValueLoss(clip=0.2))
        (slopes,) = torch.autograd.grad(loss, t.values_N)
        assert slopes.bool().any() == pulled
        assert sums["clip_fraction"] == (0 if pulled else N)


def test_the_rounding_of_a_value_within_its_bound_does_not_look_like_clipping() -> None:
    draw = torch.Generator().manual_seed(0)
    old_N, moved_N, returns_N = torch.randn(3, 1000, generator=draw)
    t = ValueTokens(old_N + 0.1 * moved_N.clamp(-1, 1), old_N, returns_N, torch.ones(1000))
    loss, sums = total_value(t, ValueLoss(clip=0.2))
    assert sums["clip_fraction"] == 0
    assert loss == total_value(t, ValueLoss(clip=0))[0]


def test_the_configuration_with_its_lists_of_losses_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, pipeline.config.cross_checks; print({'torch', 'numpy', 'pipeline.algorithms'} & {*sys.modules})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "{'pipeline.algorithms'}"


def test_formulas_read_keys_that_exist() -> None:
    read = [key for entry in (*POLICY_LOSSES.values(), *ADVANTAGE_ESTIMATORS.values()) for key in entry.keys]
    assert {"clip_low", "ratio_cap", "beta", "gae_lambda"} <= set(read) <= set(LossConfig.model_fields)
