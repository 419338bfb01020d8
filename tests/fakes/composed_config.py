"""`compose_config` for tests that compose many configs: Hydra composes each choice of groups once."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from pipeline.config import RunConfig, load_config
from slurm.submission.compose_config import compose_config, compose_over, config_groups


def compose_cached(overrides: Sequence[str]) -> RunConfig:
    """The config of `compose_config(overrides)`, in a fifth of its time when the groups were composed before.

    Hydra applies the choices of groups before all values, so the values may be applied to a composed config.
    """
    groups = _groups()
    chosen = tuple(text for text in overrides if text.partition("=")[0] in groups)
    values = [text for text in overrides if text.partition("=")[0] not in groups]
    return load_config(compose_over(_tree(chosen), values))


_groups = cache(config_groups)


@cache
def _tree(groups: tuple[str, ...]) -> dict[str, Any]:
    return compose_config(groups).model_dump(mode="json")
