"""What a rank holds while its model is loaded, handed to the servers, or written: bytes of tensors, counted."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config import ModelConfig
from pipeline.inference.weight_sync.publication import SenderSettings
from pipeline.inference.weight_sync.server_shards import Shard
from pipeline.inference.weight_sync.server_sync import MeetingPoint
from pipeline.inference.weight_sync.weight_snapshot import ShardGatherer, WeightSnapshot
from pipeline.train.model import fsdp, row_shards, weight_loading
from pipeline.train.model.cpu_offload import local
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.worker_spec import ModelSpec
from pipeline.utils.waiting import Deadline
from tests.fakes.shards import rank_of

RANKS, MARGIN = 4, 0.3
SIZE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 8, "vocab_size": 160, "head_dim": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors that operations see, as long as they live; `peak` is the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in (*tree_leaves(args), *tree_leaves(made)):
            if type(tensor) is Tensor and not tensor.is_meta:
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, sum(self._sizes.values()))
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        place = storage.data_ptr()
        if place not in self._sizes and storage.nbytes():
            weakref.finalize(storage, self._sizes.pop, place, None)
        self._sizes[place] = storage.nbytes()


@pytest.fixture(params=["qwen3", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model in bfloat16, of which no tensor is a large part."""
    config = AutoConfig.for_model(request.param, **SIZE, **HEADS, **EXPERTS)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    monkeypatch.setattr(fsdp, "LAYER_UNIT", 1)
    with rank_of(RANKS) as mesh:
        yield mesh


def spec_of(folder: Path, init: str = "pretrained") -> ModelSpec:
    return ModelSpec("policy", ModelConfig.model_validate({"path": str(folder), "init": init, "dtype": "bfloat16"}))


def held_by(one: ModelWorker) -> int:
    return sum(local(parameter.detach()).nbytes for parameter in one.model.parameters())


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_a_rank_that_loads_its_shards_holds_little_beside_them(folder: Path, mesh: DeviceMesh, init: str) -> None:
    with Held() as held:
        one = ModelWorker(spec_of(folder, init), mesh)
    assert held_by(one) < held.peak < held_by(one) + MARGIN * one.layout.bytes


def test_free_memory_goes_back_to_the_system_after_each_large_tensor(
    folder: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[weakref.ref[Tensor]] = []
    given_back: list[int] = []

    def put(target: Tensor, source: Tensor) -> None:
        sources.append(weakref.ref(source))
        row_shards.fill_shard(target, source)

    def give_back() -> None:
        assert all(source() is None for source in sources)
        given_back.append(len(sources))

    monkeypatch.setattr(weight_loading, "fill_shard", put)
    monkeypatch.setattr(weight_loading, "give_back_heap", give_back)
    monkeypatch.setattr(weight_loading, "_LARGE", torch.bfloat16.itemsize * SIZE["vocab_size"] * SIZE["hidden_size"])
    ModelWorker(spec_of(folder, "random"), mesh)
    assert len(given_back) >= 2, "for the embedding and the head"
    assert len(given_back) < len(sources), "for none of the norms"


def test_a_rank_that_writes_the_model_holds_a_tensor_at_a_time(folder: Path, mesh: DeviceMesh) -> None:
    one = ModelWorker(spec_of(folder), mesh)
    with Held() as held:
        one.save_hf_model(folder.parent / "out")
    assert held_by(one) < held.peak < held_by(one) + MARGIN * one.layout.bytes


def test_a_rank_that_publishes_holds_its_rows_of_one_version_and_little_beside(folder: Path, mesh: DeviceMesh) -> None:
    one = ModelWorker(spec_of(folder), mesh)
    settings = SenderSettings(MeetingPoint("127.0.0.2", 1, ""), {}, "cpu", on_host=False)
    snapshots = settings.snapshots(one.layout, one.public.rows)
    own, size = snapshots.source.own, one.layout.bytes
    assert own.bytes < (1 + MARGIN) * size / RANKS

    def fill(buffer: Tensor) -> None:
        one.public.fill_rows([view for _, view in own.views(buffer)])

    for version in (1, 2):
        with Held() as held:
            sent = list(chunks_of(snapshots.take(version, fill, ())))
        assert held.peak < held_by(one) + own.bytes + MARGIN * size / RANKS
        assert sum(sent) == own.bytes


def chunks_of(snapshot: WeightSnapshot) -> Iterator[int]:
    """Sizes of the pieces that go to a server that needs all."""
    parts, gatherer = snapshot.source.parts(Shard.whole(snapshot.source.layout)), ShardGatherer(snapshot.device)
    for chunk in parts.chunks():
        yield len(gatherer.gather(snapshot, parts.shard, chunk, Deadline("a chunk", 5)))
