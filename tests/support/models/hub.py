"""The config.json of models on the hub, key by key, with sizes that a test can afford.

What a preset of `conf/model` names is tried with these: a config that transformers makes of its defaults has other keys
than the hub's.

    write_hub_model(directory, "google/gemma-3-4b-it")
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def qwen3(tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **SMALL,
        **HEADS,
        **ENDS,
        "head_dim": 32,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 40960,
        "max_window_layers": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
    }


def qwen3_moe() -> dict[str, Any]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return qwen3(tied=False) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def glm4_moe() -> dict[str, Any]:
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **SMALL,
        **HEADS,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": [2, 3, 4],
        "first_k_dense_replace": 1,
        "head_dim": 32,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 0,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_qk_norm": False,
    }


def llama3(tied: bool, factor: float) -> dict[str, Any]:
    rope = {"factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **SMALL,
        **HEADS,
        "bos_token_id": 1,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": [2, 3, 4],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": rope | {"original_max_position_embeddings": 8192},
        "rope_theta": 500000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def mistral() -> dict[str, Any]:
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        **SMALL,
        **HEADS,
        **ENDS,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def phi4() -> dict[str, Any]:
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        **SMALL,
        **HEADS,
        **ENDS,
        "pad_token_id": 0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-05,
        "original_max_position_embeddings": 16384,
        "rope_scaling": None,
        "rope_theta": 250000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def phi4_mini(original: int = 4096, positions: int = 131072) -> dict[str, Any]:
    factors = {"type": "longrope", "long_factor": [1, 1, 1.5, 1.5, 2, 2, 3, 3, 5, 5, 8, 8], "short_factor": [1.0] * 12}
    return phi4() | {
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": positions,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": 0.75,
        "rope_scaling": factors,
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
    }


def gemma3_text() -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **SMALL,
        "num_hidden_layers": 6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 1,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 2],
        "final_logit_softcapping": None,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "max_position_embeddings": 32768,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 32,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 8,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def gemma3() -> dict[str, Any]:
    """Its text config leaves out what is transformers' default, the heads and the words of the 4B among it."""
    rope = {"factor": 8.0, "rope_type": "linear"}
    text = {**SMALL, **HEADS, "head_dim": 32, "model_type": "gemma3_text", "rope_scaling": rope, "sliding_window": 8}
    vision = {"hidden_size": 64, "image_size": 28, "intermediate_size": 64, "model_type": "siglip_vision_model"}
    vision |= {"num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 14, "vision_use_head": False}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 2],
        "boi_token_index": 60,
        "eoi_token_index": 61,
        "image_token_index": 62,
        "mm_tokens_per_image": 4,
        "initializer_range": 0.02,
        "text_config": text | {"num_hidden_layers": 6},
        "torch_dtype": "bfloat16",
        "vision_config": vision,
    }


def qwen3_5(tied: bool, mixture: bool = False) -> dict[str, Any]:
    kind = "qwen3_5_moe" if mixture else "qwen3_5"
    text = {**SMALL, **HEADS, "head_dim": 32, **LINEAR, "layer_types": ["linear_attention", "full_attention"]}
    if mixture:
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        text |= {"shared_expert_intermediate_size": 32, "router_aux_loss_coef": 0.001, "output_router_logits": False}
        del text["intermediate_size"]
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration" if mixture else "Qwen3_5ForConditionalGeneration"],
        "model_type": kind,
        "image_token_id": 63,
        "text_config": {"model_type": f"{kind}_text", **text, **ENDS, "tie_word_embeddings": tied},
        "tie_word_embeddings": tied,
        "video_token_id": 62,
        "vision_config": vision | {"num_position_embeddings": 16},
        "vision_start_token_id": 61,
        "vision_end_token_id": 60,
    }


def gemma4(**keys: Any) -> dict[str, Any]:
    text = {
        **SMALL,
        **HEADS,
        "num_hidden_layers": 6,
        "head_dim": 32,
        "global_head_dim": 64,
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": 8,
        "final_logit_softcapping": 30.0,
        **keys,
    }
    vision = {"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16}
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "audio_config": None,
        "text_config": text,
        "vision_config": vision,
        "boi_token_id": 60,
        "eoi_token_id": 61,
        "image_token_id": 62,
        "video_token_id": 63,
        "eos_token_id": [1],
    }


def gemma4_small() -> dict[str, Any]:
    """With embeddings for each layer, and layers that share the keys and values of others."""
    return gemma4(
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=64,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        layer_types=["sliding_attention", "full_attention"] * 3,
    )


def gemma4_moe() -> dict[str, Any]:
    return gemma4(
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    )


def smollm3() -> dict[str, Any]:
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        **SMALL,
        **HEADS,
        **ENDS,
        "num_hidden_layers": 4,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * 4,
        "max_position_embeddings": 65536,
        "max_window_layers": 4,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "pad_token_id": 0,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "use_sliding_window": False,
    }


def olmo3() -> dict[str, Any]:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        **SMALL,
        **HEADS,
        "num_hidden_layers": 4,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "max_position_embeddings": 65536,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_scaling": yarn | {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0},
        "rope_theta": 500000,
        "sliding_window": 8,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def gpt_oss() -> dict[str, Any]:
    """With weights in bfloat16; those that OpenAI published are quantized, which is refused."""
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **SMALL,
        **HEADS,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 2,
        "experts_per_token": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "output_router_logits": False,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": yarn | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 8,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": qwen3(tied=True),
    "Qwen/Qwen3-1.7B": qwen3(tied=True),
    "Qwen/Qwen3-4B": qwen3(tied=True),
    "Qwen/Qwen3-8B": qwen3(tied=False),
    "Qwen/Qwen3-14B": qwen3(tied=False),
    "Qwen/Qwen3-32B": qwen3(tied=False),
    "Qwen/Qwen3-30B-A3B": qwen3_moe(),
    "Qwen/Qwen3-235B-A22B": qwen3_moe(),
    "zai-org/GLM-4.5-Air": glm4_moe(),
    "meta-llama/Llama-3.2-1B-Instruct": llama3(True, 32.0),
    "meta-llama/Llama-3.2-3B-Instruct": llama3(True, 32.0),
    "meta-llama/Llama-3.1-8B-Instruct": llama3(False, 8.0),
    "meta-llama/Llama-3.3-70B-Instruct": llama3(False, 8.0),
    "mistralai/Mistral-7B-Instruct-v0.3": mistral(),
    "microsoft/phi-4": phi4(),
    "microsoft/Phi-4-mini-instruct": phi4_mini(),
    "google/gemma-3-1b-it": gemma3_text(),
    "google/gemma-3-4b-it": gemma3(),
    "google/gemma-3-12b-it": gemma3(),
    "google/gemma-4-E2B-it": gemma4_small(),
    "google/gemma-4-E4B-it": gemma4_small(),
    "google/gemma-4-26B-A4B-it": gemma4_moe(),
    "google/gemma-4-31B-it": gemma4(attention_k_eq_v=True, num_global_key_value_heads=1),
    "Qwen/Qwen3.5-0.8B": qwen3_5(tied=True),
    "Qwen/Qwen3.5-2B": qwen3_5(tied=True),
    "Qwen/Qwen3.5-4B": qwen3_5(tied=True),
    "Qwen/Qwen3.5-9B": qwen3_5(tied=False),
    "Qwen/Qwen3.5-27B": qwen3_5(tied=False),
    "Qwen/Qwen3.5-35B-A3B": qwen3_5(tied=False, mixture=True),
    "Qwen/Qwen3.5-122B-A10B": qwen3_5(tied=False, mixture=True),
    "HuggingFaceTB/SmolLM3-3B": smollm3(),
    "allenai/Olmo-3-7B-Instruct": olmo3(),
    "allenai/Olmo-3-32B-Think": olmo3(),
    "unsloth/gpt-oss-20b-BF16": gpt_oss(),
    "long rows of Phi-4-mini": phi4_mini(original=16, positions=64),
}
"""By the name on the hub; the rest are architectures without a preset."""


def write_hub_model(path: Path, name: str) -> Path:
    """A directory as it is on the hub: that config.json, and weights of its class under the names that files have."""
    path.mkdir(parents=True, exist_ok=True)
    text = json.dumps(CONFIGS[name])
    (path / "config.json").write_text(text)
    config = AutoConfig.from_pretrained(path)
    torch.manual_seed(0)
    network = getattr(transformers, CONFIGS[name]["architectures"][0])._from_config(config, dtype=torch.float32)
    redraw(network)
    network.save_pretrained(path)
    (path / "config.json").write_text(text)
    (path / "tokenizer.json").write_text("{}")
    return path


def redraw(network: torch.nn.Module) -> None:
    """Nothing stays a one or a zero, behind which a tensor that is left out would hide."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
