"""The formula of FLOPs against torch's counter, and its pairs of tokens against masks."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from pipeline.config import LoraConfig, ModelConfig
from pipeline.train.model import models
from pipeline.train.model.model_flops import ModelFlops, attention_pairs, causal_pairs
from tests.support.models.tiny import write_tiny

ROWS, LENGTH, PREDICTED = 2, 64, 80
SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 8, "vocab_size": 512}
MIXTURE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "first_k_dense_replace": 8,
}


def grouped(left: Sequence[int], right: Sequence[int], *others: Any, **options: Any) -> int:
    """Operations of `grouped_mm`: each row of `left` meets one matrix."""
    return 2 * prod(left) * right[-1]


def added(total: Sequence[int], left: Sequence[int], right: Sequence[int], **options: Any) -> int:
    """Operations of a product that is added to `total`."""
    return grouped(left, right)


LEFT_OUT = {torch.ops.aten._grouped_mm: grouped, torch.ops.aten.addmm_: added}
"""Products that torch's counter leaves out."""


def build(folder: Path, rank: int = 0, **changed: Any) -> models.DecoderModel:
    path = write_tiny(folder / "model", **(SHAPE | changed))
    config = ModelConfig(path=str(path), init="random", lora=LoraConfig(rank=rank))
    return models.build_model(config, 0)


def count(policy: models.DecoderModel) -> int:
    """What torch counts of a forward and backward pass of `ROWS` rows."""
    draw = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(512, (ROWS, LENGTH), generator=draw)
    before_N, targets_N = torch.arange(PREDICTED), torch.randint(512, (PREDICTED,), generator=draw)
    counter = FlopCounterMode(display=False, custom_mapping=LEFT_OUT)
    with counter, sdpa_kernel(SDPBackend.MATH):
        logprobs_N, _ = policy(tokens_BT, torch.arange(LENGTH)[None], None, before_N, targets_N, 1.0, False)
        logprobs_N.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("tied", {}),
        ("untied", {"tie_word_embeddings": False}),
        ("adapters", {"rank": 4}),
        ("latent attention", LATENT),
        ("mixture", MIXTURE),
    ],
)
def test_flops_agree_with_torchs_counter(tmp_path: Path, name: str, changed: dict[str, Any]) -> None:
    policy = build(tmp_path, **changed)
    flops = policy.flops
    # torch counts masked pairs too: all LENGTH² of a row.
    whole = ModelFlops(flops.token, flops.prediction).of_rows([(LENGTH, 0)] * ROWS, PREDICTED)
    expected = whole + sum(flops.pairs.values()) * ROWS * LENGTH**2
    print(count(policy) / expected)
    assert count(policy) == pytest.approx(expected, rel=0.02)


def test_pairs_are_those_that_the_mask_leaves() -> None:
    for length in (0, 1, 5, 8):
        query, key = torch.arange(length)[:, None], torch.arange(length)[None]
        assert causal_pairs(length) == int((key <= query).sum())
        for window in (1, 3, 8, 20):
            assert causal_pairs(length, window) == int(((key <= query) & (query - key < window)).sum())


def test_each_row_attends_to_itself_and_computes_what_it_does_not_share() -> None:
    flops = ModelFlops(token=10.0, prediction=3.0, pairs={0: 2.0, 4: 1.0})
    assert flops.of_rows([], 0) == 0.0
    # All pairs of 6 tokens are 21; 18 of them at most 4 tokens back.
    assert flops.of_rows([(6, 0)], 5) == 10 * 6 + 3 * 5 + 2 * 21 + 18
    assert flops.of_rows([(6, 0), (6, 4)], 7) == 10 * 8 + 3 * 7 + 2 * (21 + 11) + (18 + 8)


def test_windows_and_layers_without_attention_are_told_apart(tmp_path: Path) -> None:
    """Two heads of 16: 2 · 3 · 2 · (16 + 16) operations for a pair and layer."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    windows = {"num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 7, "use_sliding_window": True}
    assert build(tmp_path, **windows).flops.pairs == {0: 384.0, 7: 768.0}
    mixed = {"model_type": "qwen3_next", "num_hidden_layers": 2, "layer_types": ["linear_attention", kinds[0]]}
    settings = AutoConfig.for_model(**(SHAPE | {"num_attention_heads": 2, "head_dim": 16} | mixed))
    assert attention_pairs(settings, 2) == {0: 384.0}


def test_parts_that_no_token_passes_cost_nothing(tmp_path: Path) -> None:
    policy = build(tmp_path)
    before = policy.flops
    policy.network.tower = torch.nn.Linear(64, 64).requires_grad_(False)
    assert policy.flops == before
    policy.requires_grad_(False)
    assert (policy.flops.token, policy.flops.prediction) == (before.token * 4 / 6, before.prediction * 4 / 6)
