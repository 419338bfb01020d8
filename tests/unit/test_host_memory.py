"""Pinned memory, with a CUDA that only writes down what is asked of it."""

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pipeline.utils import pinned_memory
from pipeline.utils.pinned_memory import pinned_like, pinned_tensor
from tests.fakes.cuda_runtime import CudaRuntime


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
    made = CudaRuntime()
    monkeypatch.setattr(pinned_memory, "_cuda_runtime", lambda: made)
    return made


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping in which an address lies; none if there is none."""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        begin, end = (int(each, 16) for each in mapping.split()[0].split("-"))
        if begin <= address < end:
            return mapping.rpartition("VmFlags:")[2].split()
    return []


def test_it_has_the_size_that_was_asked_for_and_is_filled_with_zeros(runtime: CudaRuntime) -> None:
    memory = pinned_tensor(5_000_001)
    assert (memory.dtype, memory.shape) == (torch.uint8, (5_000_001,))
    assert not memory.any()
    assert runtime.pinned == {memory.data_ptr(): 5_000_001}


def test_it_is_let_go_of_with_the_last_tensor_in_it_while_it_is_still_there(
    runtime: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    unregister = runtime.cudaHostUnregister
    monkeypatch.setattr(runtime, "cudaHostUnregister", lambda at: (seen.append(bool(flags_of(at))), unregister(at)))
    memory = pinned_tensor(1 << 20)
    address, part = memory.data_ptr(), memory[10:20]
    del memory
    assert [*runtime.pinned] == [address]
    part.fill_(1)
    del part
    assert not runtime.pinned
    assert seen == [True]
    assert not flags_of(address)


def test_memory_that_cuda_refuses_is_used_all_the_same_and_told(
    runtime: CudaRuntime, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[bool] = []
    monkeypatch.setattr(pinned_memory, "_forget_error", lambda: forgotten.append(True))
    runtime.code = 2
    with caplog.at_level(logging.WARNING):
        memory = pinned_tensor(8)
    assert len(memory) == 8
    assert forgotten == [True]
    assert (
        "could not be pinned (CUDA error 2): copies from and to GPUs take longer; the node may be short" in caplog.text
    )
    del memory  # which would fail here if it were unregistered


def test_what_another_thread_gives_back_is_given_back_on_the_device_of_the_first(
    runtime: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int] = []

    @contextmanager
    def device(number: int) -> Iterator[None]:
        entered.append(number)
        yield

    monkeypatch.setattr(pinned_memory, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", device)
    held = [pinned_tensor(8)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join(10)
    assert not runtime.pinned
    assert entered == [3]


def test_it_is_not_shared_with_processes_that_are_forked(runtime: CudaRuntime) -> None:
    memory = pinned_tensor(1 << 22)
    flags = flags_of(memory.data_ptr())
    assert "dc" in flags, "not copied by a fork"
    assert "sh" not in flags, "private: only such memory has huge pages everywhere"


def test_nothing_needs_no_memory(runtime: CudaRuntime) -> None:
    assert pinned_like(torch.empty(0, 3)).shape == (0, 3)
    assert not runtime.pinned


def test_it_is_like_a_tensor_of_any_layout_and_without_its_numbers(runtime: CudaRuntime) -> None:
    like = pinned_like(torch.empty(6, 4, dtype=torch.bfloat16, device="meta").t())
    assert (like.shape, like.dtype, like.is_contiguous()) == ((4, 6), torch.bfloat16, True)
    assert [*runtime.pinned.values()] == [48]
