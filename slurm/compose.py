"""From the command line to a typed config.

Owns Hydra: the only module that imports it. Promises that every mistake in an override becomes one `ConfigError` that
names the nearest right word, before Hydra's own messages are reached.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import conf
from pipeline.config import RunConfig, known_keys, load_config, nearest
from pipeline.errors import ConfigError

CONF = Path(conf.__file__).parent
OPEN = ("task.options.", "cluster.sbatch.")
"""Below these the keys are not ours: the task's own, and sbatch's."""


def compose_config(overrides: Sequence[str], folder: Path = CONF) -> RunConfig:
    """The config that `conf/` and the overrides describe; `ConfigError` for the first thing that is wrong."""
    prepared = [_prepare(text, folder) for text in overrides]
    try:
        with initialize_config_dir(str(folder.resolve()), version_base="1.3"):
            tree = OmegaConf.to_container(compose("config", prepared), resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("overrides", " ".join(overrides), "overrides that compose", reason) from None
    if not isinstance(tree, dict):
        raise ConfigError("conf/config.yaml", tree, "a mapping")
    config: dict[str, Any] = {str(key): value for key, value in tree.items()}
    if "name" not in config:
        raise ConfigError("name", None, "a name for the run", "set name=… or choose an experiment=…")
    return load_config(config)


def groups(folder: Path = CONF) -> dict[str, list[str]]:
    """The config groups and the choices of each."""
    found = {path for path in folder.iterdir() if path.is_dir() and any(path.glob("*.yaml"))}
    return {path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in sorted(found)}


def _prepare(text: str, folder: Path) -> str:
    """The override as Hydra shall see it: a checked group choice, or a value for a known key."""
    override = _parse(text)
    key, choices = override.key_or_group, groups(folder)
    if key in choices:
        value = override.value()
        if value not in choices[key]:
            raise ConfigError(key, value, f"one of {', '.join(choices[key])}", nearest(str(value), choices[key]))
        return text
    keys = known_keys()
    inside = [known for known in keys if known.startswith(f"{key}.")]
    if inside:
        raise ConfigError(key, text.partition("=")[2], "one key at a time", f"set {', '.join(inside)}")
    if key not in keys and not key.startswith(OPEN):
        raise ConfigError(key, override.value(), "a known key", nearest(key, [*keys, *choices]))
    if override.is_delete():
        return text
    return "++" + text.lstrip("+")


def _parse(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(text, text, "key=value", reason) from None
    if override.is_sweep_override():
        raise ConfigError(override.key_or_group, text.partition("=")[2], "one value", "submit one run for each value")
    return override
