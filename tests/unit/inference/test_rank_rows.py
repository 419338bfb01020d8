"""Which rows each rank sends: what every process of a server gets together is what it needs, whatever the shapes."""

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync import server_shards
from pipeline.inference.weight_sync.rank_rows import (
    Rows,
    RowSource,
    check_sources,
    receiving_order,
    sending_order,
)
from pipeline.inference.weight_sync.server_shards import Shard, Slice, whole_slice
from pipeline.inference.weight_sync.transfer_route import RowReceiver, TransferRoute
from pipeline.inference.weight_sync.transports.gloo import Parameter, WeightLayout
from pipeline.inference.weight_sync.weight_snapshot import ShardGatherer, WeightSnapshot
from pipeline.utils.waiting import Deadline

CPU = torch.device("cpu")
SOON = Deadline("the rows", 5)


def tensors_of(shapes: Sequence[tuple[int, ...]]) -> list[tuple[str, Tensor]]:
    """Tensors of two types whose numbers are all different."""
    tensors, first = [], 0
    for number, shape in enumerate(shapes):
        count = torch.Size(shape).numel()
        numbers = torch.arange(first, first + count, dtype=torch.int32).view(shape)
        tensors.append((f"t{number}", numbers if number % 2 else numbers.to(torch.int64)))
        first += count
    return tensors


def cut_rows(layout: WeightLayout, cuts: Sequence[Sequence[float]], ranks: int) -> list[RowSource]:
    """Each tensor's rows among the ranks, in blocks that end at these fractions."""
    rows: list[list[Rows]] = [[] for _ in range(ranks)]
    for parameter, fractions in zip(layout.parameters, cuts, strict=True):
        count = parameter.shape[0] if parameter.shape else 1
        ends = [0, *sorted(round(count * each) for each in fractions[: ranks - 1]), count]
        for rank in range(ranks):
            rows[rank].append((ends[rank], ends[rank + 1]))
    return [RowSource(layout, tuple(each)) for each in rows]


def snapshot_of(source: RowSource, tensors: Sequence[tuple[str, Tensor]]) -> WeightSnapshot:
    assert source.rows is not None
    buffer = torch.zeros(source.own.bytes, dtype=torch.uint8)
    for (first, last), (_, tensor), (_, view) in zip(source.rows, tensors, source.own.views(buffer), strict=True):
        if first < last:
            view.copy_(tensor[first:last] if tensor.ndim else tensor)
    return WeightSnapshot(3, source, buffer, {}, CPU)


class ListGroup:
    """A group that is a list of the chunks that were sent."""

    def __init__(self) -> None:
        self.chunks: list[Tensor] = []

    def send(self, version: int, buffer: Tensor, deadline: Deadline) -> None:
        self.chunks.append(buffer.clone())


def received(
    shard: Shard, snapshots: Sequence[WeightSnapshot], order: Sequence[int], on_host: bool = False
) -> list[Tensor]:
    """What a process has once it got every rank's part."""
    groups = [ListGroup() for _ in snapshots]
    for each, group in zip(snapshots, groups, strict=True):
        TransferRoute(cast(Any, group), each.source.parts(shard), on_host).send(each, ShardGatherer(CPU), SOON)
    staging = torch.full((shard.staged.bytes,), 255, dtype=torch.uint8)
    at_once = snapshots[0].at_once
    receiver = RowReceiver(shard, [each.source for each in snapshots], staging, at_once, order, CPU, on_host)

    def take(group: ListGroup, target: Tensor) -> int:
        target.copy_(group.chunks.pop(0))
        return 3

    assert receiver.receive(groups, take, SOON) == 3  # type: ignore[type-var]
    assert not any(group.chunks for group in groups)
    return [view for _, view in shard.staged.views(staging)]


SHAPES = st.lists(st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple), min_size=1, max_size=4)


@st.composite
def slices_of(draw: st.DrawFn, shapes: Sequence[tuple[int, ...]]) -> list[Slice]:
    """Views of the tensors as models make them: parts along a dimension or two, transposed or not."""
    found = []
    for index, shape in enumerate(shapes):
        view = whole_slice(index, shape)
        for dim in draw(st.lists(st.integers(0, max(0, len(shape) - 1)), max_size=2)) if shape else ():
            start = draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, start, draw(st.integers(1, view.shape[dim] - start)))
        if len(shape) > 1 and draw(st.booleans()):
            order = draw(st.permutations(range(len(shape))))
            view = view._replace(
                shape=tuple(view.shape[dim] for dim in order), strides=tuple(view.strides[dim] for dim in order)
            )
        found.append(view)
    return draw(st.lists(st.sampled_from(found), min_size=1, max_size=4))


@settings(max_examples=150, deadline=None)
@given(st.data(), SHAPES, st.integers(1, 4), st.sampled_from([1, 64, 200, 1 << 20]))
def test_what_a_process_gets_of_all_ranks_is_what_it_needs(
    data: st.DataObject, shapes: list[tuple[int, ...]], ranks: int, most: int
) -> None:
    tensors = tensors_of(shapes)
    layout = WeightLayout.of(tensors)
    fractions = st.lists(st.floats(0, 1), min_size=ranks, max_size=ranks)
    sources = cut_rows(layout, [data.draw(fractions) for _ in shapes], ranks)
    check_sources(sources)
    needed = data.draw(slices_of(shapes))
    shard = data.draw(st.sampled_from([Shard.whole(layout), Shard(layout, tuple(needed))]))
    order = data.draw(st.permutations(range(ranks)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server_shards, "WEIGHT_CHUNK", most)
        there = received(shard, [snapshot_of(source, tensors) for source in sources], order)
    for each, view in zip(shard.slices, there, strict=True):
        assert torch.equal(view, each.of(tensors[each.tensor][1]))


def test_pieces_of_a_ranks_rows_are_no_larger_than_a_chunk_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_shards, "WEIGHT_CHUNK", 256)
    layout = WeightLayout.of(tensors_of([(40, 8), (3,), (40, 8)]))
    for source in cut_rows(layout, [[0.3, 0.3], [1.0, 1.0], [0.5, 0.9]], 3):
        sizes = [chunk.end - chunk.start for chunk in source.parts(Shard.whole(layout)).chunks()]
        assert sizes
        assert max(sizes) <= 256
        assert sum(sizes) <= source.own.bytes


@pytest.mark.parametrize("on_host", [False, True])
def test_a_whole_version_travels_at_once_unless_the_server_stages_on_its_host(
    on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_shards, "WEIGHT_CHUNK", 256)
    tensors = tensors_of([(40, 8), (3,), (40, 8)])
    layout = WeightLayout.of(tensors)
    source = RowSource(layout)
    buffer = torch.zeros(layout.bytes, dtype=torch.uint8)
    for (_, view), (_, tensor) in zip(layout.views(buffer), tensors, strict=True):
        view.copy_(tensor)
    snapshot, group = WeightSnapshot(3, source, buffer, {}, CPU), ListGroup()
    shard = Shard.whole(layout)
    TransferRoute(cast(Any, group), source.parts(shard), on_host).send(snapshot, ShardGatherer(CPU), SOON)
    assert (len(group.chunks) > 1) == on_host
    there = received(shard, [snapshot], [0], on_host)
    assert all(torch.equal(view, tensor) for view, (_, tensor) in zip(there, tensors, strict=True))


LAYOUT = WeightLayout((Parameter("a", "float32", (4, 2)), Parameter("b", "float32", ())))


@pytest.mark.parametrize(
    "rows",
    [[((0, 2), (0, 1)), ((3, 4), (1, 1))], [((0, 3), (0, 1)), ((2, 4), (1, 1))], [((0, 4), (0, 1)), ((4, 4), (0, 1))]],
    ids=["a row that nobody has", "a row that two have", "a number that two have"],
)
def test_ranks_that_do_not_have_each_row_once_are_refused(rows: list[tuple[Rows, ...]]) -> None:
    with pytest.raises(WeightSyncError, match="the trainer's ranks have rows"):
        check_sources([RowSource(LAYOUT, each) for each in rows])


@pytest.mark.parametrize(
    "source", [RowSource(LAYOUT), RowSource(LAYOUT, ((0, 4), (0, 1)), "GPU-1")], ids=["all", "rows"]
)
def test_a_source_survives_json(source: RowSource) -> None:
    again = RowSource.parse(LAYOUT, json.loads(json.dumps(source.plain())))
    assert (again.rows, again.gpu) == (source.rows, source.gpu)


@pytest.mark.parametrize("plain", [{"gpu": "", "rows": [[0, 1]]}, {"gpu": 1, "rows": []}, {"rows": [1]}, 7])
def test_a_malformed_source_is_refused(plain: object) -> None:
    with pytest.raises(WeightSyncError, match=r"the trainer has rows|malformed value"):
        RowSource.parse(LAYOUT, plain)


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("processes", range(1, 6))
def test_exchanges_in_the_order_of_both_sides_end_and_run_in_parallel(ranks: int, processes: int) -> None:
    """A rank sends to one process at a time, a process receives from one rank at a time, each in its order."""
    sends = [sending_order("a server/1", rank, ranks, processes) for rank in range(ranks)]
    takes = [receiving_order("a server/1", process, ranks, processes) for process in range(processes)]
    turns = 0
    while any(sends):
        ready = [(r, order[0]) for r, order in enumerate(sends) if order and takes[order[0]][0] == r]
        assert ready, "everybody waits for somebody"
        for rank, process in ready:
            sends[rank].pop(0)
            takes[process].pop(0)
        turns += 1
    assert not any(takes)
    assert turns == max(ranks, processes)
