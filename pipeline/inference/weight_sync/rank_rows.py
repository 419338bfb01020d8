"""Which rows of the weights each trainer rank sends, and what a process of a server gets from each of them.

Every rank of the trainer that sends has some rows of each tensor, and all ranks together have each row once. A process
of a server needs slices (`server_shards`). What travels between the two is where the slices and the rows meet: slices
again, of the rank's rows on one side, and of the slices' places in the staging buffer on the other. Owns that
arithmetic, and the order of the exchanges. Trainer and server both use this module, so they cannot disagree. Must not
know vLLM, HTTP, or how bytes travel.

    source = RowSource(layout, rows)
    parts = source.parts(shard)                          # both sides
    for chunk in parts.shard.chunks(at_once=False):      # of the rank's own rows, in the order in which they are sent
        for at, target in parts.places(chunk): ...
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
from pipeline.inference.weight_sync.server_shards import Chunk, Shard, Slice, whole_slice
from pipeline.inference.weight_sync.transports.gloo import Parameter, WeightLayout

Rows = tuple[int, int]
"""The first row, and the one after the last. A tensor without dimensions is one row."""


class _PlainSource(msgspec.Struct, frozen=True, kw_only=True):
    """A source as JSON has it; no `rows`: all of them."""

    gpu: str
    rows: list[Rows]


@dataclass(frozen=True, eq=False)
class RowSource:
    """One rank that sends.

    Attributes:
        layout: all tensors.
        rows: of each tensor, those that the rank has; None: all of all tensors.
        gpu: from which it sends, as `gpu_of` says it; "" for a CPU.
    """

    layout: WeightLayout
    rows: tuple[Rows, ...] | None = None
    gpu: str = ""

    @classmethod
    def parse(cls, layout: WeightLayout, plain: Any) -> "RowSource":
        """The source whose `plain()` this is; `WeightSyncError` for anything else."""
        try:
            source = msgspec.convert(plain, _PlainSource)
        except msgspec.ValidationError as error:
            raise WeightSyncError(f"the trainer says of a rank what cannot be read: {error}") from error
        if source.rows and len(source.rows) != len(layout.parameters):
            raise WeightSyncError(f"the trainer has rows of {len(source.rows)} of {len(layout.parameters)} tensors")
        return cls(layout, tuple(source.rows) or None, source.gpu)

    def plain(self) -> dict[str, Any]:
        """The source without its layout, as values that JSON holds."""
        return {"gpu": self.gpu, "rows": list(self.rows or ())}

    @cached_property
    def own(self) -> WeightLayout:
        """The rank's rows, as tensors of their own; there is an empty one where it has none."""
        if self.rows is None:
            return self.layout
        each = zip(self.layout.parameters, self.rows, strict=True)
        return WeightLayout(tuple(Parameter(p.name, p.dtype, _shape(p.shape, rows)) for p, rows in each))

    def rows_of(self, tensor: int) -> Rows:
        """The rank's rows of a tensor."""
        return (0, _count(self.layout.parameters[tensor].shape)) if self.rows is None else self.rows[tensor]

    def parts(self, shard: Shard) -> "RowParts":
        """What a process that needs `shard` gets from this rank."""
        if self.rows is None:
            pairs = [(each, whole_slice(place, each.shape)) for place, each in enumerate(shard.slices)]
        elif shard.is_whole:
            pairs = [(whole_slice(at, p.shape), self._rows_in(at)) for at, p in enumerate(self.own.parameters)]
        else:
            pairs = [pair for place, each in enumerate(shard.slices) for pair in self._meeting(place, each)]
        return RowParts(Shard(self.own, tuple(here for here, _ in pairs)), tuple(there for _, there in pairs))

    def _rows_in(self, tensor: int) -> Slice:
        """This rank's rows of a tensor that is whole."""
        first, _ = self._elements(tensor)
        return whole_slice(tensor, self.own.parameters[tensor].shape)._replace(offset=first)

    def _meeting(self, place: int, each: Slice) -> Iterator[tuple[Slice, Slice]]:
        """Where a slice, number `place` of its shard, and this rank's rows meet."""
        first, last = self._elements(each.tensor)
        for here, there in _within(each, whole_slice(place, each.shape), first, last):
            yield here._replace(offset=here.offset - first), there

    def _elements(self, tensor: int) -> Rows:
        """This rank's rows of a tensor, as its first element and the one after the last."""
        width = prod(self.layout.parameters[tensor].shape[1:])
        first, last = self.rows_of(tensor)
        return first * width, last * width


@dataclass(frozen=True, eq=False)
class RowParts:
    """What a process gets from one rank.

    Attributes:
        shard: of the rank's own rows.
        targets: for each of its slices, where it belongs: a slice of the tensors in the staging buffer.
    """

    shard: Shard
    targets: tuple[Slice, ...]

    def chunks(self, at_once: bool = False) -> Iterator[Chunk]:
        """The rank's part in the pieces in which it travels (`Shard.chunks`)."""
        return (chunk for chunk in self.shard.chunks(at_once) if at_once or chunk.start < chunk.end)

    def places(self, chunk: Chunk) -> Iterator[tuple[int, Slice]]:
        """For each slice of a chunk, the byte of `chunk` where it begins, and where it belongs."""
        for at, part in chunk.slices:
            if not part.elements:
                continue
            number = self._number(at)
            target, whole = self.targets[number], self.shard.slices[number]
            if part.shape != whole.shape:
                row = prod(part.shape[1:]) * self.shard.width(part)
                first = (at - self.shard.staged.offsets[number]) // row
                target = target.rows(first, first + part.shape[0])
            yield at - chunk.start, target

    def _number(self, at: int) -> int:
        """The slice that has this byte; empty ones before it begin there too."""
        return bisect_right(self.shard.staged.offsets, at, hi=len(self.shard.slices)) - 1


def check_sources(sources: Sequence[RowSource]) -> None:
    """`WeightSyncError` unless these have every row of their layout once."""
    layout = sources[0].layout
    for index, parameter in enumerate(layout.parameters):
        held = sorted(rows for rows in (source.rows_of(index) for source in sources) if rows[0] < rows[1])
        ends = [0, *(last for _, last in held)]
        if [*(first for first, _ in held), _count(parameter.shape)] != ends:
            raise WeightSyncError(f"the trainer's ranks have rows {held} of {parameter.name!r} {parameter.shape}")


def sending_order(group: str, source: int, ranks: int, processes: int) -> list[int]:
    """The processes of a server, in the order in which rank number `source` of `ranks` sends to them.

    At each turn a rank sends to one process and a process receives from one rank, so all of them work at once, and none
    waits for one that waits for it. Servers, by the name of their group, begin with different ranks.

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
    """The parts of `here` whose elements are `first` to `last` of the tensor, and what is in their place in `there`,
    which has the same shape."""
    begin, end = here.offset, here.offset + here.span
    if end <= first or last <= begin or first == last:
        return
    if first <= begin and end <= last:
        yield here, there
        return
    dim = max(range(len(here.shape)), key=lambda d: (here.shape[d] > 1, here.strides[d]))
    stride, size = here.strides[dim], here.shape[dim]
    inner = here.narrow(dim, 0, 1).span
    low = min(size, max(0, -((begin - first) // stride)))  # the first that is all in, if any is
    high = max(low, min(size, (last - begin - inner) // stride + 1))
    reached = range(max(0, (first - begin - inner) // stride + 1), min(size, -((begin - last) // stride)))
    if low < high:
        yield here.narrow(dim, low, high - low), there.narrow(dim, low, high - low)
    for index in (index for index in reached if not low <= index < high):
        yield from _within(here.narrow(dim, index, 1), there.narrow(dim, index, 1), first, last)
