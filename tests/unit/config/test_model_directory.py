"""Which model directories can be trained and served, and how they are kept."""

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest

from pipeline.config import LoraConfig, ModelConfig
from pipeline.config.model_directory import (
    BUILT_IN,
    describe_weights,
    expert_count,
    head_count,
    located_bases,
    located_model,
    model_directory,
)
from pipeline.config.routing_shape import RoutingShape, shape_of_model
from pipeline.errors import ConfigError
from tests.fakes.composed_config import compose_cached

LORA = LoraConfig(rank=4)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory with weights, as far as names tell."""
    directory = shutil.copytree(BUILT_IN / "tiny_qwen3", tmp_path / "base")
    (directory / "model.safetensors").touch()
    return directory


def test_adapters_need_a_base_whose_weights_are_on_disk(base: Path) -> None:
    assert model_directory(ModelConfig(path=str(base), lora=LORA)) == base
    with pytest.raises(ConfigError, match=r"model\.init='random': expected pretrained with adapters"):
        model_directory(ModelConfig(path=str(base), init="random", lora=LORA))
    (base / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"\*\.safetensors"):
        model_directory(ModelConfig(path=str(base), lora=LORA))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types for num_hidden_layers=4; it has 1 of them"),
        ({"layer_types": "full_attention"}, "whose layer_types is a list; it is 'full_attention'"),
        ({"hidden_size": -128}, "whose hidden_size is a positive integer; it is -128"),
        ({"head_dim": -1}, "whose head_dim is 0 or a positive integer; it is -1"),
        ({"hidden_size": "128"}, "whose hidden_size is a positive integer; it is '128'"),
        ({"hidden_size": 128.5}, "whose hidden_size is a positive integer; it is 128.5"),
        ({"num_hidden_layers": 0}, "whose num_hidden_layers is a positive integer; it is 0"),
        ({"num_key_value_heads": 0}, "whose num_key_value_heads is a positive integer; it is 0"),
        ({"vocab_size": "many"}, "whose vocab_size is a positive integer; it is 'many'"),
        ({"max_position_embeddings": -5}, "whose max_position_embeddings is a positive integer; it is -5"),
        ({"intermediate_size": True}, "whose intermediate_size is 0 or a positive integer; it is True"),
    ],
)
def test_a_size_that_no_model_has_is_refused_with_its_key(base: Path, settings: dict[str, object], words: str) -> None:
    config = base / "config.json"
    whole = json.loads(config.read_text()) | settings
    for written in (whole, {"model_type": "gemma3", "text_config": whole}):
        config.write_text(json.dumps(written))
        with pytest.raises(ConfigError, match=re.escape(words)):
            model_directory(ModelConfig(path=str(base)))
    per_layer = {"num_attention_heads": [4] * 4, "num_key_value_heads": [2] * 4, "head_dim": None}
    config.write_text(json.dumps(whole | dict.fromkeys(settings, 4) | per_layer | {"layer_types": None}))
    assert model_directory(ModelConfig(path=str(base))) == base


def test_a_name_on_the_hub_is_what_was_downloaded_of_it(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelConfig(path="Qwen/Qwen3-0.6B")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError, match=r"hf download Qwen/Qwen3-0\.6B"):
        model_directory(model)
    cached = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("c1899de2")
    snapshot = shutil.copytree(base, cached / "snapshots" / "c1899de2")
    assert model_directory(model) == snapshot
    assert located_model(model).path == str(snapshot)


def test_an_adapter_to_go_on_from_is_kept_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lora = LORA.model_copy(update={"adapter": "runs/first/model"})
    for path in ("tiny_qwen3", "some/model"):
        assert located_model(ModelConfig(path=path, lora=lora)).lora.adapter == str(
            tmp_path / "runs" / "first" / "model"
        )


def test_no_adapter_stays_none() -> None:
    assert located_model(ModelConfig(path="tiny_qwen3")).lora.adapter == ""


def test_a_directory_with_weights_is_pretrained_unless_random_ones_are_asked_for(base: Path) -> None:
    for overrides in (["experiment=sft"], ["experiment=sft", "model=tiny_text"], ["experiment=tinker"]):
        model = compose_cached([*overrides, f"model.path={base}"]).model
        assert model_directory(model) == base
        assert located_model(model).init == "pretrained"
        assert describe_weights(model) == f"weights: pretrained from {base}"
    asked = compose_cached(["experiment=sft", f"model.path={base}", "model.init=random"]).model
    assert located_model(asked).init == "random"
    assert describe_weights(asked) == f"weights: random ones in the shape of {base}"


def test_only_a_built_in_model_is_random_by_itself(base: Path) -> None:
    assert located_model(compose_cached(["experiment=demo"]).model).init == "random"
    (base / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"expected \*\.safetensors .* model\.init=random"):
        model_directory(compose_cached(["experiment=sft", f"model.path={base}"]).model)


@pytest.mark.parametrize(
    ("settings", "heads"),
    [
        ({"num_attention_heads": 6}, 6),
        ({"text_config": {"num_attention_heads": 8}, "num_attention_heads": 6}, 8),
        ({"num_attention_heads": [4, 8]}, None),
        ({}, None),
    ],
)
def test_the_heads_are_those_of_the_language_model_if_its_config_says(
    settings: dict[str, object], heads: int | None, base: Path
) -> None:
    (base / "config.json").write_text(json.dumps({"model_type": "any"} | settings))
    assert head_count(ModelConfig(path=str(base))) == heads


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8}, 128),
        ({"text_config": {"n_routed_experts": 64, "num_local_experts": None}}, 64),
        ({"num_experts": 1}, 0),
        ({}, 0),
    ],
)
def test_the_experts_are_those_of_the_language_model_if_its_config_says(
    settings: dict[str, object], count: int, base: Path
) -> None:
    (base / "config.json").write_text(json.dumps({"model_type": "any"} | settings))
    assert expert_count(ModelConfig(path=str(base))) == count


@pytest.mark.parametrize(
    ("settings", "shape", "token_bytes"),
    [
        (
            {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8},
            RoutingShape(layers=48, per_token=8, experts=128),
            384,
        ),
        (
            {"text_config": {"num_hidden_layers": 2, "num_local_experts": 257, "num_experts_per_tok": 4}},
            RoutingShape(layers=2, per_token=4, experts=257),
            16,
        ),
        (
            {"num_hidden_layers": 3, "n_routed_experts": 256, "num_experts_per_tok": 8},
            RoutingShape(layers=3, per_token=8, experts=256),
            24,
        ),
    ],
)
def test_the_record_of_a_token_has_the_experts_of_all_layers(
    settings: dict[str, object], shape: RoutingShape, token_bytes: int, base: Path
) -> None:
    (base / "config.json").write_text(json.dumps({"model_type": "any"} | settings))
    found = shape_of_model(ModelConfig(path=str(base)))
    assert (found, found.token_bytes) == (shape, token_bytes)


def test_the_built_in_models_are_what_their_maker_writes(tmp_path: Path) -> None:
    runpy.run_path(str(BUILT_IN / "make_tiny.py"))["main"](tmp_path)
    for made in tmp_path.glob("*/*.json"):
        here, there = (json.loads((root / made.relative_to(tmp_path)).read_text()) for root in (BUILT_IN, tmp_path))
        for tree in (here, there):
            tree.pop("transformers_version", None)
        assert here == there, made.name
    assert {folder.name for folder in tmp_path.iterdir()} == {f.name for f in BUILT_IN.iterdir() if f.is_dir()} - {
        "__pycache__"
    }


def test_further_bases_are_known_by_their_absolute_paths_and_have_weights_and_positions(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parent)
    model = ModelConfig(path="/models/run", max_length=64)
    (base / "model.safetensors").touch()
    assert located_bases({"org/other": base.name}, model) == {"org/other": str(base)}
    with pytest.raises(ConfigError, match=r"serve\.bases\.org/other='none': expected a directory with config.json"):
        located_bases({"org/other": "none"}, model)
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 63}))
    with pytest.raises(ConfigError, match=r"serve\.bases\.b=.*expected a model of 64 positions or more .*it has 63"):
        located_bases({"b": str(base)}, model)
