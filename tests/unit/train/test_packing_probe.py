"""Which models' rows may be packed: seen on a small copy of each architecture, never taken for granted."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from docs import families
from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from pipeline.train.model import models, packed_attention, packing_probe
from pipeline.train.model.packing_probe import TOLERANCE, measure_packing, supports_packing
from pipeline.train.model.tiny_config import shrink_config

SIZE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
STATES = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
ATTENTIVE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
}
MASKED: dict[str, dict[str, Any]] = {"doge": {}}
DRAWN: dict[str, dict[str, Any]] = {"phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2}}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": STATES,
    "mamba2": {"num_heads": 8, "expand": 2, "n_groups": 1, "state_size": 8, "chunk_size": 16},
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    packing_probe.probe_packing.cache_clear()
    yield
    packing_probe.probe_packing.cache_clear()


def settings(family: str) -> dict[str, Any]:
    return {"model_type": family, **SIZE, **HEADS, **(ATTENTIVE | RECURRENT | DRAWN | MASKED)[family]}


def a_model(directory: Path, family: str, **keys: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(settings(family) | keys))
    return ModelConfig(path=str(directory), init="random")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == packing_probe.__name__]


@pytest.mark.parametrize("family", ATTENTIVE)
def test_attention_is_kept_inside_packed_rows(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert supports_packing(a_model(tmp_path, family), requested=True)
    assert not supports_packing(a_model(tmp_path, family), requested=False)
    assert told(caplog) == []


@pytest.mark.parametrize("family", RECURRENT)
def test_a_state_that_goes_on_along_the_line_is_noticed_and_rows_are_padded(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = a_model(tmp_path, family)
    assert not supports_packing(model, requested=True)
    (warning,) = told(caplog)
    assert "rows are padded, not packed" in warning
    assert "see the row before them" in warning
    assert not supports_packing(model, requested=False)
    assert len(told(caplog)) == 1, "who asked for padding is not warned"


def test_a_model_that_is_wrong_padded_too_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention without its window, for a model that was trained with one."""
    plain = packed_attention._attend
    monkeypatch.setattr(
        packed_attention, "_attend", lambda q, k, v, options: plain(q, k, v, options._replace(window=None))
    )
    with pytest.raises(ConfigError, match=r"model\.path.*wrong by .* nats"):
        supports_packing(a_model(tmp_path, "mistral"), requested=False)


def test_a_mask_that_a_model_passes_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path.*DogeAttention with attention_mask"):
        supports_packing(a_model(tmp_path, "doge"), requested=False)


def test_a_vector_that_starts_at_zero_has_a_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of Doge, ignored: it is learned, and of a new model it is zero."""
    monkeypatch.setattr(packed_attention, "_IGNORED", packed_attention._IGNORED | {"attention_mask"})
    with pytest.raises(ConfigError, match=r"model\.path.*wrong by .* nats"):
        supports_packing(a_model(tmp_path, "doge", keep_window_size=4096), requested=False)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_what_changes_with_the_longest_row_of_a_batch_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rope_type: str
) -> None:
    """Frequencies are chosen once for all rows; as transformers chooses them, rows of few tokens show nothing, unless
    a few tokens are many."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]} if rope_type == "longrope" else {}
    model = a_model(tmp_path, "llama", max_position_embeddings=16384, rope_parameters=rope)
    assert supports_packing(model, requested=True)
    packing_probe.probe_packing.cache_clear()
    monkeypatch.setattr(models, "fix_frequencies", lambda network, max_length: None)
    with pytest.raises(ConfigError, match=r"model\.path.*wrong by .* nats"):
        supports_packing(model, requested=True)


def test_a_model_that_draws_its_experts_while_it_is_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path.*wrong by .* nats"):
        supports_packing(a_model(tmp_path, "phimoe"), requested=False)


def test_a_model_that_answers_at_random_is_refused_though_its_first_answers_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right with the seeds 0, 1 and 2, and off by a nat with 3."""
    plain = packing_probe._logprobs
    monkeypatch.setattr(packing_probe, "_logprobs", lambda *given: plain(*given) + (torch.rand(()) < 0.1))
    with pytest.raises(ConfigError, match=r"wrong by 1 nats"):
        supports_packing(a_model(tmp_path, "llama"), requested=False)


def test_what_cannot_be_seen_is_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(config: Any, size: str) -> Any:
        raise ValueError(f"{size} heads do not fit")

    monkeypatch.setattr(packing_probe, "shrink_config", broken)
    assert not supports_packing(a_model(tmp_path, "llama"), requested=True)
    (warning,) = told(caplog)
    assert "could not be shown" in warning
    assert "cut heads do not fit" in warning


def test_each_architecture_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model(tmp_path, "llama")
    supports_packing(model, requested=True)
    monkeypatch.setattr(packing_probe, "measure_packing", None)
    assert supports_packing(model, requested=True)


@pytest.mark.parametrize(
    ("family", "kinds", "layers"),
    [("qwen3", 1, 1), ("qwen3_next", 2, 4), ("deepseek_v3", 2, 4), ("gemma3_text", 2, 6)],
)
def test_a_small_copy_has_every_kind_of_layer(family: str, kinds: int, layers: int) -> None:
    """Three linear layers and one of attention; three dense ones and one of experts; five with a window and one
    without."""
    config = CONFIG_MAPPING[family]()
    copy = shrink_config(config, "narrow")
    assert copy.num_hidden_layers == layers < config.num_hidden_layers
    types = getattr(copy, "layer_types", None) or []
    sparse = [layer >= config.first_k_dense_replace for layer in range(layers)] if family == "deepseek_v3" else types
    assert len(set(sparse)) == kinds
    assert copy.vocab_size == 64
    if family == "gemma3_text":
        assert copy.sliding_window == 4


def test_a_small_copy_has_a_layer_where_a_config_counts_halves_of_layers() -> None:
    assert shrink_config(CONFIG_MAPPING["longcat_flash"](), "narrow").num_layers == 1


def test_a_small_copy_has_a_small_vocabulary_for_each_layer_too() -> None:
    copy = shrink_config(CONFIG_MAPPING["gemma4_text"](), "wide")
    assert copy.vocab_size_per_layer_input == copy.vocab_size == 64


def test_a_small_copy_keeps_the_heads_that_single_layers_have() -> None:
    config = CONFIG_MAPPING["gemma4_text"](num_global_key_value_heads=1, attention_k_eq_v=True)
    copy = shrink_config(config, "narrow")
    full = copy.per_layer_config["full_attention"]
    sliding = copy.per_layer_config["sliding_attention"]
    assert (full.head_dim, sliding.head_dim) == (512, 256)
    assert (full.num_attention_heads, sliding.num_attention_heads) == (4, 4)
    assert (full.num_key_value_heads, sliding.num_key_value_heads) == (1, 2)
    assert config.per_layer_config["full_attention"].num_attention_heads == 8, "the model's own config is as it was"
    assert type(config).from_dict(copy.to_dict()).num_hidden_layers == copy.num_hidden_layers


def test_every_way_of_a_measure_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention across packed rows, seen by the packed way alone."""
    monkeypatch.setattr(
        packed_attention, "_attend_packed", lambda *given: packed_attention._attend(*given[:3], *given[4:])
    )
    config = CONFIG_MAPPING["qwen3"](**SIZE, **HEADS)
    found = measure_packing(config)
    assert found.packed > 10 * TOLERANCE
    assert found.padded < TOLERANCE / 100


@pytest.mark.trial  # all architectures of transformers: two minutes, and they change with its release alone
def test_the_page_of_families_says_what_is_seen() -> None:
    torch.manual_seed(0)
    logging.disable(logging.NOTSET)
    assert families.main(["--check"]) == 0
