"""Adapters on a small network: what they change, what is saved, and which adapters are refused."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from pipeline.config import LoraConfig, ModelConfig
from pipeline.errors import CheckpointError, ConfigError, RollcallError
from pipeline.train.model.adapter_merge import AdapterMerge
from pipeline.train.model.experts import fused_experts, use_grouped_experts
from pipeline.train.model.lora import (
    CONFIG,
    WEIGHTS,
    add_adapters,
    checkpoint_tensors,
    first_tensors,
    is_trained,
)
from tests.support.models.written import save_whole_adapter

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
    trained = [(name, p.detach()) for name, p in network.named_parameters() if is_trained(name)]
    return {key: tensor for name, p in trained for key, tensor in checkpoint_tensors(network, name, p)}


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
    save_whole_adapter(tmp_path / "adapter", adapters(a_trained_network()), ModelConfig(path=str(TINY), lora=LORA))
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

STACKED: dict[str, dict[str, Any]] = {"gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2}}
"""Families whose files hold the stacks of experts."""


def mixture_config(family: str) -> Any:
    return AutoConfig.for_model(family, **SIZE, **HEADS, pad_token_id=0, **(MIXTURES | STACKED)[family])


def a_mixture(family: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(mixture_config(family))


MATRICES = dict.fromkeys(MIXTURES, ("gate_proj", "up_proj", "down_proj")) | {"mixtral": ("w1", "w3", "w2")}
MATRICES["gpt_oss"] = ("gate_up_proj", "down_proj")
"""What a family's files call the matrices of an expert."""


@pytest.mark.parametrize("family", MIXTURES)
def test_each_matrix_of_each_expert_has_an_adapter_under_the_name_that_files_have(family: str) -> None:
    """The targets name shared or dense layers in some of these models, and the experts too."""
    targets = ("o_proj", *MATRICES[family])
    files = revert_weight_conversion(a_mixture(family), a_mixture(family).state_dict())
    wanted = {name.removesuffix(".weight") for name in files if name.split(".")[-2] in targets}
    network = a_mixture(family)
    add_adapters(network, LoraConfig(rank=4, targets=targets))
    layers = [name.removeprefix("base_model.model.").partition(".lora_")[0] for name in adapters(network)]
    assert sorted(layers) == sorted([*wanted, *wanted])
    assert any(".experts.3." in layer for layer in layers)


def a_trained_mixture(family: str) -> Any:
    """A mixture with weights and adapters on its experts that are no longer fresh."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(mixture_config(family)).eval()
    use_grouped_experts(network)
    adapted(network, mixture_lora(family), seed=1)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if is_trained(name):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return network


def mixture_lora(family: str) -> LoraConfig:
    return LoraConfig(rank=4, alpha=8.0, targets=("q_proj", *MATRICES[family]))


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")  # peft's, of its own keys
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_peft_makes_the_same_of_saved_adapters_on_experts_and_merges_them(family: str, tmp_path: Path) -> None:
    network = a_trained_mixture(family)
    lora = mixture_lora(family)
    save_whole_adapter(tmp_path, adapters(network), ModelConfig(path="base", lora=lora))
    named = dict(network.named_parameters())
    for name, tensor in first_tensors(network, lora.model_copy(update={"adapter": str(tmp_path)}), 7):
        assert torch.equal(named[name], tensor), name
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(mixture_config(family)).eval()
    plain = logits(base)
    loaded = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    torch.testing.assert_close(logits(loaded), logits(network), rtol=1e-4, atol=1e-5)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits(merged), logits(network), rtol=1e-4, atol=1e-5)
    merge = AdapterMerge(network, cast(Any, None))  # experts are merged without a group
    for own, theirs in zip(fused_experts(network), fused_experts(merged), strict=True):
        for name, stack in own.named_parameters(recurse=False):
            torch.testing.assert_close(merge(stack), theirs.get_parameter(name), rtol=1e-5, atol=1e-6)
    assert (plain - logits(network)).abs().max() > 0.01


def test_a_part_of_the_experts_layers_is_no_target() -> None:
    lora = LoraConfig(rank=4, targets=("q_proj", "down_proj"))
    with pytest.raises(ConfigError, match=r"all layers of the experts .*add gate_proj,up_proj, or set q_proj"):
        add_adapters(a_mixture("glm4_moe"), lora)


def test_a_part_of_the_stacks_of_experts_is_no_target() -> None:
    lora = LoraConfig(rank=4, targets=("q_proj", "gate_up_proj"))
    with pytest.raises(ConfigError, match=r"all layers of the experts \(gate_up_proj,down_proj\)"):
        add_adapters(a_mixture("gpt_oss"), lora)
