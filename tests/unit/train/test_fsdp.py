"""Which modules are gathered together, and which parameters are not gathered at all."""

from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pipeline.config import LoraConfig, ModelConfig
from pipeline.train.model import fsdp
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.worker_spec import ModelSpec
from tests.fakes.shards import rank_of
from tests.support.models.tiny import write_tiny


@pytest.mark.parametrize(
    ("ranks", "reshard", "whole_unit", "whole"),
    [
        (1, False, 1 << 28, True),
        (1, True, 1 << 28, False),  # what is gathered for each pass again needs no memory for all layers
        (1, False, 1000, False),
        (2, False, 1 << 28, False),
    ],
)
def test_a_small_model_on_one_rank_is_one_unit(
    ranks: int, reshard: bool, whole_unit: int, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp, "LAYER_UNIT", 1)
    monkeypatch.setattr(fsdp, "WHOLE_UNIT", whole_unit)
    write_tiny(tmp_path)
    with rank_of(ranks, 0) as mesh:
        spec = ModelSpec("policy", ModelConfig(path=str(tmp_path), init="random"), reshard=reshard)
        model = ModelWorker(spec, mesh).model
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    assert len(units) == (1 if whole else 1 + len(model.layers))


@pytest.mark.parametrize(("ranks", "sharded"), [(1, False), (2, True)])
def test_a_frozen_base_is_sharded_only_over_several_ranks(ranks: int, sharded: bool, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    with rank_of(ranks, 0) as mesh:
        model = ModelConfig(path=str(tmp_path), init="random", lora=LoraConfig(rank=2), dtype="bfloat16")
        parameters = list(ModelWorker(ModelSpec("policy", model), mesh).model.parameters())
    assert {isinstance(p, DTensor) for p in parameters if not p.requires_grad} == {sharded}
    assert {isinstance(p, DTensor) for p in parameters if p.requires_grad} == {True}
