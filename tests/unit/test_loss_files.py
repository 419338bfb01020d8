"""The files of `conf/loss`: what a name stands for, and that docs/losses.md says the same."""

import re
from pathlib import Path

import pytest

from pipeline.checks import check_config
from pipeline.config import LossConfig
from pipeline.losses import POLICY_LOSSES
from slurm import compose
from tests.unit.losses_by_hand import NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()


def chosen(name: str) -> LossConfig:
    config = compose.compose_config(["experiment=demo", f"loss={name}"])
    check_config(config)
    return config.loss


def table(pattern: str) -> dict[str, tuple[str, ...]]:
    """The rows of the page that fit, by their first group."""
    return {found[0]: found[1:] for found in re.findall(pattern, PAGE, re.MULTILINE)}


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_is_what_its_row_of_the_page_says(name: str) -> None:
    loss = chosen(name)
    functions = table(r"^\| ([a-z ]+) \| −.* \| `policy\.(\w+)` \|$")
    functions |= table(r"^\| (clipped surrogate of the sequence) \| .* \| `policy\.(\w+)` \|$")
    formula, advantage, normalise, rest = table(r"^\| `(\w+)` \| ([a-z ]+) \| `(\w+)` \| `(\w+)` \| (.*?) \| ")[name]
    assert (loss.name, loss.advantage, loss.normalise) == (name, advantage, normalise)
    assert functions[formula] == (POLICY_LOSSES[name].__name__,)
    for key, value in re.findall(r"`(ratio_cap|clip_high|beta)` ([\d.]+)", rest):
        assert getattr(loss, key) == float(value)
    if "clips 0.2" in rest:
        assert (loss.clip_low, loss.clip_high) == (0.2, 0.2)
    assert (loss.kl > 0) == ("`kl` 0.01" in rest)


def test_the_other_numbers_of_the_page_are_those_of_the_files() -> None:
    gspo, cispo, ppo, plus = chosen("gspo"), chosen("cispo"), chosen("ppo"), chosen("reinforce_pp")
    assert (gspo.clip_low, gspo.clip_high) == (0.0003, 0.0004)
    assert (1 - cispo.clip_low, 1 + cispo.clip_high) == (0, 5)
    assert (ppo.discount, ppo.trace) == (1, 0.95)
    assert (plus.kl, plus.kl_in, plus.kl_estimator) == (0.01, "reward", "k1")
