"""The directory of a reward model, validated before anything starts.

Owns the rule which directories can be rewards: a sequence classifier of transformers with one label, its tokenizer and
its chat template. Promises one `ConfigError` of `reward.model.*` for every other directory. Reads no weights, and
imports neither torch nor transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.task_keys import RewardModelConfig
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.errors import ConfigError

KEY = "reward.model.path"
_DEFAULT_LABELS = 2
"""Labels of a config of transformers that states none."""


def check_reward_model(config: RewardModelConfig) -> None:
    """`ConfigError` unless the directory, if there is one, has all files of a reward model."""
    if not config.path:
        return
    directory = Path(config.path)
    if not directory.is_dir():
        raise _error(config, "the directory of a reward model", "there is none; experiment=reward_model trains one")
    settings = read_settings(config)
    architectures = settings.get("architectures") or ["none"]
    if not any(str(name).endswith("ForSequenceClassification") for name in architectures):
        raise _error(config, "a sequence classifier", f"its config.json has the architecture {architectures[0]}")
    labels = len(settings.get("id2label") or range(settings.get("num_labels", _DEFAULT_LABELS)))
    if labels != 1:
        raise _error(config, "a sequence classifier with one label", f"its config.json has {labels}")
    for name, hint in (("tokenizer.json", "save its fast tokenizer there"), ("*.safetensors", "put its weights there")):
        if not any(directory.glob(name)):
            raise _error(config, f"a {name} in that directory", hint)
    try:
        ChatTokenizer(directory)
    except ConfigError as error:
        raise _error(config, error.expected, error.hint) from None
    positions = position_limit(settings)
    if positions and config.max_length > positions:
        expected = f"at most {positions}, the positions of {config.path}"
        raise ConfigError("reward.model.max_length", config.max_length, expected, "lower it, or leave it out")


def read_settings(config: RewardModelConfig) -> dict[str, Any]:
    """The model's config.json; `ConfigError` unless it is a JSON object."""
    try:
        settings = json.loads((Path(config.path) / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise _error(config, "a config.json that is JSON", " ".join(str(error).split())) from None
    if not isinstance(settings, dict):
        raise _error(config, "a config.json that is a JSON object", "copy the one that belongs to the model there")
    return settings


def position_limit(settings: Mapping[str, Any]) -> int:
    """The model's number of positions; 0 if its config states none."""
    nested = settings.get("text_config")
    positions = (nested if isinstance(nested, dict) else settings).get("max_position_embeddings")
    return positions if isinstance(positions, int) else 0


def _error(config: RewardModelConfig, expected: str, hint: str) -> ConfigError:
    return ConfigError(KEY, config.path, expected, hint)
