"""Pinned memory, with a CUDA that only writes down what is asked of it."""

import logging
from pathlib import Path

import pytest
import torch

from pipeline import pinned as module
from pipeline.pinned import pinned, pinned_like
from tests.fakes.cuda_runtime import CudaRuntime


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
    made = CudaRuntime()
    monkeypatch.setattr(module, "_cuda_runtime", lambda: made)
    return made


def mapped(address: int) -> bool:
    """Whether this process has memory there."""
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


def test_it_has_the_size_that_was_asked_for_and_is_filled_with_zeros(runtime: CudaRuntime) -> None:
    memory = pinned(5_000_001)
    assert (memory.dtype, memory.shape) == (torch.uint8, (5_000_001,))
    assert not memory.any()
    assert runtime.pinned == {memory.data_ptr(): 5_000_001}


def test_it_is_let_go_of_with_the_last_tensor_in_it_while_it_is_still_there(
    runtime: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    unregister = runtime.cudaHostUnregister
    monkeypatch.setattr(runtime, "cudaHostUnregister", lambda at: (seen.append(mapped(at)), unregister(at)))
    memory = pinned(1 << 20)
    address, part = memory.data_ptr(), memory[10:20]
    del memory
    assert [*runtime.pinned] == [address]
    part.fill_(1)
    del part
    assert not runtime.pinned
    assert seen == [True]
    assert not mapped(address)


def test_memory_that_cuda_refuses_is_used_all_the_same_and_told(
    runtime: CudaRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.code = 2
    with caplog.at_level(logging.WARNING):
        memory = pinned(8)
    assert len(memory) == 8
    assert "could not be pinned (CUDA error 2); copies from and to GPUs take longer" in caplog.text
    del memory  # which would fail here if it were unregistered


def test_nothing_needs_no_memory(runtime: CudaRuntime) -> None:
    assert pinned_like(torch.empty(0, 3)).shape == (0, 3)
    assert not runtime.pinned


def test_it_is_like_a_tensor_of_any_layout_and_without_its_numbers(runtime: CudaRuntime) -> None:
    like = pinned_like(torch.empty(6, 4, dtype=torch.bfloat16, device="meta").t())
    assert (like.shape, like.dtype, like.is_contiguous()) == ((4, 6), torch.bfloat16, True)
    assert [*runtime.pinned.values()] == [48]
