"""Recomputed activations: the same gradients, and which operations are computed a second time."""

from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config import ModelConfig
from pipeline.config.training_keys import Recomputation
from pipeline.train.model.model_size import sizes_of
from pipeline.train.model.models import PolicyModel, build_model
from pipeline.train.model.recomputation import recompute_activations
from tests.support.models.tiny import write_tiny

HEADS = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": HEADS,
    "mixture": HEADS
    | {"model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2},
}
LAYERS, TOKENS = 2, 24
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
RECOMPUTED: dict[str, dict[Recomputation, dict[str, int]]] = {
    "dense": {"none": {}, "selective": {}, "full": {ATTENTION: 1, "aten::mm": 6}},
    # Four products of attention and the router's; the first product of the experts and the second, which is wide and
    # cheap. The products of a dense layer lack the last: no gradient needs its output.
    "mixture": {
        "none": {},
        "selective": {"aten::_grouped_mm": 1},
        "full": {ATTENTION: 1, "aten::mm": 5, "aten::_grouped_mm": 2},
    },
}
"""The operations of a layer's forward pass that a backward pass repeats."""


class Operations(TorchDispatchMode):
    """Counts attention and products, and the bytes of the outputs of some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name in (ATTENTION, "aten::mm", "aten::_grouped_mm"):
            self.calls[name] += 1
            self.bytes[name] += sum(part.nbytes for part in (output if isinstance(output, tuple) else (output,)))
        return output


def model_of(folder: Path, kind: str, **changed: Any) -> tuple[ModelConfig, PolicyModel]:
    config = ModelConfig(path=str(write_tiny(folder, **SHAPES[kind] | changed)), init="random")
    policy = build_model(config, seed=0)
    assert isinstance(policy, PolicyModel)
    return config, policy


def half(config: ModelConfig) -> ModelConfig:
    return config.model_copy(update={"dtype": "bfloat16"})


def forward(policy: PolicyModel, tokens: int = TOKENS) -> Tensor:
    tokens_BT, positions_BT = torch.arange(tokens)[None] % 17, torch.arange(tokens)[None]
    output = policy.decoder(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False).last_hidden_state
    return output.float().square().sum()


def gradients(policy: PolicyModel) -> list[Tensor]:
    return [p.grad for p in policy.decoder.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", SHAPES)
def test_gradients_are_equal_and_selective_repeats_neither_attention_nor_expensive_products(
    kind: str, tmp_path: Path
) -> None:
    found: dict[str, tuple[list[Tensor], Counter[str]]] = {}
    for mode in get_args(Recomputation):
        _, policy = model_of(tmp_path / mode, kind)
        recompute_activations(policy, mode)
        loss = forward(policy)
        with Operations() as backward:
            loss.backward()
        found[mode] = gradients(policy), backward.calls
    expected, once = found["none"]
    for mode, repeated in RECOMPUTED[kind].items():
        assert all(torch.equal(one, other) for one, other in zip(found[mode][0], expected, strict=True))
        assert found[mode][1] - once == {name: LAYERS * count for name, count in repeated.items()}


@pytest.mark.parametrize("kind", SHAPES)
def test_the_outputs_that_selective_keeps_are_counted_without_numbers(kind: str, tmp_path: Path) -> None:
    config, policy = model_of(tmp_path, kind)
    policy.to(torch.bfloat16)
    with torch.no_grad(), Operations() as operations:
        forward(policy)
    # Of the mixture's grouped products the first is as wide as half of the second, K × 2 × 16 numbers to K × 64.
    kept = operations.bytes[ATTENTION] + operations.bytes["aten::mm"] + operations.bytes["aten::_grouped_mm"] // 3
    assert sizes_of(half(config)).selected == kept / TOKENS
