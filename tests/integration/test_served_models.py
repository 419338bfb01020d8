"""Clients' models on a dispatch: what cannot be made or loaded costs its request alone."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from transformers import Phi3Config, Phi3ForCausalLM

from pipeline.errors import CheckpointError
from pipeline.tinker.tinker_records import Adapter, Datum, Pass, PassResult, Step
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.service.client_models import RefusedRequest, ServedModels
from tests.support.models.jobs import VOCABULARY, config_of, world_of_one, write_model

pytestmark = pytest.mark.integration
STEP = Step(1e-2, 0.9, 0.95, 1e-8, 0.0, 0.0)
TOKENS = np.arange(1, 9, dtype=np.int32)
DATUM = Datum(
    TOKENS.tobytes(),
    np.arange(8, dtype=np.int64).tobytes(),
    (TOKENS + 1).tobytes(),
    {"weights": np.ones(8, np.float32).tobytes()},
)


@pytest.fixture(scope="module")
def dispatch() -> Iterator[RankGroup]:
    with world_of_one() as made:
        yield made


@pytest.fixture
def models(dispatch: RankGroup, tmp_path: Path) -> Iterator[ServedModels]:
    write_model(tmp_path / "base")
    served = ServedModels(dispatch, config_of(tmp_path / "base"), tmp_path / "weights", "one")
    yield served
    for id in served.adapters:
        served.remove(id)


def asked(models: ServedModels, id: str, *, backward: bool = False) -> PassResult:
    return models.run_pass(id, Pass((DATUM,), "cross_entropy", {}, backward))


def trained(models: ServedModels, id: str) -> list[bytes]:
    asked(models, id, backward=True)
    models.step(id, STEP)
    return asked(models, id).logprobs


def damage(folder: Path) -> None:
    """Turn one bit of the largest file."""
    file = max((each for each in folder.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_layers_that_the_base_has_not_are_refused_and_the_others_go_on(dispatch: RankGroup, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {
        "hidden_size": 16,
        "intermediate_size": 24,
        "vocab_size": VOCABULARY,
        "pad_token_id": 0,
        "eos_token_id": 0,
    }
    Phi3ForCausalLM(Phi3Config(**shape)).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    models = ServedModels(dispatch, config_of(tmp_path / "base"), tmp_path / "weights", "one")
    with pytest.raises(RefusedRequest, match=r"model.lora.targets='q_proj,.*': expected a linear layer of the model"):
        models.create("fused", Adapter(4))
    assert "fused" not in models
    models.create("whole", Adapter(0))
    assert trained(models, "whole") != trained(models, "whole")
    models.remove("whole")


def test_a_model_without_room_is_refused_and_the_others_go_on(
    models: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.create("first", Adapter(4))
    before = asked(models, "first").logprobs
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 14))
        for adapter in (Adapter(0), Adapter(8), Adapter(4)):
            with pytest.raises(RefusedRequest, match="no room for this model"):
                models.create("second", adapter)
    assert "second" not in models
    assert asked(models, "first").logprobs == before
    models.create("second", Adapter(8))
    assert trained(models, "second") != before


def test_a_damaged_checkpoint_fails_its_load_and_the_model_stays_as_it_was(
    models: ServedModels, tmp_path: Path
) -> None:
    models.create("a", Adapter(4, seed=1))
    trained(models, "a")
    for folder in ("good", "bad"):
        models.save("a", folder, sampler=False)
    saved = asked(models, "a").logprobs
    later = trained(models, "a")
    assert later != saved
    damage(tmp_path / "weights" / "bad")
    with pytest.raises(CheckpointError, match="not what was saved"):
        models.verify_saved("bad")
    assert asked(models, "a").logprobs == later
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        models.verify_saved("nothing")
    models.verify_saved("good")
    models.load("a", "good", optimizer=True)
    assert asked(models, "a").logprobs == saved


def test_damage_that_comes_between_the_look_and_the_load_costs_the_model_alone(
    models: ServedModels, tmp_path: Path
) -> None:
    for id in ("a", "b"):
        models.create(id, Adapter(4, seed=1))
    models.save("a", "bad", sampler=False)
    damage(tmp_path / "weights" / "bad")
    with pytest.raises(CheckpointError, match="not what was saved"):
        models.load("a", "bad", optimizer=True)
    assert "a" not in models
    assert trained(models, "b")
