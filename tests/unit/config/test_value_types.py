"""Values of another type than the key's: what is converted, and what would silently become another value."""

from typing import Any

import pytest

from pipeline.config import TaskConfig
from pipeline.config.cross_checks import check_config
from pipeline.environments import load_task
from pipeline.errors import ConfigError
from tests.fakes.configs import make_config


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        ({"seed": True}, "seed=True: expected a number, not true"),
        ({"optim": {"lr": False}}, "optim.lr=False: expected a number, not false"),
        ({"task": {"name": "arithmetic", "memory_bytes": True}}, "task.memory_bytes=True: expected a number, not true"),
        ({"inference": {"min_servers": True}}, "inference.min_servers=True: expected a number, not true"),
        ({"reward": {"weights": [True]}}, "reward.weights=[True]: expected a number, not true"),
        (
            {"evaluation": {"sets": {"a": {"pass_at": [True]}}}},
            "evaluation.sets.a.pass_at=[True]: expected a number, not t",
        ),
        ({"evaluation": {"sets": {"a": {"every": True}}}}, "evaluation.sets.a.every=True: expected a number, not true"),
        (
            {"cluster": {"scheduler": "slurm", "partition": 1e5}},
            "cluster.partition=100000.0: expected a text; put a number with a dot or an exponent into quotes",
        ),
    ],
)
def test_a_value_of_another_type_is_refused(tree: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(**tree)
    assert str(caught.value).startswith(line)


def test_whole_numbers_are_texts_and_floats_where_those_are_expected() -> None:
    config = make_config(
        cluster={"scheduler": "slurm", "account": 4711, "partition": "1e5"}, optim={"lr": 1}, training={"compile": True}
    )
    assert (config.cluster.account, config.cluster.partition) == ("4711", "1e5")
    assert config.optim.lr == 1.0
    assert config.training.compile is True


def test_a_boolean_is_no_number_in_a_tasks_options() -> None:
    with pytest.raises(ConfigError, match="expected a number, not true"):
        load_task(TaskConfig(name="arithmetic", options={"size": True}), 0)


def test_a_seed_for_servers_has_31_bits_and_one_for_a_trainer_alone_any() -> None:
    seed = 1 << 31
    check_config(make_config(seed=seed, training={"steps": 0, "sft": {"steps": 3}}))
    with pytest.raises(ConfigError, match="seed=2147483648: expected at most 2147483647 in a run with servers"):
        check_config(make_config(seed=seed))
