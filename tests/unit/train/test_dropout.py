"""A trainer draws no numbers but those that its seed and step name, so a checkpoint keeps no random state."""

from pathlib import Path

import torch
from transformers import AutoConfig

from pipeline.config import ModelConfig
from pipeline.train.model import models


def test_a_model_whose_config_asks_for_dropout_is_trained_without(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "gpt2", vocab_size=11, n_embd=8, n_layer=1, n_head=1, n_positions=16, resid_pdrop=0.5, embd_pdrop=0.5
    )
    config.save_pretrained(tmp_path)
    built = models.build_model(ModelConfig(path=str(tmp_path), init="random"), 0)
    assert built.training
    dropped = [module for module in built.modules() if isinstance(module, torch.nn.Dropout)]
    assert len(dropped) >= 3
    ones = torch.ones(64)
    assert all(torch.equal(module(ones), ones) for module in dropped)


def test_a_layer_that_keeps_a_probability_of_its_own_drops_nothing_either(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    size = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model("seed_oss", **size, **heads, **tokens, residual_dropout=0.5)
    config.save_pretrained(tmp_path)
    network = models.build_model(ModelConfig(path=str(tmp_path), init="random"), 0).network
    assert network.training
    with torch.no_grad():
        first, second = (network(torch.arange(8)[None]).logits for _ in range(2))
    assert torch.equal(first, second)
