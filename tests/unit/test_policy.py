"""The policy's parts: attention inside rows, chunked log-probabilities, the schedule of the learning rate."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import ModelConfig, OptimConfig
from pipeline.errors import ConfigError
from pipeline.training import model
from pipeline.training.attention import Segments, attend
from pipeline.training.model import head_logprobs
from pipeline.training.optimizer import learning_rate

LENGTHS = (3, 1, 5)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("window", [None, 1, 2, 100])
def test_a_packed_row_attends_as_if_it_were_alone(window: int | None) -> None:
    query, key, value = draw(1, 4, 9, 8), draw(1, 2, 9, 8, seed=1), draw(1, 2, 9, 8, seed=2)
    segments = Segments.of(LENGTHS, torch.device("cpu"))
    module = torch.nn.Identity()
    packed, _ = attend(module, query, key, value, None, segments=segments, sliding_window=window)
    start = 0
    for length in LENGTHS:
        part = [tensor[:, :, start : start + length] for tensor in (query, key, value)]
        alone, _ = attend(module, *part, None, sliding_window=window)
        torch.testing.assert_close(packed[:, start : start + length], alone)
        start += length


def test_a_window_hides_what_lies_further_back() -> None:
    query, key, value = draw(1, 1, 4, 8), draw(1, 1, 4, 8, seed=1), draw(1, 1, 4, 8, seed=2)
    seen, _ = attend(torch.nn.Identity(), query, key, value, None, sliding_window=1)
    torch.testing.assert_close(seen.transpose(1, 2), value)


def test_an_argument_that_attention_does_not_know_is_refused_unless_it_is_none() -> None:
    part = draw(1, 1, 4, 8)
    attend(torch.nn.Identity(), part, part, part, None, softcap=None, dropout=0.0)
    unknown: list[dict[str, Any]] = [{"softcap": 1.0}, {"s_aux": part}, {"news": False}]
    for argument in unknown:
        with pytest.raises(ConfigError, match=f"Identity with {next(iter(argument))}"):
            attend(torch.nn.Identity(), part, part, part, None, **argument)


SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 17}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def build_one(folder: Path, model_type: str, **keys: Any) -> model.Policy:
    tree = {"model_type": model_type, **SIZE, **HEADS, **TOKENS, **keys}
    (folder / "config.json").write_text(json.dumps(tree))
    return model.build(ModelConfig(path=str(folder), init="random"), seed=0)


@pytest.mark.parametrize(
    ("model_type", "keys", "named"),
    [
        ("gemma2", {}, "final_logit_softcapping=30"),
        ("gemma2", {"final_logit_softcapping": None}, "attn_logit_softcapping=50"),
        ("granite", {"logits_scaling": 8.0}, "logits_scaling=8"),
        ("cohere", {}, "logit_scale=0.0625"),
        ("phi", {}, "lm_head.bias"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "s_aux"),
    ],
)
def test_a_model_whose_logits_would_be_wrong_is_refused(
    tmp_path: Path, model_type: str, keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        build_one(tmp_path, model_type, **keys)


def test_a_head_that_no_key_tells_of_is_noticed_by_its_logits(tmp_path: Path) -> None:
    network = build_one(tmp_path, "llama").network
    network.lm_head.register_forward_hook(lambda module, given, logits: 2 * logits)
    with pytest.raises(ConfigError, match="a head of its own"):
        model.refuse_unsupported(network)


@pytest.mark.parametrize(
    "model_type", ["qwen2", "qwen3", "llama", "mistral", "phi3", "olmo2", "granite", "gemma3_text"]
)
def test_a_plain_model_is_built_and_ready_to_train(tmp_path: Path, model_type: str) -> None:
    assert build_one(tmp_path, model_type).training


def test_chunks_change_neither_log_probabilities_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = torch.tensor([0, 3, 2, 2, 1, 4, 0])
    results = []
    for entries in (1 << 26, 10):
        monkeypatch.setattr(model, "CHUNK", entries)
        hidden, weight = draw(7, 6).requires_grad_(), draw(5, 6, seed=1).requires_grad_()
        logprobs, entropy = head_logprobs(hidden, weight, targets, 0.7, with_entropy=True)
        assert entropy is not None
        (logprobs.sum() + entropy.square().sum()).backward()
        results.append((logprobs, entropy, hidden.grad, weight.grad))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole)


def test_the_head_computes_in_float32_whatever_it_is_given() -> None:
    hidden, weight = draw(2, 6).bfloat16(), draw(5, 6, seed=1).bfloat16()
    logprobs, _ = head_logprobs(hidden, weight, torch.tensor([1, 2]), 1.0)
    expected = (hidden.float() @ weight.float().T).log_softmax(-1)[[0, 1], [1, 2]]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 0.8535533905932737, 0.5, 0.1464466094067262, 0.0]),
    ],
)
def test_the_rate_warms_up_and_then_follows_its_schedule(schedule: str, rates: list[float]) -> None:
    config = OptimConfig(lr=1.0, warmup_steps=3, schedule=schedule)  # type: ignore[arg-type]
    assert [learning_rate(config, step, steps=7) for step in range(8)] == pytest.approx(rates)
