"""vLLM's functions that are replaced: a release without them, or with others, is refused in one line."""

import sys
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pipeline.inference.vllm.draft_weights import SWITCH, load_drafting_model
from pipeline.inference.vllm.kv_cache_size import SHARED, limit_to_share
from pipeline.inference.vllm.stock_functions import stock_function

pytest.importorskip("vllm", exc_type=ImportError)


class Worker:
    def run(self, step: int) -> int:
        return step


def test_a_function_is_found_until_it_was_replaced() -> None:
    assert stock_function(Worker, "run", "self", "step", by="pipeline.other") is Worker.run
    assert stock_function(Worker, "run", "self", "step", by=__name__) is None


@pytest.mark.parametrize(
    ("name", "found"),
    [("walk", "found none"), ("run", "found run(self, step: int) -> int")],
    ids=["name", "parameters"],
)
def test_another_release_is_refused_with_what_it_has(name: str, found: str) -> None:
    with pytest.raises(ImportError) as refused:
        stock_function(Worker, name, "self", "size", by="pipeline.other", key="inference.speculation")
    assert str(refused.value) == (
        f"vLLM {version('vllm')} is not known to pipeline.other: expected Worker.{name}(self, size), {found}; "
        "leave out inference.speculation, or install a release that has it"
    )


@pytest.mark.parametrize(
    ("module", "owner", "patch", "key"),
    [
        ("vllm.v1.worker.gpu_worker", "Worker", lambda: limit_to_share({SHARED: "1"}), "resources.colocate and .*_gpu"),
        (
            "vllm.v1.spec_decode.draft_model",
            "DraftModelProposer",
            lambda: load_drafting_model({SWITCH: "1"}),
            "inference.speculation.method=draft",
        ),
    ],
)
def test_a_server_whose_vllm_lost_a_function_ends_with_the_key_that_needs_it(
    module: str, owner: str, patch: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = ModuleType(module)
    setattr(without, owner, type(owner, (), {}))
    monkeypatch.setitem(sys.modules, module, without)
    with pytest.raises(ImportError, match=f"{owner}.* found none; leave out {key}, or install"):
        patch()


def test_settings_of_drafted_tokens_are_refused_where_vllm_takes_them_in_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replacement that nobody calls would leave the fault in place."""
    from pipeline.inference.vllm.vllm_compat import expand_sampling_settings

    platforms, sample = ModuleType("vllm.platforms"), ModuleType("vllm.v1.sample")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: True)  # type: ignore[attr-defined]
    sample.rejection_sampler = ModuleType("rejection_sampler")  # type: ignore[attr-defined]
    for module in (platforms, sample):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ImportError, match=r"expand_batch_to_tokens\(x, cu_num_tokens, .* found none; install"):
        expand_sampling_settings()
