"""Values of another type than the key's: what is converted, and what would silently become another value."""

from typing import Any

import pytest

from pipeline.errors import ConfigError
from tests.fakes.configs import make_config


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        ({"seed": True}, "seed=True: expected a number, not true"),
        ({"optim": {"lr": False}}, "optim.lr=False: expected a number, not false"),
        ({"task": {"name": "arithmetic", "memory_bytes": True}}, "task.memory_bytes=True: expected a number, not true"),
        ({"seed": 1 << 31}, "seed=2147483648: expected less than 2147483648"),
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
