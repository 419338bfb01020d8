"""What an unknown key is answered with: the key of another framework's name, or the one that it is likely to mean."""

import pytest

from pipeline.config import known_keys
from pipeline.config.key_aliases import ALIASES
from pipeline.environments.dataset_task import DatasetOptions
from pipeline.errors import ConfigError
from slurm.submission.compose_config import compose_config, config_groups


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.learning_rate=1e-5", "; here it is optim.lr or training.sft.lr"),
        ("training.learning_rate=1e-5", "; here it is optim.lr or training.sft.lr"),
        ("rollout.num_generations=8", "; here it is rollout.group_size"),
        ("num_generations=8", "; here it is rollout.group_size"),
        ("rollout.n=8", "; here it is rollout.group_size"),
        ("actor_rollout_ref.rollout.n=8", "; here it is rollout.group_size"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "; did you mean optim.lr?"),
        ("critic.optim.lr=1e-5", "; here it is critic.lr"),
        ("data.train_batch_size=64", "; here it is training.prompts_per_step"),
        ("data.train_files=a.parquet", "; here it is task.options.path or data.path"),
        ("algorithm.adv_estimator=grpo", "; here it is loss.advantage_estimator"),
        ("loss_type=grpo", "; here it is loss"),
        ("beta=0.04", "; here it is loss.kl"),
        ("lr=1e-5", "; did you mean optim.lr, critic.lr, preference.lr or training.sft.lr?"),
        ("traning.steps=3", "; did you mean training.steps?"),
        ("rollout.group_sze=3", "; did you mean rollout.group_size?"),
        ("zzz=1", "; see docs/configuration.md for all of them"),
    ],
)
def test_an_unknown_key_is_answered_with_ours(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(["experiment=demo", override])
    assert str(caught.value).endswith(said)


def test_every_alias_is_no_key_and_names_keys_that_there_are() -> None:
    options = {f"task.options.{name}" for name in known_keys(DatasetOptions)}
    known = {*known_keys(), *options, *config_groups()}
    assert {key for ours in ALIASES.values() for key in ours} <= known
    assert not ALIASES.keys() & known


@pytest.mark.parametrize(
    "spelled", ["reward.functions=my_rewards:f", "reward.functions=[my_rewards:f]", "reward.functions=['my_rewards:f']"]
)
def test_one_function_needs_no_brackets(spelled: str) -> None:
    assert compose_config(["experiment=demo", spelled]).reward.functions == ("my_rewards:f",)
    assert compose_config(["experiment=demo", "reward.weights=0.5"]).reward.weights == (0.5,)
    assert compose_config(["experiment=demo", "inference.extra_args=--enforce-eager"]).inference.extra_args == (
        "--enforce-eager",
    )


def test_several_functions_without_brackets_are_answered_with_the_brackets() -> None:
    with pytest.raises(ConfigError, match=r"a list has brackets: 'reward\.functions=\[a:f,b:g\]'"):
        compose_config(["experiment=demo", "reward.functions=a:f,b:g"])
