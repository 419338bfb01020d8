"""What a process needs of the weights, cut into chunks, gathered on the trainer's side and put together again."""

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync import server_shards
from pipeline.inference.weight_sync.rank_rows import RowSource
from pipeline.inference.weight_sync.server_shards import Shard, Slice
from pipeline.inference.weight_sync.transports.gloo import WeightLayout
from pipeline.inference.weight_sync.weight_snapshot import ShardGatherer, WeightSnapshot
from pipeline.utils.waiting import Deadline

CPU = torch.device("cpu")
SOON = Deadline("the chunk", 5)
TENSORS = [
    ("embedding", torch.arange(120, dtype=torch.float32).view(30, 4)),
    ("norm", torch.arange(5, dtype=torch.bfloat16)),
    ("matrix", torch.arange(200, 296, dtype=torch.bfloat16).view(8, 12)),
    ("scale", torch.tensor(7, dtype=torch.float32)),
]
LAYOUT = WeightLayout.of(TENSORS)
COLUMNS = Slice(2, 6, (8, 3), (12, 1))
ROWS = Slice(0, 40, (15, 4), (4, 1))
TRANSPOSED = Slice(2, 0, (12, 8), (1, 12))
SCALAR = Slice(3, 0, (), ())


def payload() -> WeightSnapshot:
    return WeightSnapshot(1, RowSource(LAYOUT), LAYOUT.pack(TENSORS), {}, CPU)


def received(shard: Shard, at_once: bool = False) -> list[Tensor]:
    """The shard's tensors on the other side, chunk by chunk."""
    staging = torch.full((shard.staged.bytes,), 255, dtype=torch.uint8)
    gatherer = ShardGatherer(CPU)
    for chunk in shard.chunks(at_once):
        staging[chunk.start : chunk.end] = gatherer.gather(payload(), shard, chunk, SOON)
    return [view for _, view in shard.staged.views(staging)]


def sources(slices: Sequence[Slice]) -> list[Tensor]:
    return [each.of(TENSORS[each.tensor][1]) for each in slices]


@pytest.mark.parametrize("most", [1, 16, 17, 100, 1 << 20])
def test_each_slice_arrives_as_it_is_in_the_trainers_tensors(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_shards, "WEIGHT_CHUNK", most)
    shard = Shard.of(LAYOUT, [COLUMNS, ROWS, SCALAR, ROWS])
    assert shard.slices == (ROWS, COLUMNS, SCALAR), "each once, in the layout's order"
    for there, here in zip(received(shard), sources(shard.slices), strict=True):
        assert torch.equal(there, here)


VIEWS = st.sampled_from([COLUMNS, ROWS, TRANSPOSED, SCALAR, *(Slice(0, 4 * n, (2, 3), (8, 1)) for n in range(8))])


@settings(max_examples=60, deadline=None)
@given(st.lists(VIEWS, min_size=1), st.integers(1, 300))
def test_chunks_cover_the_shard_once_and_span_no_more_than_they_may(slices: list[Slice], most: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server_shards, "WEIGHT_CHUNK", most)
        shard = Shard(LAYOUT, tuple(sorted(set(slices))))
        chunks = list(shard.chunks(at_once=False))
        assert all(before.end <= after.start for before, after in pairwise(chunks))
        parts = [part for chunk in chunks for _, part in chunk.slices]
        assert sum(part.elements for part in parts) == sum(each.elements for each in shard.slices)
        for chunk in chunks:
            spans = [part.span * shard.width(part) for _, part in chunk.slices]
            assert len(spans) == 1 or sum(spans) <= most
        assert all(torch.equal(*pair) for pair in zip(received(shard), sources(shard.slices), strict=True))


def test_rows_of_a_large_slice_go_in_several_chunks_and_those_of_a_transposed_one_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_shards, "WEIGHT_CHUNK", 64)
    assert len([*Shard(LAYOUT, (ROWS,)).chunks(False)]) == 4
    assert len([*Shard(LAYOUT, (TRANSPOSED,)).chunks(False)]) == 1


def test_the_whole_layout_goes_in_one_chunk_from_where_it_lies() -> None:
    whole, sent = Shard.whole(LAYOUT), payload()
    (chunk,) = whole.chunks(at_once=True)
    assert ShardGatherer(CPU).gather(sent, whole, chunk, SOON).data_ptr() == sent.buffer.data_ptr()
    assert (chunk.start, chunk.end) == (0, LAYOUT.bytes)


def test_the_whole_layout_in_chunks_is_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_shards, "WEIGHT_CHUNK", 100)
    elsewhere = torch.device("meta")  # which is not where the buffer is
    on_host = WeightSnapshot(1, RowSource(LAYOUT), LAYOUT.pack(TENSORS), {}, elsewhere)
    whole, gatherer = Shard.whole(LAYOUT), ShardGatherer(CPU)
    arrived = torch.zeros(LAYOUT.bytes, dtype=torch.uint8)
    for chunk in whole.chunks(on_host.at_once):
        arrived[chunk.start : chunk.end] = gatherer.gather(on_host, whole, chunk, SOON)
    assert all(torch.equal(view, tensor) for (_, view), (_, tensor) in zip(LAYOUT.views(arrived), TENSORS, strict=True))


def test_slices_that_are_no_smaller_than_everything_are_everything() -> None:
    everything = Shard.whole(LAYOUT).slices
    assert Shard.of(LAYOUT, [*everything, COLUMNS]).is_whole


@pytest.mark.parametrize("shard", [Shard.whole(LAYOUT), Shard.of(LAYOUT, [COLUMNS, SCALAR])], ids=["whole", "part"])
def test_a_shard_is_told_in_json(shard: Shard) -> None:
    assert Shard.parse(LAYOUT, json.loads(json.dumps(shard.plain()))) == shard


@pytest.mark.parametrize(
    "asked",
    [
        [4, 0, [1], [1]],
        [-1, 0, [1], [1]],
        [0, 100, [6, 4], [4, 1]],
        [0, -1, [1], [1]],
        [0, 0, [2], [-1]],
        [0, 0, [2, 2], [1]],
        [0, 0, None, [1]],
        [0],
    ],
)
def test_a_slice_that_the_tensors_do_not_have_is_refused(asked: list[object]) -> None:
    with pytest.raises(WeightSyncError, match="the server asks for"):
        Shard.parse(LAYOUT, [asked])  # type: ignore[list-item]
