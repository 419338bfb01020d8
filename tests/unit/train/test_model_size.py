"""Sizes of models, counted without numbers, against models that have some."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AutoConfig,
    AutoModel,
    BambaConfig,
    Gemma3TextConfig,
    JetMoeConfig,
    Lfm2Config,
    LlamaConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pipeline.config import LoraConfig, ModelConfig
from pipeline.config.model_directory import model_directory
from pipeline.errors import ConfigError
from pipeline.train.model.activation_size import activations_of
from pipeline.train.model.model_size import (
    _cache,
    _meta_model,
    check_client_adapters,
    check_experts,
    check_routers,
    check_served_adapters,
    sizes_of,
)
from pipeline.train.model.models import build_model, build_on_meta

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "num_key_value_heads": 2}
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
}


def saved(folder: Path, config: object, **settings: object) -> ModelConfig:
    config.save_pretrained(folder)  # type: ignore[attr-defined]
    (folder / "tokenizer.json").write_text("{}")
    return ModelConfig(path=str(folder), init="random", **settings)  # type: ignore[arg-type]


MISTAKES: dict[str, object] = {
    "layer_types": ["quantum_attention"] * 3,
    "rope_parameters": {"rope_theta": "big", "rope_type": "default"},
    "head_dim": 33,
    "rms_norm_eps": "small",
    "hidden_act": "siluu",
    "pad_token_id": 99,
    "hidden_size": 10**18,
}


@pytest.mark.parametrize("key", MISTAKES)
def test_a_mistake_in_a_models_config_is_one_line(tmp_path: Path, key: str) -> None:
    model = saved(tmp_path, Qwen3Config(**SHAPE, num_key_value_heads=4))
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {key: MISTAKES[key]}))
    for reads in (sizes_of, check_routers):
        with pytest.raises(ConfigError, match=r"model\.path=.*: expected a model that transformers supports") as raised:
            reads(model)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("key_heads", [3, 8])
def test_heads_that_no_kernel_can_attend_are_one_line(tmp_path: Path, key_heads: int) -> None:
    model = saved(tmp_path, Qwen3Config(**SHAPE, num_key_value_heads=key_heads, head_dim=8))
    with pytest.raises(ConfigError, match=f"num_key_value_heads={key_heads} does not divide num_attention_heads=4"):
        sizes_of(model)


PADDED = ["full_attention"] * 4
COMPRESSED = {"layer_types": ["heavily_compressed_attention"] * 4, "mlp_layer_types": ["moe"] * 4}
UNUSUAL: dict[str, dict[str, object]] = {
    "qwen3_moe": {**SHAPE, **EXPERTS, "intermediate_size": 0, "num_key_value_heads": 2, "head_dim": 8},
    "falcon": {**SHAPE, "multi_query": True, "num_key_value_heads": 71},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64, "n_positions": 64, "head_dim": 0},
    "step3p7": {"text_config": {**SHAPE, "num_nextn_predict_layers": 1, "layer_types": PADDED, "head_dim": 8}},
    "deepseek_v4": {**SHAPE, **COMPRESSED, "num_key_value_heads": 1, "head_dim": 8, "n_routed_experts": 4},
}


@pytest.mark.parametrize("family", UNUSUAL)
def test_sizes_that_a_family_does_not_use_are_not_refused(tmp_path: Path, family: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(UNUSUAL[family] | {"model_type": family}))
    (tmp_path / "tokenizer.json").write_text("{}")
    directory = model_directory(ModelConfig(path=str(tmp_path), init="random"))
    with torch.device("meta"):
        network = AutoModel.from_config(AutoConfig.from_pretrained(directory))
    assert sum(p.numel() for p in network.parameters()) > 64 * 32


def kept(model: ModelConfig, tokens: int) -> float:
    """Bytes a token that autograd keeps in a real pass through the decoder, with the attention that is trained with."""
    policy = build_model(model, seed=0)
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    found: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            found[place] = tensor
        return tensor

    tokens_BT = torch.arange(tokens)[None] % SHAPE["vocab_size"]
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.decoder(input_ids=tokens_BT, position_ids=torch.arange(tokens)[None], use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values()) / tokens


@pytest.mark.parametrize("kind", [Qwen3Config, LlamaConfig])
@pytest.mark.parametrize(("heads", "most"), [(4, 1.0), (2, 1.1)])
def test_what_autograd_keeps_is_counted_without_numbers(kind: type, heads: int, most: float, tmp_path: Path) -> None:
    """Grouped heads are counted as repeated, which they are only for kernels that do not take them."""
    model = saved(tmp_path, kind(**SHAPE, num_key_value_heads=heads, head_dim=8))
    assert 0.99 <= sizes_of(model).activations / kept(model, 256) <= 1.01 * most


def test_parameters_are_those_of_the_trainer_s_own_model(tmp_path: Path) -> None:
    model = saved(tmp_path, Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True))
    policy, sizes = build_on_meta(model), sizes_of(model)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in policy.layers]
    assert sizes.parameters == sizes.trained == sum(p.numel() for p in policy.parameters())
    assert (sizes.layers, sizes.layer, sizes.outside_layers) == (3, layers[0], sizes.parameters - sum(layers))
    assert (sizes.hidden, sizes.vocabulary, sizes.width, sizes.head_trained) == (32, 64, 4, True)
    assert (sizes.kv, sizes.kv_heads) == (3 * 2 * 2 * 8, 2)


ADAPTED = {"qwen3_moe": ["gate_proj", "up_proj", "down_proj"]}
KINDS = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SHAPE | {"num_hidden_layers": 6}, num_key_value_heads=2, head_dim=8),
        Gemma3TextConfig(**SHAPE | {"num_hidden_layers": 8}, head_dim=8, layer_types=KINDS * 4),
        Qwen3MoeConfig(**SHAPE | {"num_hidden_layers": 7}, **EXPERTS, mlp_only_layers=[0, 4]),
        Lfm2Config(
            **SHAPE | {"num_hidden_layers": 8}, num_key_value_heads=2, layer_types=["conv", "full_attention"] * 4
        ),
        BambaConfig(**SHAPE | {"num_hidden_layers": 6}, **MAMBA, attn_layer_indices=[1, 4]),
    ],
    ids=lambda config: config.model_type,
)
def test_layers_that_are_alike_count_as_if_each_computed(config: Any, rank: int, tmp_path: Path) -> None:
    lora = LoraConfig(rank=rank, targets=ADAPTED.get(config.model_type, ["q_proj"]))
    directory = Path(saved(tmp_path, config).path)
    model = ModelConfig.model_construct(lora=lora, dtype="bfloat16")
    short, full = (activations_of(_meta_model(directory, model), computed) for computed in (3, 8))
    assert short == full
    assert min(full) > 0


def test_half_as_wide_numbers_take_half_of_the_weights(tmp_path: Path) -> None:
    model = saved(tmp_path, Qwen3Config(**SHAPE, num_key_value_heads=4, head_dim=8), dtype="bfloat16")
    assert sizes_of(model) == sizes_of(model.model_copy(update={"dtype": "float16"}))
    wide = sizes_of(model.model_copy(update={"dtype": "float32"}))
    assert sizes_of(model).weights == wide.weights / 2
    assert sizes_of(model).activations < wide.activations


def test_below_adapters_only_they_are_trained(tmp_path: Path) -> None:
    model = saved(tmp_path, Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8), lora=LoraConfig(rank=4))
    torch.save({}, tmp_path / "model.safetensors")  # adapters stand on weights from disk, which nobody reads here
    model = model.model_copy(update={"init": "pretrained"})
    policy, sizes = build_on_meta(model), sizes_of(model)
    assert sizes.trained == sum(p.numel() for p in policy.parameters() if p.requires_grad) < sizes.parameters
    assert not sizes.head_trained


def test_a_router_that_looks_at_numbers_leaves_the_rest_known(tmp_path: Path) -> None:
    model = saved(tmp_path, Qwen2MoeConfig(**SHAPE, **EXPERTS, num_key_value_heads=2))
    sizes = sizes_of(model)
    assert sizes.parameters == sum(p.numel() for p in build_on_meta(model).parameters())
    assert sizes.activations >= 0


LAYER = 2 * 2 * 8
"""Numbers a token of one layer: keys and values of two heads of 8."""


@pytest.mark.parametrize(
    ("settings", "kv", "kv_window", "window"),
    [
        ({"layer_types": ["linear_attention", "linear_attention", "full_attention"]}, LAYER, 0, 0),
        ({"layer_types": ["sliding_attention", "full_attention", "conv"], "sliding_window": 16}, LAYER, LAYER, 16),
        ({"layer_types": ["sliding_attention", "full_attention", "conv"]}, 2 * LAYER, 0, 0),
        ({"layer_types": ["hybrid", "mamba", "hybrid"]}, 2 * LAYER, 0, 0),
        ({"layer_types": ["mamba", "mamba", "hybrid"], "attention_head_dim": 16}, 2 * LAYER, 0, 0),
        ({"sliding_window": 16}, 0, 3 * LAYER, 16),
        ({"sliding_window": 16, "use_sliding_window": False}, 3 * LAYER, 0, 0),
        ({"kv_lora_rank": 16, "qk_rope_head_dim": 4}, 3 * 20, 0, 0),
        ({}, 3 * LAYER, 0, 0),
    ],
)
def test_the_cache_holds_what_layers_of_its_kind_keep(
    settings: dict[str, object], kv: int, kv_window: int, window: int
) -> None:
    text = SimpleNamespace(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, **settings)
    assert _cache(text, 3) == {"kv": kv, "kv_window": kv_window, "window": window}


@pytest.mark.parametrize("family", ["no_such_model", "gpt2"])
def test_what_cannot_be_told_is_refused_in_one_line(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "n_layer": 1}))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.path.*expected a model that transformers supports") as caught:
        sizes_of(ModelConfig(path=str(tmp_path), init="random"))
    assert "\n" not in str(caught.value)


OTHER = JetMoeConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, kv_channels=8, intermediate_size=16)
MIXTURE = {"moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [0]}


def test_the_experts_of_a_mixture_are_counted_with_those_that_a_token_meets(tmp_path: Path) -> None:
    sizes = sizes_of(
        saved(tmp_path, Qwen3MoeConfig(**SHAPE, num_key_value_heads=4, **MIXTURE))
    )  # the first layer is dense
    layer = 6 * 3 * 16 * SHAPE["hidden_size"]
    assert (sizes.experts, sizes.experts_layer, sizes.experts_per_token) == (2 * layer, layer, 2)
    assert sizes.experts_of_layer == 6
    dense = sizes_of(saved(tmp_path, Qwen3Config(**SHAPE, num_key_value_heads=4)))
    assert (dense.experts, dense.experts_layer, dense.experts_per_token) == (0, 0, 0)


def test_adapters_on_experts_are_refused_where_servers_or_clients_exchange_them(tmp_path: Path) -> None:
    mixture = saved(tmp_path, Qwen3MoeConfig(**SHAPE, num_key_value_heads=4, **MIXTURE))
    torch.save({}, tmp_path / "model.safetensors")
    mixture = mixture.model_copy(update={"init": "pretrained", "lora": LoraConfig(rank=4)})
    attention = mixture.model_copy(update={"lora": LoraConfig(rank=4, targets=("q_proj", "o_proj"))})
    check_served_adapters(attention)
    check_client_adapters(attention, ep=2, served=True)
    check_client_adapters(mixture, ep=1, served=False)
    for check in (
        lambda: check_served_adapters(mixture),
        lambda: check_client_adapters(mixture, ep=2, served=False),
        lambda: check_client_adapters(mixture, ep=1, served=True),
    ):
        with pytest.raises(ConfigError, match=r"model\.lora\.targets.*expected attention layers alone"):
            check()


def test_a_model_whose_routers_cannot_replay_is_refused(tmp_path: Path) -> None:
    check_routers(saved(tmp_path / "mixture", Qwen3MoeConfig(**SHAPE, num_key_value_heads=4, **MIXTURE)))
    for model, family in (
        (Qwen3Config(**SHAPE, num_key_value_heads=4), "Qwen3ForCausalLM"),
        (OTHER, "JetMoeForCausalLM"),
    ):
        with pytest.raises(ConfigError, match=f"'rollout': expected none for {family}, which has no fused experts"):
            check_routers(saved(tmp_path / family, model))


def test_experts_that_cannot_be_spread_are_refused_with_the_allowed_values(tmp_path: Path) -> None:
    mixture = saved(tmp_path / "mixture", Qwen3MoeConfig(**SHAPE, num_key_value_heads=4, **MIXTURE))
    dense, other = (
        saved(tmp_path / "dense", Qwen3Config(**SHAPE, num_key_value_heads=4)),
        saved(tmp_path / "other", OTHER),
    )
    check_experts(mixture, 3)
    for model, ep, said in (
        (mixture, 4, "training.mesh.ep=4: expected a divisor of 6, the experts of a layer: 1, 2, 3, 6; change it"),
        (dense, 2, "training.mesh.ep=2: expected 1 for a model without experts; remove it"),
        (
            other,
            2,
            "training.mesh.ep=2: expected 1 for a model with experts that are not fused (JetMoeParallelExperts)",
        ),
    ):
        with pytest.raises(ConfigError) as refused:
            check_experts(model, ep)
        assert said in str(refused.value)
