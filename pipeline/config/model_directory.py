"""Model directories, and the facts that their configs contain.

A model path is a directory with a Hugging Face config and tokenizer, a name under `conf/models/`, the name of a model
on the Hugging Face Hub that is in the local cache, or an installed package with weights (`package:<module>`, see
`pipeline.config.packaged_model`). This module reads no weights, uses no network, and imports neither torch nor
transformers.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import conf
from pipeline.config import LoraConfig, ModelConfig, RunConfig, closest_match
from pipeline.config.model_shape_checks import find_shape_mistake
from pipeline.config.packaged_model import PREFIX, packaged_directory
from pipeline.errors import ConfigError

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
"""Keys of configs for the number of experts to which a layer sends each token."""
BUILT_IN = Path(conf.__file__).parent / "models"
DRAFTING_MODEL = "inference.speculation.model"


def model_directory(model: ModelConfig) -> Path:
    """The directory that `model.path` names. `ConfigError` if its model cannot be trained and served."""
    directory = _directory(model.path)
    if not (directory / "config.json").is_file():
        raise _error(model, "a directory with config.json and tokenizer.json", _hint(model.path))
    if not (directory / "tokenizer.json").is_file():
        raise _error(model, "a tokenizer.json in that directory", "save the fast tokenizer there")
    settings = _settings(model, directory)
    if "model_type" not in settings:
        raise _error(model, "a config.json with a model_type", "copy the one that belongs to the model there")
    if mistake := find_shape_mistake(_text_part(settings)):
        raise _error(model, *mistake)
    first = initial_weights(model)
    if model.lora.rank and first == "random":
        hint = "train a base first and set model.path to it, with model.init=pretrained"
        expected = "pretrained with adapters, since servers load their base from disk"
        raise ConfigError("model.init", "random", expected, hint)
    if first == "pretrained" and not _has_weights(directory):
        hint = "put the weights there, or start from random ones with model.init=random"
        raise _error(model, "*.safetensors in that directory", hint)
    return directory.resolve()


def initial_weights(model: ModelConfig) -> Literal["pretrained", "random"]:
    """The source of the initial weights. `auto` means random only for a name of `conf/models/`."""
    if model.init != "auto":
        return model.init
    return "random" if is_built_in(model.path) and not _has_weights(_directory(model.path)) else "pretrained"


def describe_weights(model: ModelConfig) -> str:
    """The source of the initial weights in words, for a model whose directory has been checked.

    >>> describe_weights(ModelConfig(path="/models/Qwen3-0.6B"))
    'weights: pretrained from /models/Qwen3-0.6B'
    """
    if initial_weights(model) == "random":
        return f"weights: random ones in the shape of {model.path}"
    adapter = f", adapter from {model.lora.adapter}" if model.lora.rank and model.lora.adapter else ""
    return f"weights: pretrained from {_directory(model.path).resolve()}{adapter}"


def longest_sequence(model: ModelConfig) -> int | None:
    """The model's number of positions; None if its config has none, or scales them.

    Frequencies of the types `longrope` and `dynamic` are defined up to `max_position_embeddings`, and servers have no
    others (see `pipeline.train.model.rope`).
    """
    settings = _text_settings(model)
    # A scaling factor extends the positions, so `max_position_embeddings` is not the limit then.
    ropes = [settings[key] for key in ("rope_scaling", "rope_parameters") if isinstance(settings.get(key), dict)]
    stretched = any("factor" in rope and _rope_type(rope) not in ("longrope", "dynamic") for rope in ropes)
    positions = settings.get("max_position_embeddings")
    return positions if isinstance(positions, int) and not stretched else None


def stored_dtype(model: ModelConfig) -> str:
    """The dtype in the model's config.json, such as `bfloat16`; empty if there is none."""
    whole, text = _settings(model, model_directory(model)), _text_settings(model)
    names = (settings.get(key) for settings in (text, whole) for key in ("dtype", "torch_dtype"))
    return next((name for name in names if isinstance(name, str)), "")


def head_count(model: ModelConfig) -> int | None:
    """Number of query heads of each attention layer; None if the config has none, or a number per layer."""
    heads = _text_settings(model).get("num_attention_heads")
    return heads if isinstance(heads, int) else None


def key_heads(model: ModelConfig) -> int | None:
    """Number of key heads of each attention layer; None if unknown. Latent attention has one per query head."""
    settings = _text_settings(model)
    heads = settings.get("num_key_value_heads")
    return heads if isinstance(heads, int) and not settings.get("kv_lora_rank") else head_count(model)


def expert_count(model: ModelConfig) -> int:
    """Number of experts in a layer of a mixture of experts, according to its config; 0 for other models."""
    settings = _text_settings(model)
    counts = [settings.get(key) for key in _EXPERTS]
    return max((count for count in counts if isinstance(count, int) and count > 1), default=0)


def model_family(model: ModelConfig) -> str:
    """The `model_type` of the language model in the model's config."""
    return str(_text_settings(model).get("model_type", ""))


def experts_per_token(model: ModelConfig) -> int:
    """Number of experts to which a layer of a mixture sends each token, according to its config; 0 if it has none."""
    settings = _text_settings(model)
    counts = [settings.get(key) for key in EXPERTS_PER_TOKEN]
    return next((count for count in counts if isinstance(count, int)), 0)


def layer_count(model: ModelConfig) -> int:
    """Number of decoder layers; 0 if the config has none."""
    layers = _text_settings(model).get("num_hidden_layers")
    return layers if isinstance(layers, int) else 0


def vocabulary_size(model: ModelConfig) -> int | None:
    """Number of rows of the embedding; None if the config has none."""
    size = _text_settings(model).get("vocab_size")
    return size if isinstance(size, int) else None


def has_vision_tower(model: ModelConfig) -> bool:
    """Whether the model's config has a vision tower. Only the language model is trained."""
    return isinstance(_settings(model, model_directory(model)).get("vision_config"), dict)


def located_model(model: ModelConfig) -> ModelConfig:
    """The model with absolute paths of its directory and its adapter, independent of the working directory.

    A name of `conf/models/` stays. `init` is resolved, so that weights which appear later have no effect.
    """
    adapter = model.lora.adapter and str(Path(model.lora.adapter).resolve())
    path = model.path if is_built_in(model.path) else str(_directory(model.path).resolve())
    lora = model.lora.model_copy(update={"adapter": adapter})
    return model.model_copy(update={"lora": lora, "path": path, "init": initial_weights(model)})


def located_bases(bases: Mapping[str, str], model: ModelConfig) -> dict[str, str]:
    """`serve.bases` with absolute paths.

    `ConfigError` for a base without weights, or with fewer positions than the run's `model` needs.
    """
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


def drafting_model(config: RunConfig) -> ModelConfig:
    """The keys of `model` for `inference.speculation.model`, which servers load from disk and run in the policy's
    compute type."""
    path = config.inference.speculation.model
    return config.model.model_copy(update={"path": path, "init": "pretrained", "lora": LoraConfig()})


def draft_directory(config: RunConfig) -> Path:
    """The absolute directory of `inference.speculation.model`. `ConfigError` without weights, or with another
    vocabulary than the policy's."""
    key, path, drafts = DRAFTING_MODEL, config.inference.speculation.model, drafting_model(config)
    if not path:
        raise ConfigError(key, path, "the directory of a smaller model with method=draft", "set it")
    try:
        directory = model_directory(drafts)
    except ConfigError as error:
        raise ConfigError(key, path, error.expected, error.hint) from None
    drafted, policy = vocabulary_size(drafts), vocabulary_size(config.model)
    if drafted != policy:
        expected = f"a model with the policy's vocabulary of {policy} tokens (it has {drafted})"
        raise ConfigError(key, path, expected, "choose a smaller model of the policy's family, or method=ngram")
    return directory


def _directory(path: str) -> Path:
    """The directory of a path. For a name on the Hub: the cached main branch, if it was downloaded."""
    if is_built_in(path):
        return BUILT_IN / path
    if path.startswith(PREFIX):
        return packaged_directory(path)
    if not Path(path).is_dir() and _HUB_NAME.fullmatch(path):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json")
        if isinstance(cached, str):
            return Path(cached).parent
    return Path(path)


def _rope_type(rope: dict[str, Any]) -> object:
    """The type of a rope entry."""
    return rope.get("rope_type", rope.get("type"))  # older configs name it `type`


def _text_settings(model: ModelConfig) -> dict[str, Any]:
    """The settings of the language model in a config, which may describe a larger model."""
    return _text_part(_settings(model, model_directory(model)))


def _text_part(settings: dict[str, Any]) -> dict[str, Any]:
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
