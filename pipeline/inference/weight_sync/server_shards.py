"""What one process of a server needs of the weights, and the chunks in which it gets them.

A tensor-parallel server splits its matrices and its vocabulary over its processes, so each needs a part of most
tensors. A process determines its part by recording the copies of vLLM's weight loaders (`copy_plan`). Here the part is
a list of strided slices of the trainer's tensors. Owns the order of the slices in the staging buffer of that process,
and their division into chunks. Trainer and server both use this module, so they cannot disagree. Must not know vLLM,
HTTP, or how bytes travel.

    shard = Shard.of(layout, slices)              # on the server, which publishes `shard.plain()` to the trainer
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
from pipeline.inference.weight_sync.byte_runs import ByteRun, merged_runs, span_of, window_span
from pipeline.inference.weight_sync.transports.gloo import Parameter, WeightLayout
from pipeline.topology.memory_budget import WEIGHT_CHUNK


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

    @property
    def is_contiguous(self) -> bool:
        """Whether the view's elements follow each other in the tensor's memory, in their order."""
        reach = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != reach:
                return False
            reach *= size
        return True

    def of(self, tensor: Tensor) -> Tensor:
        """This view of a contiguous tensor."""
        return tensor.as_strided(self.shape, self.strides, int(tensor.storage_offset()) + self.offset)

    def rows(self, first: int, last: int) -> "Slice":
        """Rows `first:last` of the view."""
        return self.narrow(0, first, last - first)

    def narrow(self, dim: int, start: int, size: int) -> "Slice":
        """Indices `start:start + size` of the view along a dimension."""
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return self._replace(offset=self.offset + start * self.strides[dim], shape=shape)


class Chunk(NamedTuple):
    """Bytes `start` to `end` of a staging buffer, and the slices that lie there, each with the byte where it begins."""

    start: int
    end: int
    slices: tuple[tuple[int, Slice], ...]


class Copies(NamedTuple):
    """How the slices of a chunk are copied: `runs` of contiguous bytes, and `strided` slices, each with its first byte
    in the chunk. Bytes of a run on the chunk's side count from its start."""

    runs: tuple[ByteRun, ...]
    strided: tuple[tuple[int, Slice], ...]


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
        """The slices without duplicates, in order; the whole layout if the slices are not smaller than that."""
        # Sorted, since both sides must have one order; as a set, since a process may copy a slice to two places.
        shard = cls(layout, tuple(sorted(set(slices))))
        return shard if shard.staged.bytes < layout.bytes else cls.whole(layout)

    @classmethod
    def parse(cls, layout: WeightLayout, plain: Sequence[Sequence[Any]]) -> "Shard":
        """Parse the value of `plain()`; `WeightSyncError` if it is malformed or does not fit the layout."""
        if not plain:
            return cls.whole(layout)
        try:
            slices = [Slice(int(at), int(offset), tuple(shape), tuple(strides)) for at, offset, shape, strides in plain]
        except (TypeError, ValueError) as error:
            raise WeightSyncError(f"the server asks for slices that cannot be read: {error}") from error
        for slice_ in slices:
            _check(layout, slice_)
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
        """The layout of the staging buffer: one contiguous tensor per slice."""
        named = ((self.layout.parameters[slice_.tensor], slice_) for slice_ in self.slices)
        return WeightLayout(
            tuple(Parameter(parameter.name, parameter.dtype, slice_.shape) for parameter, slice_ in named)
        )

    def find(self, requested: Iterable[Slice], staging: Tensor) -> Iterator[Tensor]:
        """The tensors of the requested slices in the staging buffer.

        The slices must be those of this shard; a whole shard has every slice.
        """
        views = [view for _, view in self.staged.views(staging)]
        if self.is_whole:
            return (slice_.of(views[slice_.tensor]) for slice_ in requested)
        view_of = dict(zip(self.slices, views, strict=True))
        return (view_of[slice_] for slice_ in requested)

    def chunks(self, at_once: bool) -> Iterator[Chunk]:
        """The shard in chunks that span at most `WEIGHT_CHUNK` bytes of the trainer's tensors each, or a single row;
        `at_once`, and whole: in one."""
        if at_once and self.is_whole:
            starts = zip(self.staged.offsets, self.slices, strict=False)
            return iter([Chunk(0, self.staged.bytes, tuple(starts))])
        return iter(self._pieces)

    def gathering(self, chunk: Chunk) -> Copies:
        """The copies from a buffer of the layout into a chunk."""
        span = chunk.start, chunk.end
        if span not in self._gathered:
            self._gathered[span] = self._gathering(chunk)
        return self._gathered[span]

    @cached_property
    def _gathered(self) -> dict[tuple[int, int], Copies]:
        return {}

    def _gathering(self, chunk: Chunk) -> Copies:
        contiguous, strided = [], []
        for at, slice_ in chunk.slices:
            if (source := span_of(self.layout, slice_)) is None:
                strided.append((at - chunk.start, slice_))
            elif source.size:
                target = window_span(self.staged, at, source.size)
                contiguous.append((source, target._replace(start=at - chunk.start)))
        return Copies(merged_runs(contiguous), tuple(strided))

    @cached_property
    def _pieces(self) -> tuple[Chunk, ...]:
        return tuple(self._cut())

    def _cut(self) -> Iterator[Chunk]:
        held: list[tuple[int, Slice]] = []
        span = 0
        for at, part in self._parts():
            # The span, not the elements, bounds a chunk: the sender gathers from a copy of all that the slice spans.
            size = part.span * self.width(part)
            if held and span + size > WEIGHT_CHUNK:
                yield self._chunk(held)
                held, span = [], 0
            held.append((at, part))
            span += size
        if held:
            yield self._chunk(held)

    def width(self, slice_: Slice) -> int:
        """Bytes of an element."""
        return self.layout.parameters[slice_.tensor].width

    def _chunk(self, held: Sequence[tuple[int, Slice]]) -> Chunk:
        at, last = held[-1]
        return Chunk(held[0][0], at + last.elements * self.width(last), tuple(held))

    def _parts(self) -> Iterator[tuple[int, Slice]]:
        """Each slice with its first byte in the staging buffer; runs of rows for a slice larger than a chunk."""
        for start, slice_ in zip(self.staged.offsets, self.slices, strict=False):
            rows, width = _rows_of_a_chunk(slice_, self.width(slice_)), self.width(slice_)
            if rows is None:
                yield start, slice_
                continue
            for first in range(0, slice_.shape[0], rows):
                part = slice_.rows(first, min(first + rows, slice_.shape[0]))
                yield start + first * prod(slice_.shape[1:]) * width, part


def whole_slice(tensor: int, shape: tuple[int, ...]) -> Slice:
    """All of a tensor of this shape."""
    return Slice(tensor, 0, shape, tuple(prod(shape[dim + 1 :]) for dim in range(len(shape))))


def _rows_of_a_chunk(slice_: Slice, width: int) -> int | None:
    """The number of rows of a slice that fit into a chunk.

    None if the slice fits as a whole, or if its first dimension is not the outermost in the tensor's memory: then
    a run of rows spans as much memory as the whole slice.
    """
    fits = slice_.span * width <= WEIGHT_CHUNK
    # A transposed slice has its largest stride in another dimension: each of its rows spans the whole slice.
    if fits or not any(slice_.strides) or slice_.strides[0] < max(slice_.strides):
        return None
    return max(1, WEIGHT_CHUNK // (slice_.strides[0] * width))


def _check(layout: WeightLayout, slice_: Slice) -> None:
    if not 0 <= slice_.tensor < len(layout.parameters):
        raise WeightSyncError(f"the server asks for tensor {slice_.tensor} of {len(layout.parameters)}")
    parameter = layout.parameters[slice_.tensor]
    positive = min((slice_.offset, *slice_.shape, *slice_.strides)) >= 0 and len(slice_.shape) == len(slice_.strides)
    if not positive or slice_.offset + slice_.span > prod(parameter.shape):
        raise WeightSyncError(f"the server asks for {tuple(slice_)}, which {parameter.name!r} does not have")
