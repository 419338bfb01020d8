"""The policy's parts: what may be built, chunked log-probabilities, the schedule of the learning rate."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING

from pipeline.config import LoraConfig, ModelConfig, OptimConfig
from pipeline.errors import ConfigError, TrainingError
from pipeline.train.model import lm_head, models, supported_architectures
from pipeline.train.model.lm_head import head_logprobs
from pipeline.train.model.logit_rule import LogitRule
from pipeline.train.model.optimizer import learning_rate
from pipeline.train.model.recomputation import recompute_activations
from pipeline.train.worker_spec import ModelKind
from tests.support.models.tiny import write_tiny


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_place_that_many_tokens_follow_has_the_same_gradient_every_time(threads: int, tmp_path: Path) -> None:
    """Several threads that add to one place as they come would round otherwise each time."""
    policy = build_one(tmp_path, "qwen3", hidden_size=128)
    tokens_BT = torch.arange(600)[None] % 17
    before_N, targets_N = torch.arange(4096) % 5, torch.arange(4096) % 17
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        gradients = []
        for _ in range(6):
            policy.zero_grad()
            logprobs_N, _ = policy(tokens_BT, torch.arange(600)[None], None, before_N, targets_N, 1.0, False)
            (logprobs_N * torch.linspace(0, 1, 4096)).sum().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(gradients[0], other) for other in gradients)


SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 17}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def build_one(folder: Path, model_type: str, kind: ModelKind = "policy", **keys: Any) -> models.DecoderModel:
    tree = {"model_type": model_type, **SIZE, **HEADS, **TOKENS, **keys}
    (folder / "config.json").write_text(json.dumps(tree))
    return models.build_model(ModelConfig(path=str(folder), init="random"), 0, kind)


@pytest.mark.parametrize(
    ("model_type", "keys", "named"),
    [
        ("gemma2", {}, "attn_logit_softcapping=50"),
        ("phi", {}, "lm_head.bias"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, r"not quantized \(mxfp4\)"),
    ],
)
def test_a_model_whose_logits_would_be_wrong_is_refused(
    tmp_path: Path, model_type: str, keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        build_one(tmp_path, model_type, **keys)


def test_attention_over_compressed_tokens_is_refused_before_the_network_is_built(tmp_path: Path) -> None:
    CONFIG_MAPPING["deepseek_v4"]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"deepseek_v4 with compress_rates, .* expected a model with plain causal"):
        models.build_on_meta(ModelConfig(path=str(tmp_path), init="random", max_length=8))


@pytest.mark.parametrize("family", ["emu3", "clip"])
def test_a_family_whose_text_model_transformers_does_not_load_is_refused_by_name(tmp_path: Path, family: str) -> None:
    CONFIG_MAPPING[family]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"model\.path='{family}': expected a family that transformers'"):
        models.build_on_meta(ModelConfig(path=str(tmp_path), init="random", max_length=8))


def test_a_head_that_no_key_tells_of_is_noticed_by_its_logits(tmp_path: Path) -> None:
    network = build_one(tmp_path, "llama").network
    network.lm_head.register_forward_hook(lambda module, given, logits: 2 * logits)
    with pytest.raises(ConfigError, match="a custom head"):
        supported_architectures.refuse_unsupported(network)


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": 3.0}),
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {"logit_scale": 0.25}),
        ("falcon_h1", {"lm_head_multiplier": 0.5}),
    ],
)
def test_scaled_and_capped_logits_are_those_of_transformers(
    tmp_path: Path, model_type: str, keys: dict[str, Any]
) -> None:
    policy = build_one(tmp_path, model_type, **keys).double().eval()
    with torch.no_grad():
        policy.head_weight.mul_(20)
        tokens = torch.arange(2, 9)[None]
        positions = torch.arange(7)[None]
        logits = policy.network(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
        logprobs, _ = policy(tokens, positions, None, torch.arange(6), tokens[0, 1:], 0.7, False)
    expected = (logits / 0.7).log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("entries", [1 << 26, 90])
@pytest.mark.parametrize("rule", [LogitRule(cap=2.0), LogitRule(scale=0.3), LogitRule(scale=0.3, cap=2.0)])
def test_the_slopes_of_scaled_and_capped_logits_are_those_of_their_formula(
    rule: LogitRule, entries: int, with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_head, "CHUNK", entries)
    targets = torch.tensor([0, 3, 2, 2, 1, 4, 0])

    def answer(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = head_logprobs(hidden, weight, targets, 0.7, with_entropy, rule)
        return tuple(each for each in outputs if each is not None)

    inputs = draw(7, 6).requires_grad_(), draw(50, 6, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(answer, inputs)


@pytest.mark.parametrize(
    "model_type", ["qwen2", "qwen3", "llama", "mistral", "phi3", "olmo2", "granite", "gemma3_text"]
)
def test_a_plain_model_is_built_and_ready_to_train(tmp_path: Path, model_type: str) -> None:
    assert build_one(tmp_path, model_type).training


def test_a_critic_has_a_decoder_without_a_vocabulary_head(tmp_path: Path) -> None:
    critic = build_one(tmp_path, "qwen3", "critic", tie_word_embeddings=False)
    policy = build_one(tmp_path, "qwen3", tie_word_embeddings=False)
    whole, own = ({name for name, _ in each.named_parameters()} for each in (policy, critic))
    decoder = {name.replace("network.model.", "network.") for name in whole - {"network.lm_head.weight"}}
    assert own == decoder | {"head.weight", "head.bias"}


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_is_looked_up_and_a_head_is_multiplied(tmp_path: Path, tied: bool) -> None:
    """Per layer: query and output 2·(16·16), key and value 2·(16·8), three matrices of 16·32; a head of 17·16."""
    layer = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32
    policy = build_one(tmp_path, "qwen3", tie_word_embeddings=tied)
    critic = build_one(tmp_path, "qwen3", "critic", tie_word_embeddings=tied)
    assert [sum(p.numel() for p in model.multiplied()) for model in (policy, critic)] == [layer, layer]
    assert (policy.head_weight.numel(), critic.head_weight.numel()) == (17 * 16, 16)


def test_a_token_costs_the_experts_that_it_is_sent_to(tmp_path: Path) -> None:
    mixture = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}
    path = write_tiny(tmp_path / "mixture", model_type="qwen3_moe", **mixture)
    built = models.build_on_meta(ModelConfig(path=str(path), init="random"), "policy")
    attention = 32 * 2 * 16 + 2 * 32 * 16 + 2 * 16 * 32  # two heads of 16, one of keys and one of values
    dense, expert, router = 3 * 32 * 48, 3 * 32 * 24, 32 * 16
    assert built.flops.token == 6 * (2 * attention + dense + 2 * expert + router)
    assert built.flops.prediction == 6 * 17 * 32


def test_a_critic_with_adapters_is_refused(tmp_path: Path) -> None:
    build_one(tmp_path, "qwen3")
    config = ModelConfig(path=str(tmp_path), init="random", lora=LoraConfig(rank=2))
    with pytest.raises(TrainingError, match=r"model\.lora\.rank of its spec must be 0"):
        models.build_model(config, 0, "critic")


def test_layers_that_cannot_be_computed_again_are_refused(tmp_path: Path) -> None:
    policy = build_one(tmp_path, "qwen3")
    policy.decoder.supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match=r"training\.activation_checkpointing.*Qwen3Model"):
        recompute_activations(policy, "full")


class Largest(TorchDispatchMode):
    """Watches for the largest tensor that any operation makes on the CPU."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.is_cpu:
                self.entries = max(self.entries, tensor.numel())
        return made


@pytest.mark.parametrize("with_entropy", [True, False])
def test_no_more_logits_than_a_chunk_exist_at_a_time(with_entropy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 tokens of 6 numbers, 50 words: 10,000 logits, of which at most 1,000 at a time."""
    monkeypatch.setattr(lm_head, "CHUNK", 1000)
    hidden, weight = draw(200, 6).requires_grad_(), draw(50, 6, seed=1).requires_grad_()
    with Largest() as forward:
        logprobs, entropy = head_logprobs(hidden, weight, torch.arange(200) % 50, 1.0, with_entropy)
    with Largest() as backward:
        (logprobs.sum() + (entropy.sum() if entropy is not None else 0)).backward()
    assert forward.entries == 1000
    assert backward.entries == 200 * 6


def test_chunks_change_neither_log_probabilities_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = torch.tensor([0, 3, 2, 2, 1, 4, 0])
    results = []
    for entries in (1 << 26, 10):
        monkeypatch.setattr(lm_head, "CHUNK", entries)
        hidden, weight = draw(7, 6).requires_grad_(), draw(5, 6, seed=1).requires_grad_()
        logprobs, entropy = head_logprobs(hidden, weight, targets, 0.7, with_entropy=True)
        assert entropy is not None
        (logprobs.sum() + entropy.square().sum()).backward()
        results.append((logprobs, entropy, hidden.grad, weight.grad))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole)


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("entries", [1 << 26, 90])
def test_the_slopes_of_the_head_are_those_of_its_formula(
    with_entropy: bool, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_head, "CHUNK", entries)
    targets = torch.tensor([0, 3, 2, 2, 1, 4, 0])

    def answer(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each for each in head_logprobs(hidden, weight, targets, 0.7, with_entropy) if each is not None)

    inputs = draw(7, 6).requires_grad_(), draw(50, 6, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(answer, inputs)


@pytest.mark.parametrize("signs", ["mixed", "alike"])
def test_gradients_of_many_chunks_are_rounded_once(signs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over 64 chunks in 16 bits would be off by a percent; one rounding of each entry is off by a fifth of one."""
    hidden, weight = draw(1024, 16), draw(64, 16, seed=1) * 0.2
    hidden[:, 0] += 1  # hidden states have a mean, and so have the gradients of chunks
    given = hidden.bfloat16(), weight.bfloat16()
    slopes = draw(1024, seed=2) if signs == "mixed" else torch.ones(1024, dtype=torch.float64)

    def gradient(dtype: torch.dtype, chunk: int) -> torch.Tensor:
        monkeypatch.setattr(lm_head, "CHUNK", chunk)
        leaf = given[1].to(dtype).requires_grad_()
        logprobs, _ = head_logprobs(given[0].to(dtype), leaf, torch.arange(1024) % 64, 1.0)
        (logprobs * slopes.to(logprobs.dtype)).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.double()

    exact = gradient(torch.float64, 1 << 26)
    error = (gradient(torch.bfloat16, 16 * 64) - exact).norm() / exact.norm()
    assert error < 0.0025


@pytest.mark.parametrize("entries", [1 << 26, 10])
def test_a_head_without_tokens_has_gradients_of_zero(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "CHUNK", entries)
    hidden, weight = draw(0, 6).requires_grad_(), draw(5, 6, seed=1).requires_grad_()
    logprobs, _ = head_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), 1.0)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape
    assert not weight.grad.any()


def test_the_head_computes_in_float32_whatever_it_is_given() -> None:
    hidden, weight = draw(2, 6).bfloat16(), draw(5, 6, seed=1).bfloat16()
    logprobs, _ = head_logprobs(hidden, weight, torch.tensor([1, 2]), 1.0)
    expected = (hidden.float() @ weight.float().T).log_softmax(-1)[[0, 1], [1, 2]]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected)


def test_the_product_of_sixteen_bits_on_cuda_is_that_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product itself is CUDA's; here float32 units stand in for it. Its gradients are rounded to 16 bits once."""
    results = []
    for wide in (True, False):
        monkeypatch.setattr(lm_head, "_has_wide_product", lambda hidden, wide=wide: wide)
        monkeypatch.setattr(lm_head, "_wide", lambda left, right: left.float() @ right.float())
        hidden, weight = draw(5, 6).bfloat16().requires_grad_(), draw(7, 6, seed=1).bfloat16().requires_grad_()
        logprobs, entropy = head_logprobs(hidden, weight, torch.tensor([1, 2, 0, 6, 5]), 0.7, True)
        assert entropy is not None
        (logprobs.sum() + entropy.sum()).backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        results.append((logprobs, entropy, hidden.grad.float(), weight.grad.float()))
    (logprobs, entropy, *gradients), (same, alike, *exact) = results
    assert torch.equal(logprobs, same)
    assert torch.equal(entropy, alike)
    for near, right in zip(gradients, exact, strict=True):
        assert (near - right).norm() < 0.01 * right.norm()


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
