"""Which copy plans were verified in an earlier start: a success is remembered, and any difference verifies again."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.inference.vllm.copy_plan import CopyPlan
from pipeline.inference.vllm.verified_plans import difference_from_reload, is_verified, plan_key, remember
from pipeline.utils import source_digest
from tests.unit.inference.test_copy_plan import LAYOUT, Deriving, Fused, loaded, made, recorded, reloading, same, staged


def settings(digest: str = "a", rank: int = 0) -> Any:
    """As much of a `VllmConfig` as a key reads."""
    return SimpleNamespace(compute_hash=lambda: digest, parallel_config=SimpleNamespace(rank=rank))


def key(model: Fused | None = None, config: Any = None, environment: dict[str, str] | None = None) -> str:
    model = model or Fused()
    return plan_key(recorded(model), model, config or settings(), environment or {})


def test_the_same_plan_of_the_same_model_has_the_same_key() -> None:
    assert key() == key(Fused()) == key(environment={"VLLM_HOST_IP": "127.0.0.3"})


class Longer(Fused):
    """Has a tensor that no weight is loaded into."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2))


class Renamed(Fused):
    """The same tensors in another class."""


@pytest.mark.parametrize(
    "other",
    [
        lambda: key(Longer()),
        lambda: key(Renamed()),
        lambda: key(config=settings("b")),
        lambda: key(config=settings(rank=1)),
        lambda: key(environment={"VLLM_FUSED_MOE_BACKEND": "x"}),
        lambda: key(environment={"VLLM_USE_FLASHINFER_MOE_FP8": "1"}),
    ],
)
def test_whatever_may_change_the_result_changes_the_key(other: Callable[[], str]) -> None:
    assert other() != key()


def test_another_release_or_another_source_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="9.9"))
        assert key() != before
    source = tmp_path / "pipeline" / "inference" / "vllm" / "copy_plan.py"
    source.parent.mkdir(parents=True)
    source.write_text("one")
    monkeypatch.setattr(source_digest, "ROOT", tmp_path)
    one = key()
    source.write_text("two")
    assert before != one != key()


def test_a_success_is_found_and_a_folder_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    assert not is_verified("k", tmp_path / "new")
    assert remember("k", tmp_path / "new") == remember("k", tmp_path / "new") == ""
    assert is_verified("k", tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["k"]
    (tmp_path / "file").touch()
    assert "file" in remember("k", tmp_path / "file")
    assert not is_verified("k", tmp_path / "file")


class Reloads:
    """Reloads a model, and counts how often."""

    def __init__(self, model: Fused) -> None:
        self.count, self._reload = 0, reloading(model)

    def __call__(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.count += 1
        self._reload(tensors)


def started(model: Fused, folder: Path, digest: str = "a") -> tuple[CopyPlan, str, int]:
    """A start of a server: its plan, the difference, and how often the model was reloaded."""
    plan = CopyPlan.record(lambda tensors: Fused.load_weights(model, tensors), LAYOUT)
    plan.stage(torch.device("cpu"))
    reload = Reloads(model)
    return plan, difference_from_reload(plan, model, settings(digest), reload, folder), reload.count


def test_a_second_start_updates_like_a_reload_without_having_made_one(tmp_path: Path) -> None:
    for expected in (2, 0):
        model = Fused()
        plan, difference, reloads = started(model, tmp_path)
        assert (difference, reloads) == ("", expected)
        staged(plan, made(3))
        plan.apply()
        # Of the padded vocabulary too, whose last rows no update contains.
        assert same(model, loaded(made(3)))
    assert started(Fused(), tmp_path, digest="b")[2] == 2


def test_a_failure_is_never_remembered(tmp_path: Path) -> None:
    for _ in range(2):
        assert started(Deriving(), tmp_path / "plans")[1:] == ("1 of 4 tensors differ, such as .derived", 2)
    assert not (tmp_path / "plans").exists()
