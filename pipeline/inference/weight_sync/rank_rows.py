"""Which rows of the weights each trainer rank sends, and what a process of a server gets from each of them.

Every sending rank of the trainer has some rows of each tensor, and all ranks together have each row once. A process of
a server needs slices (`server_shards`). The rank sends the intersection of its rows with these slices. The intersection
consists of slices again: slices of the rank's rows on the sender's side, and slices of the staging buffer's tensors on
the receiver's side. Both sides compute both lists from the rows and slices that they exchanged when they met, so the
messages with the bytes need no description of their contents. Owns that arithmetic and the order of the exchanges.
Must not know vLLM, HTTP, or how bytes travel.

    source = RowSource(layout, rows)
    parts = source.parts(shard)                          # both sides
    for chunk in parts.chunks():                         # of the rank's own rows, in the order in which they are sent
        for at, target in parts.targets_of(chunk): ...   # byte in the chunk, slice of the staging buffer
"""

import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import msgspec

from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync.byte_runs import merged_runs, span_of, window_span
from pipeline.inference.weight_sync.server_shards import Chunk, Copies, Shard, Slice, whole_slice
from pipeline.inference.weight_sync.transports.gloo import Parameter, WeightLayout

Rows = tuple[int, int]
"""The first row, and the one after the last. A tensor without dimensions is one row."""


class _PlainSource(msgspec.Struct, frozen=True, kw_only=True):
    """A source as JSON; an empty `rows` stands for all rows."""

    gpu: str
    rows: list[Rows]


@dataclass(frozen=True, eq=False)
class RowSource:
    """One sending rank.

    Attributes:
        layout: all tensors of the model.
        rows: the rank's rows of each tensor; None: all rows of all tensors.
        gpu: the UUID of its GPU (`gpu_of`); "" for a CPU.
    """

    layout: WeightLayout
    rows: tuple[Rows, ...] | None = None
    gpu: str = ""

    @classmethod
    def parse(cls, layout: WeightLayout, plain: Any) -> "RowSource":
        """Parse the value of `plain()`; `WeightSyncError` if it is malformed."""
        try:
            source = msgspec.convert(plain, _PlainSource)
        except msgspec.ValidationError as error:
            raise WeightSyncError(f"the trainer described one of its ranks by a malformed value: {error}") from error
        if source.rows and len(source.rows) != len(layout.parameters):
            raise WeightSyncError(f"the trainer has rows of {len(source.rows)} of {len(layout.parameters)} tensors")
        return cls(layout, tuple(source.rows) or None, source.gpu)

    def plain(self) -> dict[str, Any]:
        """The source without its layout, as values that JSON holds."""
        return {"gpu": self.gpu, "rows": list(self.rows or ())}

    @cached_property
    def own(self) -> WeightLayout:
        """The layout of the rank's rows: one tensor per tensor of the model, empty where the rank has no row."""
        if self.rows is None:
            return self.layout
        pairs = zip(self.layout.parameters, self.rows, strict=True)
        return WeightLayout(tuple(Parameter(p.name, p.dtype, _shape(p.shape, rows)) for p, rows in pairs))

    def rows_of(self, tensor: int) -> Rows:
        """The rank's rows of a tensor."""
        return (0, _count(self.layout.parameters[tensor].shape)) if self.rows is None else self.rows[tensor]

    def parts(self, shard: Shard) -> "RowParts":
        """What a process that needs `shard` gets from this rank."""
        if self.rows is None:
            pairs = [(needed, whole_slice(index, needed.shape)) for index, needed in enumerate(shard.slices)]
        elif shard.is_whole:
            pairs = [(whole_slice(at, p.shape), self._rows_in(at)) for at, p in enumerate(self.own.parameters)]
        else:
            pairs = [pair for index, needed in enumerate(shard.slices) for pair in self._meeting(index, needed)]
        return RowParts(Shard(self.own, tuple(here for here, _ in pairs)), tuple(there for _, there in pairs))

    def _rows_in(self, tensor: int) -> Slice:
        """This rank's rows of a tensor that is whole."""
        first, _ = self._elements(tensor)
        return whole_slice(tensor, self.own.parameters[tensor].shape)._replace(offset=first)

    def _meeting(self, index: int, needed: Slice) -> Iterator[tuple[Slice, Slice]]:
        """Where a slice, number `index` of its shard, and this rank's rows meet."""
        first, last = self._elements(needed.tensor)
        for here, there in _within(needed, whole_slice(index, needed.shape), first, last):
            yield here._replace(offset=here.offset - first), there

    def _elements(self, tensor: int) -> Rows:
        """This rank's rows of a tensor, as its first element and the one after the last."""
        width = prod(self.layout.parameters[tensor].shape[1:])
        first, last = self.rows_of(tensor)
        return first * width, last * width


@dataclass(frozen=True, eq=False)
class RowParts:
    """What a server's process receives from one rank.

    Attributes:
        shard: slices of the rank's own rows.
        targets: for each of these slices, its destination: a slice of a tensor in the staging buffer.
    """

    shard: Shard
    targets: tuple[Slice, ...]

    def chunks(self, at_once: bool = False) -> Iterator[Chunk]:
        """The rank's part in the pieces in which it travels (`Shard.chunks`)."""
        return (chunk for chunk in self.shard.chunks(at_once) if at_once or chunk.start < chunk.end)

    def scattering(self, chunk: Chunk, staging: WeightLayout) -> Copies:
        """The copies from a chunk into the staging buffer, of this layout."""
        contiguous, strided = [], []
        for at, target in self.targets_of(chunk):
            span = span_of(staging, target)
            if span is None:
                strided.append((at, target))
            else:
                source = window_span(self.shard.staged, chunk.start + at, span.size)
                contiguous.append((source._replace(start=at), span))
        return Copies(merged_runs(contiguous), tuple(strided))

    def targets_of(self, chunk: Chunk) -> Iterator[tuple[int, Slice]]:
        """For each slice of a chunk, its first byte in the chunk and its destination in the staging buffer."""
        for at, part in chunk.slices:
            if not part.elements:
                continue
            number = self._number(at)
            target, whole = self.targets[number], self.shard.slices[number]
            # A slice larger than a chunk was cut into runs of rows: its destination is the same run of `target`.
            if part.shape != whole.shape:
                row = prod(part.shape[1:]) * self.shard.width(part)
                first = (at - self.shard.staged.offsets[number]) // row
                target = target.rows(first, first + part.shape[0])
            yield at - chunk.start, target

    def _number(self, at: int) -> int:
        """The index of the slice with this byte; empty slices in front of it begin at the same byte."""
        return bisect_right(self.shard.staged.offsets, at, hi=len(self.shard.slices)) - 1


def check_sources(sources: Sequence[RowSource]) -> None:
    """Raise `WeightSyncError` unless the sources together have every row of their layout exactly once."""
    layout = sources[0].layout
    for index, parameter in enumerate(layout.parameters):
        held = sorted(rows for rows in (source.rows_of(index) for source in sources) if rows[0] < rows[1])
        ends = [0, *(last for _, last in held)]
        if [*(first for first, _ in held), _count(parameter.shape)] != ends:
            raise WeightSyncError(f"the trainer's ranks have rows {held} of {parameter.name!r} {parameter.shape}")


def sending_order(group: str, source: int, ranks: int, processes: int) -> list[int]:
    """The processes of a server, in the order in which rank number `source` of `ranks` sends to them.

    At each turn a rank sends to one process and a process receives from one rank (a cyclic
    Latin square). So all links work in parallel and no cycle of waits is possible. The hash of the group's name makes
    different servers begin with different ranks.

        >>> [sending_order("", source, 3, 2) for source in range(3)]
        [[0, 1], [1, 0], [0, 1]]
        >>> [receiving_order("", process, 3, 2) for process in range(2)]
        [[0, 2, 1], [1, 0, 2]]
    """
    return sorted(range(processes), key=lambda process: _turn(group, source, process, max(ranks, processes)))


def receiving_order(group: str, process: int, ranks: int, processes: int) -> list[int]:
    """The numbers of the ranks, in the order in which a process of a server receives from them: see `sending_order`."""
    return sorted(range(ranks), key=lambda source: _turn(group, source, process, max(ranks, processes)))


def _turn(group: str, source: int, process: int, members: int) -> int:
    return (zlib.crc32(group.encode()) + process - source) % members


def _count(shape: tuple[int, ...]) -> int:
    """How many rows a tensor of this shape has."""
    return shape[0] if shape else 1


def _shape(whole: tuple[int, ...], rows: Rows) -> tuple[int, ...]:
    count = rows[1] - rows[0]
    if whole:
        return (count, *whole[1:])
    return () if count else (0,)


def _within(here: Slice, there: Slice, first: int, last: int) -> Iterator[tuple[Slice, Slice]]:
    """The parts of `here` whose elements lie in `first:last` of the flat tensor, each with the same part of `there`.

    `here` and `there` have the same shape and different strides. Cuts `here` along its dimension of the largest stride:
    every index is completely inside, partly inside, or outside. Partial indices are cut again along the next dimension.
    """
    begin, end = here.offset, here.offset + here.span
    if end <= first or last <= begin or first == last:
        return
    if first <= begin and end <= last:
        yield here, there
        return
    dim = max(range(len(here.shape)), key=lambda d: (here.shape[d] > 1, here.strides[d]))
    stride, size = here.strides[dim], here.shape[dim]
    inner = here.narrow(dim, 0, 1).span
    # Index i covers the elements from begin + i * stride up to begin + i * stride + inner; -(-a // b) rounds a / b up.
    low = min(size, max(0, -((begin - first) // stride)))  # first index that is completely inside
    high = max(low, min(size, (last - begin - inner) // stride + 1))
    reached = range(max(0, (first - begin - inner) // stride + 1), min(size, -((begin - last) // stride)))
    if low < high:
        yield here.narrow(dim, low, high - low), there.narrow(dim, low, high - low)
    for index in (index for index in reached if not low <= index < high):
        yield from _within(here.narrow(dim, index, 1), there.narrow(dim, index, 1), first, last)
