"""The shapes of large public models, as in their config.json: what the arithmetic of memory needs, and no more."""

from typing import Any

_QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}
LARGER_SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": _QWEN3_MOE
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "Qwen3-235B-A22B": _QWEN3_MOE
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    },
}
"""By the model's name; sizes from the public config.json of each."""
