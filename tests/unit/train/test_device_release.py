"""That a trainer is done only when its devices are free."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pipeline.checkpoints.async_save import AsyncSaver
from pipeline.errors import TrainingError
from pipeline.train.controller.device_release import LIBRARIES_BYTES, release_device
from pipeline.train.controller.rank_group import RankGroup


class Ranks:
    """Two ranks on CUDA whose models are empty."""

    def __init__(self, device: str = "cuda") -> None:
        self.models = {"policy": object()}
        self._sites = [SimpleNamespace(rank=rank, device=device, workers={}, saver=AsyncSaver()) for rank in range(2)]

    def run_on_all_models(self, function: Callable[..., Any]) -> list[Any]:
        return [function(site) for site in self._sites]

    def memory(self) -> list[dict[str, Any]]:
        return [{"policy": SimpleNamespace(model=0, optimizer=0)} for _ in self._sites]

    def remove_model(self, name: str) -> None:
        del self.models[name]


def released(ranks: Ranks) -> None:
    release_device(cast(RankGroup, ranks))


def test_a_tensor_that_no_model_knows_of_keeps_the_job_from_being_done(monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter([LIBRARIES_BYTES, 3 << 30])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(held))
    with pytest.raises(TrainingError, match=f"rank 1 has no model any more, but {3 << 30} bytes of its device"):
        released(Ranks())


def test_what_libraries_keep_of_a_device_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    asked = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: asked.append(dict(ranks.models)) or 64 << 20)
    released(ranks)
    assert asked == [{}, {}], "looked at before the models were gone"


def test_on_the_cpu_nothing_asks_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: pytest.fail("asked"))
    ranks = Ranks("cpu")
    released(ranks)
    assert ranks.models == {}
