"""The files of `conf/loss`: what a name stands for, and that docs/losses.md says the same."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.algorithms.loss_tokens import LossTokens
from pipeline.algorithms.policy_losses import POLICY_LOSSES
from pipeline.config import LossConfig
from pipeline.config.cross_checks import check_config
from pipeline.train.total_loss import total
from slurm.submission import compose_config
from tests.unit.train.losses_by_hand import NAMES

PAGE = (Path(__file__).parents[3] / "docs" / "losses.md").read_text()


def chosen(name: str) -> LossConfig:
    config = compose_config.compose_config(["experiment=demo", f"loss={name}"])
    check_config(config)
    return config.loss


def table(pattern: str) -> dict[str, tuple[str, ...]]:
    """The rows of the page that fit, by their first group."""
    return {found[0]: found[1:] for found in re.findall(pattern, PAGE, re.MULTILINE)}


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_is_what_its_row_of_the_page_says(name: str) -> None:
    loss = chosen(name)
    functions = table(r"^\| ([a-z ]+) \| −.* \| `policy_losses\.(\w+)` \|$")
    functions |= table(r"^\| (clipped surrogate of the sequence) \| .* \| `policy_losses\.(\w+)` \|$")
    formula, advantage, normalize, rest = table(r"^\| `(\w+)` \| ([a-z ]+) \| `(\w+)` \| `(\w+)` \| (.*?) \| ")[name]
    assert (loss.name, loss.advantage_estimator, loss.normalize) == (name, advantage, normalize)
    assert functions[formula] == (POLICY_LOSSES[name].function.__name__,)
    for key, value in re.findall(r"`(ratio_cap|clip_high|beta)` ([\d.]+)", rest):
        assert getattr(loss, key) == float(value)
    if "clips 0.2" in rest:
        assert (loss.clip_low, loss.clip_high) == (0.2, 0.2)
    recomputed = "`old_logprobs` recompute, `tis` mask" in rest
    assert (loss.old_logprobs, loss.tis) == (("recompute", "mask") if recomputed else ("sampler", "none"))
    assert (loss.kl > 0) == ("`kl` 0.01" in rest)


def test_the_other_numbers_of_the_page_are_those_of_the_files() -> None:
    gspo, cispo, ppo, plus = chosen("gspo"), chosen("cispo"), chosen("ppo"), chosen("reinforce_pp")
    assert (gspo.clip_low, gspo.clip_high) == (0.0003, 0.0004)
    assert (1 - cispo.clip_low, 1 + cispo.clip_high) == (0, 5)
    assert (ppo.gamma, ppo.gae_lambda) == (1, 0.95)
    assert (plus.kl, plus.kl_in, plus.kl_estimator) == (0.01, "reward", "k1")


ROWS = 16


def gradient(loss: LossConfig, rounding: float, length: int) -> tuple[Tensor, float]:
    """That of the log-probabilities on fresh samples, and the fraction of clipped tokens; the servers' numbers are off
    by `rounding` (nats, standard deviation) at every token."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.arange(ROWS).repeat_interleave(length)
    own = torch.full((len(rows),), -0.5, dtype=torch.float64)
    logprobs = own.clone().requires_grad_()
    tokens = LossTokens(
        logprobs_N=logprobs,
        weights_N=torch.full_like(own, 1 / len(rows)),
        advantages_N=torch.randn(ROWS, generator=draw, dtype=torch.float64)[rows],
        sampler_logprobs_N=own + rounding * torch.randn(len(rows), generator=draw, dtype=torch.float64),
        rows_N=rows,
        rows=ROWS,
        old_logprobs_N=own if loss.old_logprobs == "recompute" else None,
    )
    value, sums = total(tokens, loss)
    (found,) = torch.autograd.grad(value, logprobs)
    return found, float(sums.get("clip_fraction", torch.zeros(()))) / len(rows)


@pytest.mark.parametrize("length", [200, 2000])
@pytest.mark.parametrize("name", NAMES)
def test_what_servers_in_bf16_round_is_no_reason_to_clip(name: str, length: int) -> None:
    loss = chosen(name)
    exact, _ = gradient(loss, 0.0, length)
    rounded, clipped = gradient(loss, 0.02, length)
    assert clipped == 0
    assert (rounded - exact).norm() < 0.05 * exact.norm()
