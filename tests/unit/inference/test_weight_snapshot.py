"""Versions that wait in the host's memory, with a CUDA that only writes down what is asked of it."""

import gc

import pytest
import torch

from pipeline.inference.weight_sync.rank_rows import RowSource
from pipeline.inference.weight_sync.transports.gloo import WeightLayout
from pipeline.inference.weight_sync.weight_snapshot import SnapshotMemory, WeightSnapshot
from pipeline.utils import pinned_memory
from tests.fakes.cuda_runtime import CudaRuntime

LAYOUT = WeightLayout.of([("w", torch.zeros(64))])
SOURCE = RowSource(LAYOUT)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
    made = CudaRuntime()
    monkeypatch.setattr(pinned_memory, "_cuda_runtime", lambda: made)
    return made


def waiting(memory: SnapshotMemory, version: int) -> WeightSnapshot:
    sent = WeightSnapshot(version, SOURCE, memory.take(LAYOUT.bytes), {}, torch.device("cuda"))
    memory.free_after(sent)
    return sent


def test_a_version_that_is_still_sent_is_not_overwritten_by_the_next_and_later_ones_are_pinned_no_more(
    runtime: CudaRuntime,
) -> None:
    memory = SnapshotMemory()
    first, second = waiting(memory, 1), waiting(memory, 2)
    before = {first.buffer.data_ptr(), second.buffer.data_ptr()}
    assert len(before) == 2
    address = first.buffer.data_ptr()
    del first
    gc.collect()
    third = waiting(memory, 3)
    assert third.buffer.data_ptr() == address
    assert runtime.pinned.keys() == before


def test_memory_that_is_free_is_given_back_at_the_end_and_what_is_still_sent_is_not(runtime: CudaRuntime) -> None:
    memory = SnapshotMemory()
    sent, done = waiting(memory, 1), waiting(memory, 2)
    del done
    gc.collect()
    memory.close()
    assert runtime.pinned.keys() == {sent.buffer.data_ptr()}
