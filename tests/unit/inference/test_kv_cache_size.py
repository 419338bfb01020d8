"""The cache of a server whose GPU has a neighbour."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pipeline.inference.vllm.kv_cache_size import SHARED, cache_bytes_left, limit_to_share
from pipeline.topology.memory_budget import GIB
from pipeline.topology.server_memory import ENGINE

FREE = 7 * GIB
"""What vLLM itself would find."""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's class of workers, as far as it counts here; loading its own takes 10 s."""

    class Worker:
        requested_memory = 40 * GIB

        def __init__(self, told: int | None = None) -> None:
            self.cache_config = SimpleNamespace(kv_cache_memory_bytes=told)
            self.model_runner = SimpleNamespace(model_memory_usage=float(16 * GIB))

        def determine_available_memory(self) -> int:
            return self.cache_config.kv_cache_memory_bytes or FREE

    module = ModuleType("vllm.v1.worker.gpu_worker")
    module.Worker = Worker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Worker


def test_the_cache_is_what_the_share_leaves_beside_the_weights(worker: Any) -> None:
    limit_to_share({SHARED: "1"})
    limit_to_share({SHARED: "1"})
    assert worker().determine_available_memory() == 24 * GIB - ENGINE


def test_a_size_that_the_user_gave_stays(worker: Any) -> None:
    limit_to_share({SHARED: "1"})
    assert worker(told=GIB).determine_available_memory() == GIB


@pytest.mark.parametrize("variables", [{}, {SHARED: "0"}])
def test_a_server_alone_on_its_gpus_measures(worker: Any, variables: dict[str, str]) -> None:
    limit_to_share(variables)
    assert worker().determine_available_memory() == FREE


def test_a_share_that_the_weights_fill_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"more than weights of 16.0 GiB and 3.0 GiB for vLLM, found 19.0 GiB"):
        cache_bytes_left(19 * GIB, 16 * GIB)
    assert cache_bytes_left(19 * GIB + 1, 16 * GIB) == 1
