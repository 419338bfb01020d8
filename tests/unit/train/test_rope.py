"""Rotary frequencies are chosen once, as the servers choose them, whatever rows a batch has."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.errors import ConfigError
from pipeline.train.model.rope import fix_frequencies

SIZE = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
ORIGINAL, POSITIONS = 16, 64
LONG = [1.0, 1.5, 2.0, 8.0]
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": LONG}
LONGROPE |= {"original_max_position_embeddings": ORIGINAL}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def a_network(rope: dict[str, Any], model_type: str = "llama", **keys: Any) -> Any:
    given = SIZE | HEADS | {"max_position_embeddings": POSITIONS, "rope_parameters": dict(rope)} | keys
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **given), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return network


def hidden(network: Any, length: int, positions: int) -> Tensor:
    """What a row of so many tokens becomes in a batch whose longest row has `positions`."""
    tokens_BT = torch.arange(2 * positions).view(2, positions) % SIZE["vocab_size"]
    with torch.no_grad():
        state: Tensor = network.model(input_ids=tokens_BT[:1, :positions], use_cache=False).last_hidden_state
    return state[0, :length]


def frequencies(factors: list[float]) -> Tensor:
    return torch.tensor([1 / (factor * 1e4 ** (2 * index / 8)) for index, factor in enumerate(factors)])


@pytest.mark.parametrize(("max_length", "factors"), [(ORIGINAL, [1.0] * 4), (ORIGINAL + 1, LONG), (POSITIONS, LONG)])
def test_longrope_has_the_long_factors_if_a_row_may_be_long_and_for_all_rows(
    max_length: int, factors: list[float]
) -> None:
    """The scaling is computed from the lengths, with either factors."""
    network = a_network(LONGROPE)
    fix_frequencies(network, max_length)
    for positions in (5, ORIGINAL, ORIGINAL + 1, POSITIONS, 5):
        hidden(network, 5, positions)
        assert torch.allclose(network.model.rotary_emb.inv_freq, frequencies(factors))
    scaling = math.sqrt(1 + math.log(POSITIONS / ORIGINAL) / math.log(ORIGINAL))
    assert network.model.rotary_emb.attention_scaling == pytest.approx(scaling)


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_a_row_does_not_depend_on_the_longest_of_its_batch(rope: dict[str, Any]) -> None:
    fixed, free = a_network(rope, max_position_embeddings=32), a_network(rope, max_position_embeddings=32)
    fix_frequencies(fixed, 32)
    short, long_ = (hidden(fixed, 5, positions) for positions in (5, 48))
    assert torch.allclose(short, long_, atol=1e-5)
    short, long_ = (hidden(free, 5, positions) for positions in (5, 48))
    assert not torch.allclose(short, long_, atol=1e-2), "transformers changes frequencies with the longest row"


def test_every_kind_of_layer_has_its_own() -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": LONGROPE}
    network = a_network(ropes, "gemma3_text", **kinds)
    fix_frequencies(network, POSITIONS)
    hidden(network, 5, 5)
    assert torch.allclose(network.model.rotary_emb.full_attention_inv_freq, frequencies(LONG))
    assert torch.allclose(network.model.rotary_emb.sliding_attention_inv_freq, frequencies([1.0] * 4))


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_more_positions_than_the_servers_have_are_refused(rope: dict[str, Any]) -> None:
    refused = rf"model\.max_length={POSITIONS + 1}: expected at most {POSITIONS}.*set model\.max_length={POSITIONS}"
    with pytest.raises(ConfigError, match=refused):
        fix_frequencies(a_network(rope), POSITIONS + 1)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        (LONGROPE | {"attention_factor": 1.0}, "attention scaling of 1 in transformers and 1.22474 in the servers"),
        (DYNAMIC | {"max_trained_positions": 32}, "max_trained_positions=32"),
    ],
)
def test_what_servers_would_compute_in_another_way_is_refused(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        fix_frequencies(a_network(rope), POSITIONS)
