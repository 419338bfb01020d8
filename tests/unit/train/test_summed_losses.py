"""The losses of the API, by hand and by differences."""

import math

import pytest
import torch

from pipeline.algorithms.summed_losses import NOT_SERVED, SUMMED_LOSSES, TokenSum, token_losses

LOGPROBS, BEHAVIOUR, ADVANTAGES = -1.0, -1.5, 2.0
RATIO = math.exp(0.5)


def one(
    name: str, advantage: float = ADVANTAGES, sampler_logprobs: float = BEHAVIOUR, **given: float
) -> tuple[float, float]:
    """Loss and its gradient of one token."""
    logprobs_N = torch.tensor([LOGPROBS], dtype=torch.float64, requires_grad=True)
    columns = {
        "weights": torch.tensor([advantage], dtype=torch.float64),
        "logprobs": torch.tensor([sampler_logprobs], dtype=torch.float64),
        "advantages": torch.tensor([advantage], dtype=torch.float64),
        "sequence_ratio_mask": torch.ones(1, dtype=torch.float64),
    }
    loss = token_losses(TokenSum(name, {**SUMMED_LOSSES[name].settings, **given}), logprobs_N, columns, [1]).sum()
    loss.backward()
    assert logprobs_N.grad is not None
    return loss.item(), logprobs_N.grad.item()


@pytest.mark.parametrize(
    ("name", "given", "loss", "gradient"),
    [
        ("cross_entropy", {}, 2.0, -2.0),
        ("cross_entropy", {"advantage": -3.0}, -3.0, 3.0),
        ("importance_sampling", {}, -RATIO * 2, -RATIO * 2),
        ("importance_sampling", {"advantage": -1.0}, RATIO, RATIO),
        ("ppo", {}, -1.2 * 2, 0.0),
        ("ppo", {"advantage": -1.0}, RATIO, RATIO),
        ("ppo", {"clip_high_threshold": 3.0}, -RATIO * 2, -RATIO * 2),
        ("ppo", {"advantage": -1.0, "sampler_logprobs": 0.0}, 0.8, 0.0),
        ("cispo", {}, RATIO * 2, -RATIO * 2),
        ("cispo", {"clip_high_threshold": 1.5}, 1.5 * 2, -1.5 * 2),
        ("dro", {"beta": 0.4}, 2.0 + 0.2 * 0.25, -2.0 + 0.4 * 0.5),
        ("gspo", {}, -1.0004 * 2, 0.0),
        ("gspo", {"clip_high_threshold": 2.0}, -RATIO * 2, -RATIO * 2),
    ],
)
def test_each_loss_is_its_formula(name: str, given: dict[str, float], loss: float, gradient: float) -> None:
    found = one(name, **given)
    assert found == pytest.approx((loss, gradient))


WIDE = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
ROWS = [
    # (logprobs, sampler_logprobs, advantages, mask) of each token; the first row's tokens are not all of the sequence
    [(-1.0, -1.2, 0.0, 0.0), (-0.5, -0.9, 2.0, 1.0), (-2.0, -1.6, -1.0, 1.0), (-0.3, -0.6, 2.0, 1.0)],
    [(-1.0, -0.4, 1.0, 1.0), (-1.5, -1.1, 1.0, 1.0)],
]


def gspo(rows: list[list[tuple[float, ...]]], settings: dict[str, float]) -> tuple[list[float], list[float]]:
    """Losses and gradients of all tokens of these rows."""
    table = torch.tensor([token for row in rows for token in row], dtype=torch.float64)
    logprobs_N = table[:, 0].clone().requires_grad_()
    columns = dict(zip(SUMMED_LOSSES["gspo"].columns, table[:, 1:].T, strict=True))
    losses_N = token_losses(TokenSum("gspo", settings), logprobs_N, columns, [len(row) for row in rows])
    losses_N.sum().backward()
    assert logprobs_N.grad is not None
    return losses_N.tolist(), logprobs_N.grad.tolist()


def gspo_by_hand(row: list[tuple[float, ...]], low: float, high: float) -> tuple[list[float], list[float]]:
    """The same of one row: the geometric mean of the marked tokens' ratios stands for each token's ratio."""
    ratios = [math.exp(logprob - sampler_logprobs) for logprob, sampler_logprobs, _, marked in row if marked]
    ratio = math.prod(ratios) ** (1 / len(ratios))
    bounded = min(max(ratio, low), high)
    losses = [-min(ratio * advantage, bounded * advantage) for _, _, advantage, _ in row]
    moved = [ratio == bounded or ratio * advantage < bounded * advantage for _, _, advantage, _ in row]
    return losses, [-ratio * token[2] * free for token, free in zip(row, moved, strict=True)]


@pytest.mark.parametrize(
    "settings", [WIDE, dict(SUMMED_LOSSES["gspo"].settings), {**WIDE, "clip_high_threshold": 1.05}]
)
def test_gspo_gives_each_token_the_ratio_of_its_sequence_and_its_own_gradient(settings: dict[str, float]) -> None:
    expected = [gspo_by_hand(row, *settings.values()) for row in ROWS]
    for found, wanted in zip(gspo(ROWS, settings), zip(*expected, strict=True), strict=True):
        assert found == pytest.approx([each for row in wanted for each in row])


def test_gspo_of_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    together = gspo(ROWS, WIDE)
    apart = [gspo([row], WIDE) for row in ROWS]
    assert together == tuple(one + other for one, other in zip(*apart, strict=True))


def test_gspo_takes_a_rank_without_rows() -> None:
    nothing = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    columns = dict.fromkeys(SUMMED_LOSSES["gspo"].columns, torch.zeros(0, dtype=torch.float64))
    loss = token_losses(TokenSum("gspo", WIDE), nothing, columns, []).sum()
    loss.backward()
    assert loss.item() == 0


def test_every_loss_that_the_sdk_names_is_served_or_refused_with_an_alternative() -> None:
    from typing import get_args

    from tinker.types import LossFnType

    assert SUMMED_LOSSES.keys() | NOT_SERVED.keys() == set(get_args(LossFnType))
    assert "importance_sampling" in NOT_SERVED["stable_reinforce"]
