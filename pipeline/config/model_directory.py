"""Model directories.

Owns what counts as a model path: a directory with a Hugging Face config and tokenizer, a name under `conf/models/`, or
the name of a model on the Hugging Face Hub that was downloaded to its cache. Reads no weights, asks no network, and
imports neither torch nor transformers.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import conf
from pipeline.config import LoraConfig, ModelConfig, closest_match
from pipeline.errors import ConfigError

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
BUILT_IN = Path(conf.__file__).parent / "models"


def model_directory(model: ModelConfig) -> Path:
    """The directory that `model.path` names; `ConfigError` if it is not one that can be trained and served."""
    directory = _directory(model.path)
    if not (directory / "config.json").is_file():
        raise _error(model, "a directory with config.json and tokenizer.json", _hint(model.path))
    if not (directory / "tokenizer.json").is_file():
        raise _error(model, "a tokenizer.json in that directory", "save the fast tokenizer there")
    if "model_type" not in _settings(model, directory):
        raise _error(model, "a config.json with a model_type", "copy the one that belongs to the model there")
    first = initial_weights(model)
    if model.lora.rank and first == "random":
        hint = "train a base first and set model.path to it, with model.init=pretrained"
        raise ConfigError("model.init", "random", "pretrained below adapters, whose base servers have from disk", hint)
    if first == "pretrained" and not _has_weights(directory):
        hint = "put the weights there, or start from random ones with model.init=random"
        raise _error(model, "*.safetensors in that directory", hint)
    return directory.resolve()


def initial_weights(model: ModelConfig) -> Literal["pretrained", "random"]:
    """Where the first weights come from, decided: `auto` is random only for a name of `conf/models/`."""
    if model.init != "auto":
        return model.init
    return "random" if is_built_in(model.path) and not _has_weights(_directory(model.path)) else "pretrained"


def describe_weights(model: ModelConfig) -> str:
    """Where the first weights come from, in words, for a model whose directory was checked.

    >>> describe_weights(ModelConfig(path="/models/Qwen3-0.6B"))
    'weights: pretrained from /models/Qwen3-0.6B'
    """
    if initial_weights(model) == "random":
        return f"weights: random ones in the shape of {model.path}"
    adapter = f", adapter from {model.lora.adapter}" if model.lora.rank and model.lora.adapter else ""
    return f"weights: pretrained from {_directory(model.path).resolve()}{adapter}"


def longest_sequence(model: ModelConfig) -> int | None:
    """The positions the model was made for; None when its config does not say, or stretches them.

    Frequencies of the types `longrope` and `dynamic` are known up to `max_position_embeddings`, and servers have no
    others (see `pipeline.train.model.rope`).
    """
    settings = _text_settings(model)
    ropes = [settings[key] for key in ("rope_scaling", "rope_parameters") if isinstance(settings.get(key), dict)]
    stretched = any("factor" in rope and _rope_type(rope) not in ("longrope", "dynamic") for rope in ropes)
    positions = settings.get("max_position_embeddings")
    return positions if isinstance(positions, int) and not stretched else None


def stored_dtype(model: ModelConfig) -> str:
    """The dtype that its config.json names, such as `bfloat16`; empty if it names none."""
    whole, text = _settings(model, model_directory(model)), _text_settings(model)
    named = (each.get(key) for each in (text, whole) for key in ("dtype", "torch_dtype"))
    return next((name for name in named if isinstance(name, str)), "")


def head_count(model: ModelConfig) -> int | None:
    """The heads of each attention layer; None when its config does not say, or gives them layer by layer."""
    heads = _text_settings(model).get("num_attention_heads")
    return heads if isinstance(heads, int) else None


def key_heads(model: ModelConfig) -> int | None:
    """The key heads of each attention layer, if the config says; those of latent attention are made for each head."""
    settings = _text_settings(model)
    heads = settings.get("num_key_value_heads")
    return heads if isinstance(heads, int) and not settings.get("kv_lora_rank") else head_count(model)


def expert_count(model: ModelConfig) -> int:
    """The experts of a layer of a mixture; 0 for a model without, as far as its config says."""
    settings = _text_settings(model)
    counts = [settings.get(key) for key in _EXPERTS]
    return max((count for count in counts if isinstance(count, int) and count > 1), default=0)


def has_vision_tower(model: ModelConfig) -> bool:
    """Whether the model sees images as well, as its config says; only its language model is trained."""
    return isinstance(_settings(model, model_directory(model)).get("vision_config"), dict)


def located_model(model: ModelConfig) -> ModelConfig:
    """The same model from whatever directory one looks: a name of `conf/models/`, or an absolute path; the adapter to
    go on from by its absolute path; and `init` decided, so that weights which appear later change nothing."""
    adapter = model.lora.adapter and str(Path(model.lora.adapter).resolve())
    path = model.path if is_built_in(model.path) else str(_directory(model.path).resolve())
    lora = model.lora.model_copy(update={"adapter": adapter})
    return model.model_copy(update={"lora": lora, "path": path, "init": initial_weights(model)})


def located_bases(bases: Mapping[str, str], model: ModelConfig) -> dict[str, str]:
    """`serve.bases` by their absolute paths; `ConfigError` for one that has no weights, or that was made for shorter
    sequences than those of the run's `model`."""
    located = {}
    for name, path in bases.items():
        base = model.model_copy(update={"path": path, "init": "pretrained", "lora": LoraConfig()})
        try:
            located[name] = str(model_directory(base))
        except ConfigError as error:
            raise ConfigError(f"serve.bases.{name}", path, error.expected, error.hint) from None
        positions = longest_sequence(base)
        if positions is not None and model.max_length > positions:
            expected = f"a model of {model.max_length} positions or more (model.max_length); it has {positions}"
            raise ConfigError(f"serve.bases.{name}", path, expected, "lower model.max_length")
    return located


def _directory(path: str) -> Path:
    """Where a path leads: of a name on the hub, to what was downloaded of its main branch, if anything was."""
    if is_built_in(path):
        return BUILT_IN / path
    if not Path(path).is_dir() and _HUB_NAME.fullmatch(path):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json")
        if isinstance(cached, str):
            return Path(cached).parent
    return Path(path)


def _rope_type(rope: dict[str, Any]) -> object:
    """Older configs call it `type`."""
    return rope.get("rope_type", rope.get("type"))


def _text_settings(model: ModelConfig) -> dict[str, Any]:
    """What a config says of the language model, which may be a part of a larger one."""
    settings = _settings(model, model_directory(model))
    text = settings.get("text_config")
    return text if isinstance(text, dict) else settings


def _settings(model: ModelConfig, directory: Path) -> dict[str, Any]:
    try:
        settings = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise _error(model, "a config.json that is JSON", " ".join(str(error).split())) from None
    if not isinstance(settings, dict):
        raise _error(model, "a config.json that is a JSON object", "copy the one that belongs to the model there")
    return settings


def _error(model: ModelConfig, expected: str, hint: str) -> ConfigError:
    return ConfigError("model.path", model.path, expected, hint)


def is_built_in(path: str) -> bool:
    """Whether it is a name of `conf/models/`."""
    return _is_name(path) and (BUILT_IN / path).is_dir()


def _has_weights(directory: Path) -> bool:
    return any(directory.glob("*.safetensors"))


def _is_name(path: str) -> bool:
    return "/" not in path and path not in ("", ".", "..")


def _hint(path: str) -> str:
    if _is_name(path):
        return closest_match(path, sorted(child.name for child in BUILT_IN.iterdir() if child.is_dir()))
    return f"download the model first, for instance: hf download {path}; or set model.path to its directory"
