"""Which CUDA device a process of the trainer takes; no device is needed for it."""

from types import SimpleNamespace

import pytest
import torch

from pipeline.errors import TrainingError
from pipeline.training.dispatch.ranks import Deadlines, joined_world


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


def test_a_process_on_a_shared_device_keeps_to_what_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *limit: limits.append(limit))
    for allowance in (None, lambda total: total - 60):
        with pytest.raises(ValueError, match="RANK expected"), joined_world("cuda", Deadlines(), allowance=allowance):
            pass
    assert limits == [(0.25, 1)]
