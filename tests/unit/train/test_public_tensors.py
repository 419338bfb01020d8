"""What each rank publishes of a model: all ranks' rows together are what one rank gathers, and no rank holds more."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config import LoraConfig, ModelConfig
from pipeline.inference.weight_sync.rank_rows import RowSource, check_sources
from pipeline.train.model import fsdp, public_tensors
from pipeline.train.model.cpu_offload import local
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.model.public_tensors import PublicTensors
from pipeline.train.worker_spec import ModelSpec
from tests.fakes.shards import rank_of
from tests.unit.train.test_weight_loading import EXPERTS, FAMILIES, config_in, family, weights_in

EIGHT_EXPERTS = EXPERTS | {"num_experts": 8}


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "LAYER_UNIT", 1)


def workers(folder: Path, ranks: int, ep: int = 1, **keys: Any) -> Iterator[ModelWorker]:
    """The policy as each rank of a world has it, in bfloat16."""
    spec = ModelSpec("policy", ModelConfig(path=str(folder), dtype="bfloat16", **keys), seed=7)
    for rank in range(ranks):
        with rank_of(ranks, rank) as mesh:
            experts = init_device_mesh("cpu", (ranks // ep, ep), mesh_dim_names=("efsdp", "ep")) if ep > 1 else None
            yield ModelWorker(spec, mesh, experts)


def whole(folder: Path, **keys: Any) -> dict[str, Tensor]:
    for one in workers(folder, 1, **keys):
        tensors = {name: tensor.clone() for name, tensor in one.full_parameters()}
    return tensors


def published(of_ranks: Iterator[ModelWorker]) -> tuple[list[RowSource], list[dict[str, Tensor]]]:
    """The source and the rows of each rank."""
    sources, rows = [], []
    for one in of_ranks:
        source = RowSource(one.layout, one.public.rows)
        views = source.own.views(torch.zeros(source.own.bytes, dtype=torch.uint8))
        one.public.fill_rows([view for _, view in views])
        sources.append(source)
        rows.append(dict(views))
    return sources, rows


def assert_together(sources: Sequence[RowSource], rows: Sequence[dict[str, Tensor]], truth: dict[str, Tensor]) -> None:
    check_sources(sources)
    assert [parameter.name for parameter in sources[0].layout.parameters] == list(truth)
    for name, tensor in truth.items():
        parts = [each[name] for each in rows]
        together = torch.cat(parts) if tensor.ndim else next(part for part in parts if part.numel())
        assert torch.equal(together.view(tensor.shape), tensor), name


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("each", FAMILIES, ids=family)
def test_all_ranks_rows_are_each_tensor_once(tmp_path: Path, each: tuple[str, dict[str, Any]], ranks: int) -> None:
    folder = weights_in(tmp_path / "model", each[0], **each[1])
    assert_together(*published(workers(folder, ranks)), whole(folder))


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts copies by the name of their operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if "copy" in func.overloadpacket.__name__:
            self.copies[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_version_of_plain_tensors_is_one_launch_and_no_arithmetic_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = weights_in(tmp_path / "model", "qwen3")
    for one in workers(folder, 1):  # its group is there within the loop alone
        own = RowSource(one.layout, one.public.rows).own
        monkeypatch.setattr(PublicTensors, "_rows_of", lambda *_: pytest.fail("the rows are known"))
        for version in range(2):
            views = [view for _, view in own.views(torch.zeros(own.bytes, dtype=torch.uint8))]
            with torch.no_grad():
                for parameter in one.model.parameters():
                    local(parameter).add_(version)
            with Launches() as launches:
                one.public.fill_rows(views)
            assert launches.copies == {"_foreach_copy_": 1}
            truth = [tensor for _, tensor in one.full_parameters()]
            assert all(torch.equal(view, tensor) for view, tensor in zip(views, truth, strict=True)), version


@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_spread_experts_are_published_by_the_ranks_that_have_them(tmp_path: Path, ranks: int, ep: int) -> None:
    folder = weights_in(tmp_path / "model", "qwen3_moe", **EIGHT_EXPERTS)
    sources, rows = published(workers(folder, ranks, ep))
    assert_together(sources, rows, whole(folder))
    held = [{name for name, part in each.items() if ".experts." in name and part.numel()} for each in rows]
    assert {len(names) for names in held} == {len(set().union(*held)) // ranks}, "an equal part each"


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_are_split_a_few_at_a_time(tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_tensors, "BLOCK_BYTES", 1)
    folder = weights_in(tmp_path / "model", "qwen3_moe", **EIGHT_EXPERTS)
    assert_together(*published(workers(folder, ranks)), whole(folder))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "gate_proj", "up_proj", "down_proj"]], ids=len)
def test_adapters_are_published_alone_those_of_experts_too(
    tmp_path: Path, ranks: int, targets: tuple[str, ...]
) -> None:
    folder = config_in(tmp_path, "qwen3_moe", **EIGHT_EXPERTS)
    settings: dict[str, Any] = {"init": "random", "lora": LoraConfig(rank=2, targets=tuple(targets))}
    truth = whole(folder, **settings)
    assert all(".lora_" in name for name in truth)
    assert any(".experts." in name for name in truth) == (len(targets) > 1)
    assert_together(*published(workers(folder, ranks, **settings)), truth)
