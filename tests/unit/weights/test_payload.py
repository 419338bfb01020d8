"""Versions that wait in the host's memory, with a CUDA that only writes down what is asked of it."""

import gc
import logging

import pytest
import torch

from pipeline.weights import payload
from pipeline.weights.payload import HostMemory, Payload
from pipeline.weights.wire import WeightLayout

LAYOUT = WeightLayout.of([("w", torch.zeros(64))])


class Runtime:
    """`pinned` has the addresses of memory that is registered; `code` is what registering answers."""

    def __init__(self) -> None:
        self.pinned, self.code = set[int](), 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.code:
            self.pinned.add(address)
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned.remove(address)
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(payload, "_cuda_runtime", lambda: made)
    return made


def waiting(memory: HostMemory, version: int) -> Payload:
    sent = Payload(version, LAYOUT, memory.take(LAYOUT.bytes), {}, torch.device("cuda"))
    memory.free_after(sent)
    return sent


def test_a_version_that_is_still_sent_is_not_overwritten_by_the_next_and_later_ones_are_pinned_no_more(
    runtime: Runtime,
) -> None:
    memory = HostMemory()
    first, second = waiting(memory, 1), waiting(memory, 2)
    before = {first.buffer.data_ptr(), second.buffer.data_ptr()}
    assert len(before) == 2
    address = first.buffer.data_ptr()
    del first
    gc.collect()
    third = waiting(memory, 3)
    assert third.buffer.data_ptr() == address
    assert runtime.pinned == before


def test_memory_that_is_free_is_given_back_at_the_end_and_what_is_still_sent_is_not(runtime: Runtime) -> None:
    memory = HostMemory()
    sent, done = waiting(memory, 1), waiting(memory, 2)
    del done
    gc.collect()
    memory.close()
    assert runtime.pinned == {sent.buffer.data_ptr()}


def test_memory_that_cannot_be_pinned_is_used_all_the_same_and_told(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.code = 2
    memory = HostMemory()
    with caplog.at_level(logging.WARNING):
        assert len(memory.take(8)) == 8
    assert "could not be pinned (CUDA error 2); copies take longer" in caplog.text
    memory.close()
