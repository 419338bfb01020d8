"""The losses of the API, by hand and by differences."""

import math

import pytest
import torch

from pipeline.config.sums import COLUMNS, SETTINGS, TokenSum
from pipeline.losses.sums import token_losses

LOGPROBS, BEHAVIOUR, ADVANTAGES = -1.0, -1.5, 2.0
RATIO = math.exp(0.5)


def one(name: str, advantage: float = ADVANTAGES, behaviour: float = BEHAVIOUR, **given: float) -> tuple[float, float]:
    """Loss and its gradient of one token."""
    logprobs_N = torch.tensor([LOGPROBS], dtype=torch.float64, requires_grad=True)
    columns = {
        "weights": torch.tensor([advantage], dtype=torch.float64),
        "logprobs": torch.tensor([behaviour], dtype=torch.float64),
        "advantages": torch.tensor([advantage], dtype=torch.float64),
    }
    loss = token_losses(TokenSum(name, {**SETTINGS[name], **given}), logprobs_N, columns).sum()
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
        ("ppo", {"advantage": -1.0, "behaviour": 0.0}, 0.8, 0.0),
        ("cispo", {}, RATIO * 2, -RATIO * 2),
        ("cispo", {"clip_high_threshold": 1.5}, 1.5 * 2, -1.5 * 2),
        ("dro", {"beta": 0.4}, 2.0 + 0.2 * 0.25, -2.0 + 0.4 * 0.5),
    ],
)
def test_each_loss_is_its_formula(name: str, given: dict[str, float], loss: float, gradient: float) -> None:
    found = one(name, **given)
    assert found == pytest.approx((loss, gradient))


def test_every_loss_has_settings_and_columns() -> None:
    assert COLUMNS.keys() == SETTINGS.keys()
