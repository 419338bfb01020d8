"""Which CUDA device a process of the trainer takes; no device is needed for it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.errors import TrainingError
from pipeline.topology.memory_budget import GIB
from pipeline.topology.memory_fit import trainer_allowance
from pipeline.train.controller.lead_or_serve import run_role_of_rank
from pipeline.train.controller.rank_process import Deadlines, joined_world
from pipeline.train.model.model_size import sizes_of
from tests.fakes.configs import make_config

TINY = Path(__file__).parents[3] / "conf" / "models" / "tiny_qwen3"


@pytest.fixture(autouse=True)
def second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its node; torchrun did not say where the others are."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("RANK", raising=False)


def test_a_process_takes_the_device_of_its_local_rank_before_it_meets_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    with pytest.raises(ValueError, match="RANK expected"), joined_world("cuda", Deadlines()):
        pass
    assert taken == [1]


def test_a_process_without_a_device_says_so_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    said = r"process 1 .* no GPU: CUDA shows 1, .* lower resources\.trainer"
    with pytest.raises(TrainingError, match=said), joined_world("cuda", Deadlines()):
        pass


@pytest.mark.parametrize("share", [True, False], ids=["shared", "its own"])
def test_a_trainer_keeps_to_what_servers_on_its_gpu_leave(monkeypatch: pytest.MonkeyPatch, share: bool) -> None:
    limits: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *limit: limits.append(limit))
    config = make_config(
        model={"path": str(TINY), "init": "random", "dtype": "bfloat16"},
        resources={"device": "cuda", "trainer": {"gpus": 1}, "inference": {"gpus": 1}, "colocate": share},
        inference={"gpu_memory": 0.25},
    )
    with pytest.raises(ValueError, match="RANK expected"):
        run_role_of_rank(config, "secret", lambda dispatch: None)
    allowed = trainer_allowance(config, sizes_of(config.model), 80 * GIB)
    assert limits == ([(allowed / (80 * GIB), 1)] if share else [])
