"""The learning rates of runs that set none, by their first weights."""

import pytest

from pipeline.config.learning_rates import critic_learning_rate, describe_learning_rate, with_learning_rate
from tests.fakes.composed_config import compose_cached


@pytest.mark.parametrize(
    ("overrides", "policy", "critic"),
    [
        (["model=tiny_qwen3"], 1e-4, 1e-4),
        (["model=tiny_qwen3", "optim.lr=3e-4", "critic.lr=2e-4"], 3e-4, 2e-4),
        (["model.init=pretrained"], 1e-6, 1e-5),
        (["model.init=pretrained", "model.lora.rank=8"], 1e-5, 1e-5),
    ],
)
def test_the_rate_fits_the_first_weights_unless_the_run_sets_one(
    overrides: list[str], policy: float, critic: float
) -> None:
    config = compose_cached(["name=test", *overrides])
    assert with_learning_rate(config.optim, config.model).lr == policy
    assert critic_learning_rate(config) == critic


def test_a_chosen_rate_is_shown_and_one_that_the_run_sets_is_not() -> None:
    chosen = describe_learning_rate(compose_cached(["name=test", "model.init=pretrained"]))
    assert chosen == "learning rate: 1e-06, the default for these weights (optim.lr sets another)"
    assert describe_learning_rate(compose_cached(["name=test", "optim.lr=1e-5"])) == ""
    assert describe_learning_rate(compose_cached(["name=test", "training.steps=0", "training.sft.steps=3"])) == ""
