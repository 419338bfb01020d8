"""Adapters on a small network: what they change, what is saved, and which adapters are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config import LoraConfig, ModelConfig
from pipeline.errors import CheckpointError, ConfigError, RollcallError
from pipeline.train.model.lora import (
    CONFIG,
    WEIGHTS,
    add_adapters,
    checkpoint_name,
    first_tensors,
    is_trained,
    save_adapter,
)

TINY = Path(__file__).parents[3] / "conf" / "models" / "tiny_qwen3"
LORA = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
TOKENS_BT = torch.tensor([[1, 5, 6, 7, 11, 4]])


def a_network(layers: int = 1) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(TINY)
    config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def adapted(network: Any, lora: LoraConfig, seed: int) -> Any:
    """The network with adapters that hold what they start with."""
    add_adapters(network, lora)
    named = dict(network.named_parameters())
    with torch.no_grad():
        for name, tensor in first_tensors(network, lora, seed):
            named[name].copy_(tensor)
    return network


def adapters(network: nn.Module) -> dict[str, Tensor]:
    return {checkpoint_name(name): p.detach() for name, p in network.named_parameters() if is_trained(name)}


def a_trained_network() -> Any:
    """A network whose adapters are no longer fresh."""
    network = adapted(a_network(), LORA, seed=1)
    with torch.no_grad():
        for tensor in adapters(network).values():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    return network


def logits(network: Any) -> Tensor:
    with torch.no_grad():
        answer: Tensor = network(TOKENS_BT).logits
    return answer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The directory of a trained adapter."""
    save_adapter(tmp_path / "adapter", adapters(a_trained_network()), ModelConfig(path=str(TINY), lora=LORA))
    return tmp_path / "adapter"


def test_fresh_adapters_change_no_output_and_are_the_only_parameters_that_train() -> None:
    network = adapted(a_network(), LORA, seed=1)
    assert torch.equal(logits(network), logits(a_network()))
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in network.named_parameters() if is_trained(name)}
    assert len(trained) == 4


def test_fresh_adapters_depend_on_the_seed_alone() -> None:
    first = adapters(adapted(a_network(), LORA, seed=1))
    network = a_network()
    torch.rand(3)
    state = torch.get_rng_state()
    again = adapters(adapted(network, LORA, seed=1))
    assert torch.equal(state, torch.get_rng_state())
    other = adapters(adapted(a_network(), LORA, seed=2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_saved_adapter_goes_on_where_it_was(saved: Path) -> None:
    network = adapted(a_network(), LORA.model_copy(update={"adapter": str(saved)}), seed=9)
    assert torch.equal(logits(network), logits(a_trained_network_like(saved)))
    assert not torch.equal(logits(network), logits(a_network()))


def a_trained_network_like(saved: Path) -> Any:
    """What peft itself makes of the directory."""
    return PeftModel.from_pretrained(a_network(), str(saved)).eval()


def test_a_saved_adapter_names_its_base(saved: Path) -> None:
    settings = json.loads((saved / CONFIG).read_text())
    assert settings["base_model_name_or_path"] == str(TINY)
    assert (settings["r"], settings["lora_alpha"], set(settings["target_modules"])) == (4, 8.0, {"q_proj", "down_proj"})


def rewrite(directory: Path, **settings: Any) -> None:
    path = directory / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"r": 8}, "r=8"),
        ({"lora_alpha": 16}, "lora_alpha=16"),
        ({"target_modules": ["q_proj"]}, "target_modules"),
        ({"target_modules": "all-linear"}, "all-linear"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "IA3"),
    ],
    ids=str,
)
def test_an_adapter_of_other_settings_is_refused_by_their_name(
    saved: Path, settings: dict[str, Any], named: str
) -> None:
    rewrite(saved, **settings)
    with pytest.raises(ConfigError, match=named):
        adapted(a_network(), LORA.model_copy(update={"adapter": str(saved)}), seed=1)


@pytest.mark.parametrize("missing", [CONFIG, WEIGHTS, ""])
def test_an_adapter_that_is_not_there_is_never_a_fresh_start(saved: Path, missing: str) -> None:
    directory = saved if missing else saved / "nowhere"
    if missing:
        (saved / missing).unlink()
    with pytest.raises(ConfigError, match=r"model\.lora\.adapter.*expected a directory with"):
        adapted(a_network(), LORA.model_copy(update={"adapter": str(directory)}), seed=1)


def truncate(directory: Path) -> None:
    whole = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def scribble(directory: Path) -> None:
    (directory / CONFIG).write_text("{")


@pytest.mark.parametrize("damage", [truncate, scribble])
def test_a_torn_adapter_is_refused(saved: Path, damage: Any) -> None:
    damage(saved)
    with pytest.raises(CheckpointError, match=r"cannot be read|no JSON"):
        adapted(a_network(), LORA.model_copy(update={"adapter": str(saved)}), seed=1)


def test_an_adapter_of_another_model_is_refused(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no adapter of this model: .*layers\.1.* is None there"):
        adapted(a_network(layers=2), LORA.model_copy(update={"adapter": str(saved)}), seed=1)


@pytest.mark.parametrize("target", ["q_prj", "lm_head", "embed_tokens"])
def test_a_target_that_is_no_linear_layer_below_the_head_is_refused(target: str) -> None:
    lora = LORA.model_copy(update={"targets": ("q_proj", target)})
    with pytest.raises(RollcallError, match=target):
        adapted(a_network(), lora, seed=1)


SIZE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MIXTURES: dict[str, dict[str, Any]] = {
    "glm4_moe": ROUTED,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 1},
    "deepseek_v3": ROUTED | LATENT,
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "qwen3_moe": EXPERTS | {"num_experts": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def a_mixture(family: str) -> Any:
    config = AutoConfig.for_model(family, **SIZE, **HEADS, pad_token_id=0, **MIXTURES[family])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", MIXTURES)
def test_adapters_on_experts_are_refused_with_the_targets_that_work(family: str) -> None:
    """The default targets name shared or dense layers in some of these models, and the experts too."""
    attention = "o_proj" if family == "deepseek_v3" else "q_proj,k_proj,v_proj,o_proj"
    lora = LoraConfig(rank=4)
    with pytest.raises(ConfigError, match=rf"outside of the experts.*set model\.lora\.targets=\[{attention}\]"):
        add_adapters(a_mixture(family), lora)
    working = add_adapters(a_mixture(family), lora.model_copy(update={"targets": tuple(attention.split(","))}))
    places = {name.split(".lora_")[0] for name, _ in working.named_parameters() if is_trained(name)}
    assert places
    assert all(".self_attn." in name for name in places)
