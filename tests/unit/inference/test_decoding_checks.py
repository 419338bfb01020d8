"""FP8 and speculative decoding: a server's arguments, and one line for each choice that cannot work."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.config.cross_checks import check_config
from pipeline.errors import ConfigError
from pipeline.inference.vllm.decoding_checks import check_quantization, check_quantized_experts, check_speculation
from pipeline.inference.vllm.draft_weights import SWITCH
from pipeline.inference.vllm.server_command import server_command, server_environment
from pipeline.topology.plan import Placement
from slurm.registry.run_contents import located_config
from tests.fakes.configs import make_config

HALF = {"path": "tiny_qwen3", "dtype": "bfloat16"}
GPUS = {"device": "cuda", "inference": {"gpus": 1}, "trainer": {"gpus": 1}}
PLACE = Placement(role="inference", index=0, rank=1, address="127.0.0.4", ports=(4321,))


def drafts_in(folder: Path, vocabulary: int) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": vocabulary}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return str(folder)


@pytest.fixture
def vocabulary() -> int:
    from pipeline.config.model_directory import vocabulary_size

    size = vocabulary_size(make_config(model=HALF).model)
    assert size is not None
    return size


def arguments(config: RunConfig) -> dict[str, str]:
    command = server_command(config, PLACE, None)
    names = [name for name in ("--quantization", "--speculative-config") if name in command]
    return {name: command[command.index(name) + 1] for name in names}


def test_by_default_a_server_neither_quantizes_nor_drafts() -> None:
    config = make_config()
    assert arguments(config) == {}
    variables = server_environment(config, PLACE, Path("/world"))
    assert variables[SWITCH] == "0"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in variables, "vLLM chooses"
    check_quantization(config)
    check_speculation(config)


def test_fp8_is_an_argument_of_servers_on_gpus() -> None:
    config = make_config(model=HALF, resources=GPUS, inference={"quantization": "fp8"})
    check_quantization(config)
    assert arguments(config) == {"--quantization": "fp8_per_channel"}


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"model": HALF}, "none on CPUs, where vLLM has no kernels for it"),
        ({"model": {"path": "tiny_qwen3"}, "resources": GPUS}, "set model.dtype=bfloat16"),
        ({"model": HALF | {"lora": {"rank": 8}}, "resources": GPUS}, "model.lora.merge=true"),
    ],
    ids=["on CPUs", "in float32", "with adapters"],
)
def test_fp8_that_cannot_work_is_refused(sections: dict[str, Any], reason: str) -> None:
    config = make_config(**sections, inference={"quantization": "fp8"})
    with pytest.raises(ConfigError, match=r"inference\.quantization") as refused:
        check_quantization(config)
    assert reason in str(refused.value)


def test_fp8_of_a_mixture_is_refused() -> None:
    config = make_config(model=HALF, resources=GPUS, inference={"quantization": "fp8"})
    check_quantized_experts(config, 0)
    with pytest.raises(ConfigError, match="a model with experts"):
        check_quantized_experts(config, 8)


def test_drafts_by_lookup_are_one_argument() -> None:
    keys = {"method": "ngram", "tokens": 5, "lookup_min": 1, "lookup_max": 3}
    config = make_config(inference={"speculation": keys})
    check_speculation(config)
    expected = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    assert json.loads(arguments(config)["--speculative-config"]) == expected


def test_a_drafting_model_is_loaded_from_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocabulary: int
) -> None:
    drafts_in(tmp_path / "small", vocabulary)
    monkeypatch.chdir(tmp_path)
    config = make_config(model=HALF, inference={"speculation": {"method": "draft", "model": "small"}})
    check_speculation(config)
    located = located_config(config)
    settings = json.loads(arguments(located)["--speculative-config"])
    assert settings["model"] == str(tmp_path / "small"), "servers have another working directory"
    assert (settings["method"], settings["draft_load_config"]) == ("draft_model", {"load_format": "auto"})
    variables = server_environment(located, PLACE, Path("/world"))
    assert variables[SWITCH] == "1"
    assert variables["VLLM_USE_V2_MODEL_RUNNER"] == "0", "the second model runner would leave the weights random"


@pytest.mark.parametrize(
    ("keys", "others", "reason"),
    [
        ({"method": "draft"}, {}, "the directory of a smaller model"),
        ({"method": "draft", "model": "/no/such/place"}, {}, "config.json"),
        ({"method": "ngram", "lookup_min": 5}, {}, "at most lookup_max, which is 4"),
        ({"method": "ngram"}, {"training": {"routing_replay": "rollout"}}, "none with training.routing_replay"),
        ({"method": "draft", "model": "small"}, {"model": HALF | {"lora": {"rank": 8}}}, "set method=ngram"),
    ],
    ids=["no model", "no such model", "window", "routing", "adapters"],
)
def test_drafts_that_cannot_be_made_are_refused(keys: dict[str, Any], others: dict[str, Any], reason: str) -> None:
    config = make_config(**{"model": HALF} | others, inference={"speculation": keys})
    with pytest.raises(ConfigError, match=r"inference\.speculation") as refused:
        check_speculation(config)
    assert reason in str(refused.value)


@pytest.mark.parametrize("keys", [{"tokens": 2}, {"model": "small"}, {"method": "ngram", "model": "small"}])
def test_a_key_of_another_method_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"inference\.speculation\.(tokens|model)"):
        check_config(make_config(inference={"speculation": keys}))


def test_a_drafting_model_of_another_vocabulary_is_refused(tmp_path: Path, vocabulary: int) -> None:
    small = drafts_in(tmp_path / "small", vocabulary + 1)
    config = make_config(model=HALF, inference={"speculation": {"method": "draft", "model": small}})
    with pytest.raises(ConfigError, match=rf"vocabulary of {vocabulary} tokens \(it has {vocabulary + 1}\)"):
        check_speculation(config)
