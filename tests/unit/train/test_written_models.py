"""The directory of a trained model: whatever was loaded can be written, says its own type, and holds no old weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config import LoraConfig, ModelConfig
from pipeline.config.model_directory import BUILT_IN
from pipeline.errors import ConfigError
from pipeline.inference.weight_sync.transports.gloo import WeightLayout
from pipeline.train.model.hf_export import refuse_unwritable, write_model
from pipeline.train.model.models import build_model
from tests.support.models.written import whole_blocks

GREEDY = {"do_sample": False, "temperature": 0.6, "top_p": 0.9}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model directory with weights in bfloat16, as they are published."""
    directory = shutil.copytree(BUILT_IN / "tiny_qwen3", tmp_path / "base")
    config = AutoConfig.from_pretrained(directory, num_hidden_layers=1, layer_types=["full_attention"])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    return directory


def amend(file: Path, **keys: Any) -> None:
    tree = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(tree | keys))


def written(base: Path, dtype: str = "bfloat16") -> Path:
    """The directory that the policy of `base` becomes, without a step."""
    config = ModelConfig(path=str(base), dtype=dtype)  # type: ignore[arg-type]
    network = build_model(config, 0).network
    tensors = {name: p.detach().to(getattr(torch, dtype)) for name, p in network.named_parameters()}
    refuse_unwritable(network, config)
    write_model(base.parent / "written", network, WeightLayout.of(tensors.items()), whole_blocks(tensors), config)
    return base.parent / "written"


def settings(directory: Path, file: str = "config.json") -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((directory / file).read_text())
    return tree


def test_settings_of_sampling_that_transformers_would_not_save_stay_as_they_are(base: Path) -> None:
    amend(base / "generation_config.json", **GREEDY)
    assert settings(written(base), "generation_config.json") == GREEDY


def test_settings_of_sampling_may_lie_in_the_config_as_in_older_models(base: Path) -> None:
    amend(base / "config.json", temperature=0.6)
    found = written(base)
    assert settings(found, "generation_config.json")["temperature"] == 0.6
    AutoModelForCausalLM.from_pretrained(found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_config_says_the_type_of_the_weights_beside_it(base: Path, dtype: str) -> None:
    found = written(base, dtype)
    assert {str(tensor.dtype) for tensor in load_file(found / "model.safetensors").values()} == {f"torch.{dtype}"}
    assert settings(found)["dtype"] == dtype
    same = {key: value for key, value in settings(base).items() if key != "dtype"}
    assert {key: value for key, value in settings(found).items() if key != "dtype"} == same


def test_a_config_with_both_names_of_the_type_says_one_type(base: Path) -> None:
    amend(base / "config.json", dtype="float16", torch_dtype="float16")
    found = settings(written(base))
    assert found["dtype"] == found["torch_dtype"] == "bfloat16"
    assert AutoConfig.from_pretrained(base.parent / "written").dtype == torch.bfloat16


def test_weights_in_another_form_are_not_copied_beside_the_trained_ones(base: Path) -> None:
    for name in ("consolidated.00.pth", "model-q4.gguf", "pytorch_model.bin", "model.safetensors.index.json"):
        (base / name).write_bytes(b"old")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    names = {file.name for file in written(base).iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"} | {
        file.name for file in (BUILT_IN / "tiny_qwen3").iterdir() if file.name != "config.json"
    }


@pytest.mark.parametrize("rank", [0, 2])
def test_what_could_not_be_written_at_the_end_is_refused(
    base: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(path=str(base), lora=LoraConfig(rank=rank))
    network = build_model(config, 0).network

    def deny(source: Path, target: Path) -> None:
        raise PermissionError(f"{source} belongs to another")

    monkeypatch.setattr(shutil, "copy2", deny)
    with pytest.raises(ConfigError, match=r"model\.path.*can be exported.*belongs to another"):
        refuse_unwritable(network, config)
