"""What one process of a server needs of the weights, and the chunks in which it gets them.

A tensor-parallel server splits its matrices and its vocabulary over its processes, so each needs a part of most
tensors. Which part, a process finds out by recording its copies (`copies`); here it is written down as strided slices
of the trainer's tensors. Owns the order of the slices in the staging buffer of that process, and how they are cut into
chunks. Trainer and server both use this module, so they cannot disagree. Must not know vLLM, HTTP, or how bytes travel.

    shard = Shard.of(layout, slices)              # the server's; it tells the trainer `shard.plain()`
    for chunk in shard.chunks(at_once=False):     # both sides, in this order
        staging[chunk.start : chunk.end]          # where the bytes of `chunk.slices` belong
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync.transports.gloo import Parameter, WeightLayout
from pipeline.topology.gpu_memory import WEIGHT_CHUNK


class Slice(NamedTuple):
    """A strided view of one tensor.

    Attributes:
        tensor: its index in the layout.
        offset: of the view's first element in the tensor, in elements; `strides` likewise.
        shape: of the view.
    """

    tensor: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def span(self) -> int:
        """Elements of the tensor from the view's first to its last, both included."""
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return reach + 1 if self.elements else 0

    def of(self, tensor: Tensor) -> Tensor:
        """This view of the tensor, which is contiguous."""
        return tensor.as_strided(self.shape, self.strides, int(tensor.storage_offset()) + self.offset)

    def rows(self, first: int, last: int) -> "Slice":
        """The view's rows from `first` on, without `last`."""
        return self.narrow(0, first, last - first)

    def narrow(self, dim: int, start: int, size: int) -> "Slice":
        """The view's places `start` and on along a dimension."""
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return self._replace(offset=self.offset + start * self.strides[dim], shape=shape)


class Chunk(NamedTuple):
    """Bytes `start` to `end` of a staging buffer, and the slices that lie there, each with the byte where it begins."""

    start: int
    end: int
    slices: tuple[tuple[int, Slice], ...]


@dataclass(frozen=True)
class Shard:
    """Slices of the tensors of `layout`. In the staging buffer each is a contiguous tensor, in this order."""

    layout: WeightLayout
    slices: tuple[Slice, ...]

    @classmethod
    def whole(cls, layout: WeightLayout) -> "Shard":
        """Every tensor, whole: the staging buffer is what the trainer packs."""
        return cls(layout, tuple(whole_slice(index, p.shape) for index, p in enumerate(layout.parameters)))

    @classmethod
    def of(cls, layout: WeightLayout, slices: Iterable[Slice]) -> "Shard":
        """These slices, each once; the whole layout, if that is no larger."""
        shard = cls(layout, tuple(sorted(set(slices))))
        return shard if shard.staged.bytes < layout.bytes else cls.whole(layout)

    @classmethod
    def parse(cls, layout: WeightLayout, plain: Sequence[Sequence[Any]]) -> "Shard":
        """The shard that `plain()` wrote; `WeightSyncError` if it is not one of this layout."""
        if not plain:
            return cls.whole(layout)
        try:
            slices = [Slice(int(at), int(offset), tuple(shape), tuple(strides)) for at, offset, shape, strides in plain]
        except (TypeError, ValueError) as error:
            raise WeightSyncError(f"the server asks for slices that cannot be read: {error}") from error
        for each in slices:
            _check(layout, each)
        return cls(layout, tuple(slices))

    def plain(self) -> list[Slice]:
        """The slices as values that JSON holds; none for the whole layout."""
        return [] if self.is_whole else list(self.slices)

    @cached_property
    def is_whole(self) -> bool:
        """Whether this is the whole layout."""
        return self.slices == Shard.whole(self.layout).slices

    @cached_property
    def staged(self) -> WeightLayout:
        """The staging buffer, each slice as a tensor of its own."""
        named = ((self.layout.parameters[each.tensor], each) for each in self.slices)
        return WeightLayout(tuple(Parameter(parameter.name, parameter.dtype, each.shape) for parameter, each in named))

    def find(self, wanted: Iterable[Slice], staging: Tensor) -> Iterator[Tensor]:
        """Each of these slices in the staging buffer; they are this shard's, or any if the shard is whole."""
        views = [view for _, view in self.staged.views(staging)]
        if self.is_whole:
            return (each.of(views[each.tensor]) for each in wanted)
        place = dict(zip(self.slices, views, strict=True))
        return (place[each] for each in wanted)

    def chunks(self, at_once: bool) -> Iterator[Chunk]:
        """The shard in chunks that span at most `WEIGHT_CHUNK` bytes of the trainer's tensors each, or a single row;
        `at_once`, and whole: in one."""
        if at_once and self.is_whole:
            starts = zip(self.staged.offsets, self.slices, strict=False)
            yield Chunk(0, self.staged.bytes, tuple(starts))
            return
        held: list[tuple[int, Slice]] = []
        span = 0
        for at, part in self._parts():
            size = part.span * self.width(part)
            if held and span + size > WEIGHT_CHUNK:
                yield self._chunk(held)
                held, span = [], 0
            held.append((at, part))
            span += size
        if held:
            yield self._chunk(held)

    def width(self, each: Slice) -> int:
        """Bytes of an element."""
        return self.layout.parameters[each.tensor].width

    def _chunk(self, held: Sequence[tuple[int, Slice]]) -> Chunk:
        at, last = held[-1]
        return Chunk(held[0][0], at + last.elements * self.width(last), tuple(held))

    def _parts(self) -> Iterator[tuple[int, Slice]]:
        """Each slice, or its rows where it spans more than a chunk may; with the byte where they begin."""
        for start, each in zip(self.staged.offsets, self.slices, strict=False):
            rows, width = _rows_of_a_chunk(each, self.width(each)), self.width(each)
            if rows is None:
                yield start, each
                continue
            for first in range(0, each.shape[0], rows):
                part = each.rows(first, min(first + rows, each.shape[0]))
                yield start + first * prod(each.shape[1:]) * width, part


def whole_slice(tensor: int, shape: tuple[int, ...]) -> Slice:
    """All of a tensor of this shape."""
    return Slice(tensor, 0, shape, tuple(prod(shape[place + 1 :]) for place in range(len(shape))))


def _rows_of_a_chunk(each: Slice, width: int) -> int | None:
    """How many rows of a slice a chunk may have; None if the slice goes into one, or its rows do not lie one after
    another in the tensor."""
    fits = each.span * width <= WEIGHT_CHUNK
    if fits or not any(each.strides) or each.strides[0] < max(each.strides):
        return None
    return max(1, WEIGHT_CHUNK // (each.strides[0] * width))


def _check(layout: WeightLayout, each: Slice) -> None:
    if not 0 <= each.tensor < len(layout.parameters):
        raise WeightSyncError(f"the server asks for tensor {each.tensor} of {len(layout.parameters)}")
    parameter = layout.parameters[each.tensor]
    positive = min((each.offset, *each.shape, *each.strides)) >= 0 and len(each.shape) == len(each.strides)
    if not positive or each.offset + each.span > prod(parameter.shape):
        raise WeightSyncError(f"the server asks for {tuple(each)}, which {parameter.name!r} does not have")
