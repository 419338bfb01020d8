"""Tensors that leave the device and come back: their bytes, their storages, and a disk that is full."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import TrainingError
from pipeline.train.model.cpu_offload import Offloadable, _HostMemory
from pipeline.utils import pinned_memory
from tests.fakes.cuda_runtime import CudaRuntime


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_bytes_that_come_back_are_those_that_left() -> None:
    tensors = [draw(100, 3), draw(7, seed=1).bfloat16(), torch.arange(5), torch.zeros(())]
    before = [tensor.clone() for tensor in tensors]
    addressed = [tensor.untyped_storage() for tensor in tensors]
    part = Offloadable(lambda: tensors)
    for _ in range(2):
        part.offload()
        assert [storage.nbytes() for storage in addressed] == [0] * 4
        part.load()
        assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


def test_views_of_one_storage_leave_together_and_count_once() -> None:
    whole = draw(10, 10)
    views = [whole[:3], whole[3:], whole.T]
    part = Offloadable(lambda: views)
    assert part.resident == 400
    part.offload()
    assert part.resident == whole.untyped_storage().nbytes() == 0
    part.load()
    assert part.resident == 400
    torch.testing.assert_close(views[2], draw(10, 10).T, rtol=0, atol=0)


def test_an_empty_tensor_has_nothing_to_move() -> None:
    part = Offloadable(lambda: [torch.empty(0)])
    part.offload()
    part.load()
    assert part.resident == 0


def test_to_offload_or_to_load_twice_changes_nothing() -> None:
    tensor = draw(10)
    part = Offloadable(lambda: [tensor])
    part.load()
    part.offload()
    part.offload()
    part.load()
    part.load()
    assert torch.equal(tensor, draw(10))


def test_what_numpy_holds_is_refused_and_left_alone() -> None:
    tensors = [draw(10), draw(3)]
    part = Offloadable(lambda: tensors)
    held = tensors[1].numpy()
    with pytest.raises(TrainingError, match="copy it before"):
        part.offload()
    assert part.resident == 52
    assert held.nbytes == 12


def test_a_full_disk_leaves_everything_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: Any) -> Any:
        return Path("/dev/full").open("wb", buffering=0)

    tensor = draw(10)
    part = Offloadable(lambda: [tensor])
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "TemporaryFile", full)
        with pytest.raises(OSError, match="No space left"):
            part.offload()
    assert torch.equal(tensor, draw(10))
    part.offload()
    part.load()
    assert torch.equal(tensor, draw(10))


def test_host_memory_that_was_read_in_part_is_read_again_from_its_start() -> None:
    kept = _HostMemory()
    kept._parts = [draw(4), draw(6)]
    targets = [torch.zeros(4), torch.zeros(6)]
    for tries in (targets[:1], targets[:1], targets):
        kept.rewind()
        for target in tries:
            kept.take(target)
    assert torch.equal(targets[0], draw(4))
    assert torch.equal(targets[1], draw(6))


def test_host_memory_is_used_again_where_it_fits_also_when_gradients_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = CudaRuntime()
    monkeypatch.setattr(pinned_memory, "_cuda_runtime", lambda: runtime)
    kept, places = _HostMemory(), list[list[int]]()
    for value, sizes in enumerate([(4, 6), (4, 6, 2), (4, 6), (4, 6, 2), (4, 5, 2)]):
        for size in sizes:
            kept.put(torch.full((size,), value, dtype=torch.uint8))
        kept.rewind()
        for size in sizes:
            target = torch.zeros(size, dtype=torch.uint8)
            kept.take(target)
            assert target.eq(value).all()
        kept.close()
        places.append([part.data_ptr() for part in kept._parts])
    assert places[0] == places[1][:2]
    assert places[1] == places[2] == places[3]
    assert (places[4][0], places[4][2]) == (places[1][0], places[1][2])
    assert [*runtime.pinned.values()] == [4, 2, 5]
