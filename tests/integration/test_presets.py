"""Every preset of a model is trained, exported, and loaded by transformers, and by vLLM, with the hub's own config."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import conf
from docs import families
from docs.families import KEYS
from pipeline.config import ModelConfig
from pipeline.train.batching.packing import Packing
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.loss_specs import SFT
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.model.packing_probe import supports_packing
from pipeline.train.model.tiny_config import TINY_SIZES, shrink_config
from pipeline.train.worker_spec import ModelSpec
from tests.support.models.hub import CONFIGS, redraw, write_hub_model
from tests.support.ranks.forked_ranks import run_ranks
from tests.support.ranks.worker_cases import OPTIM, world
from tests.support.servers.offline_vllm import greedily

pytestmark = pytest.mark.integration

PRESETS = {each.stem: yaml.safe_load(each.read_text()) for each in Path(conf.__file__).parent.glob("model/*.yaml")}
CLOSE = 2e-4
CLOSE_OF = {"granitemoehybrid": 5e-3}
"""Families whose rounding is coarser. This one's mamba layers make 1.6e-3 of float32's rounding, between float32 and
float64 of one row, with transformers alone; in float64 a padded row and the row alone differ by 1e-13."""
MAX_LENGTH = 32
ALIKE = {"Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B", "google/gemma-3-12b-it"} | {
    "Qwen/Qwen3-235B-A22B",
    "meta-llama/Llama-3.2-3B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct",
    "google/gemma-4-E4B-it",
    "Qwen/Qwen3.5-2B",
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.5-122B-A10B",
    "allenai/Olmo-3-32B-Think",
}
"""Those whose small config is that of another preset."""
PAGE = families.PAGE.read_text()
TRAINED = [name for name, how in re.findall(r"^\| (\S+) \| (\w+) \|", PAGE, re.M) if how in ("packed", "padded")]
"""Those that docs/families.md calls packed or padded."""
NAMES = sorted(CONFIGS.keys() - ALIKE)
SLOW = {"google/gemma-4-E2B-it", "google/gemma-4-26B-A4B-it", "google/gemma-4-31B-it"}
"""Whose code takes transformers seven seconds to import."""
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


def test_every_preset_has_a_config_here() -> None:
    paths = {preset["path"] for name, preset in PRESETS.items() if not name.startswith("tiny")}
    hub = {path for path in paths if not path.startswith("package:")}  # such a package has the config too
    assert hub <= CONFIGS.keys()
    assert {name for name in CONFIGS if "/" in name} == hub


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.trial) if each in SLOW else each for each in NAMES]
)
def test_a_model_of_the_hub_is_trained_and_transformers_loads_what_it_became(name: str, tmp_path: Path) -> None:
    run_ranks(1, train_hub_model, name, tmp_path)


@pytest.mark.trial  # all architectures that can be trained, at a few seconds each
@pytest.mark.parametrize("family", TRAINED)
def test_an_architecture_is_trained_and_transformers_loads_what_it_became(family: str, tmp_path: Path) -> None:
    run_ranks(1, train_family, family, tmp_path, seconds=500)


def a_row(length: int, seed: int) -> TrainSequence:
    tokens = np.random.default_rng(seed).integers(5, 60, length).astype(np.int32)
    return TrainSequence(tokens, (np.arange(length) > 0).astype(np.uint8))


def train_hub_model(rank: int, name: str, folder: Path) -> None:
    torch.manual_seed(0)
    write_hub_model(folder / "base", name)
    train_and_export(folder, by_length="long" in name)


def train_family(rank: int, family: str, folder: Path) -> None:
    """By its default config, small, as the check of families makes it."""
    whole = CONFIG_MAPPING[family](**KEYS.get(family, {}))
    torch.manual_seed(0)
    write_small_model(folder / "base", whole)
    train_and_export(folder, close=CLOSE_OF.get(family, CLOSE))


def write_small_model(base: Path, whole: Any) -> None:
    failed = []
    for size in TINY_SIZES:
        try:
            network = AutoModelForCausalLM.from_config(shrink_config(whole, size), dtype=torch.float32)
            redraw(network)
            logprobs_of(network.eval(), a_row(4, 0).tokens)  # some sizes can be built and not run
            network.save_pretrained(base)
            (base / "tokenizer.json").write_text("{}")
            return
        except Exception as error:  # noqa: BLE001 (any family may refuse any size, in its own way)
            failed.append(error)
    raise failed[-1]


def train_and_export(folder: Path, by_length: bool = False, close: float = CLOSE) -> None:
    """One step on the model in `base`, and what it became in `export`; with `by_length`, transformers chooses the
    frequencies by the length of each row, and cannot be compared with. `close`: nats that rounding makes."""
    base, export = folder / "base", folder / "export"
    model = ModelConfig(path=str(base), init="pretrained", max_length=MAX_LENGTH)
    how: Packing = "shared" if supports_packing(model, requested=True) else "padded"
    rows = [a_row(7, 1), a_row(24, 2), a_row(11, 3)]
    with world() as mesh:
        worker = ModelWorker(ModelSpec("policy", model, OPTIM, steps=2), mesh)
        together = answers(worker, rows, how)
        for row, answer in zip(rows, together, strict=True):
            assert np.abs(answers(worker, [row], how)[0] - answer).max() < close, "a row depends on its neighbours"
        assert np.isfinite(worker.forward_backward([Batch.of(rows)], how, SFT)["loss"])
        worker.optim_step()
        trained = answers(worker, rows, how)
        assert all(np.abs(new - old).max() > close for new, old in zip(trained, together, strict=True))
        worker.save_hf_model(export)
    compare_directories(base, export)
    network = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32, attn_implementation="eager").eval()
    for row, answer in zip(rows, trained, strict=True):
        assert by_length or np.abs(logprobs_of(network, row.tokens) - answer[1:]).max() < close


def answers(worker: ModelWorker, rows: list[TrainSequence], how: Packing) -> list[NDArray[np.float32]]:
    return worker.forward([Batch.of(rows)], how)


def compare_directories(base: Path, export: Path) -> None:
    """The same tensors, those that no row reaches unchanged, and the same settings but for the type."""
    old, new = (load_file(each / "model.safetensors") for each in (base, export))
    assert old.keys() == new.keys()
    towers = [key for key in old if "vision" in key or "visual" in key]
    assert all(torch.equal(old[key], new[key]) for key in towers)
    layers = [key for key in old if ".layers." in key and key not in towers]
    assert any(not torch.equal(old[key], new[key]) for key in layers)
    assert untyped(base) == untyped(export)


def untyped(directory: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return {key: value for key, value in tree.items() if key not in ("dtype", "torch_dtype")}


def logprobs_of(network: Any, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    given = torch.from_numpy(tokens).long()
    with torch.no_grad():
        logprobs = network(input_ids=given[None], use_cache=False).logits[0].log_softmax(-1)
    found: NDArray[np.float32] = logprobs[:-1].gather(1, given[1:, None])[:, 0].numpy()
    return found


@pytest.mark.trial  # vLLM starts once for each, in half a minute
@pytest.mark.parametrize("name", NAMES)
def test_vllm_serves_what_a_model_of_the_hub_became(name: str, tmp_path: Path) -> None:
    if "vision_config" in CONFIGS[name]:
        pytest.importorskip("torchvision", reason="vLLM needs it for a model with a vision tower: docs/families.md")
    run_ranks(1, train_hub_model, name, tmp_path)
    served = greedily(tmp_path / "export", PROMPTS, MAX_LENGTH)
    rows = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, served, strict=True)]
    run_ranks(1, answer_about, tmp_path, rows)
    for (_, logprobs), whole in zip(served, json.loads((tmp_path / "truth.json").read_text()), strict=True):
        assert np.abs(np.array(logprobs) - whole[-len(logprobs) :]).max() < CLOSE


def answer_about(rank: int, folder: Path, rows: list[list[int]]) -> None:
    model = ModelConfig(path=str(folder / "export"), init="pretrained", max_length=MAX_LENGTH)
    asked = [TrainSequence(np.array(row, np.int32), (np.arange(len(row)) > 0).astype(np.uint8)) for row in rows]
    with world() as mesh:
        worker = ModelWorker(ModelSpec("policy", model, None), mesh)
        found = worker.forward([Batch.of(asked)], "padded")
    (folder / "truth.json").write_text(json.dumps([answer.tolist() for answer in found]))
