"""Copies of slices between two byte buffers, merged into as few as possible.

Owns the rule by which copies are merged. A mixture of experts has thousands of tensors, and each copy costs Python tens
of microseconds, more where the trainer's threads compete for the interpreter: most slices are contiguous and lie next
to each other in both buffers. Promises that a merged copy writes no byte of a tensor that it does not copy: only the
unused bytes between two tensors, up to the next multiple of `ALIGNMENT`. Must not know where the buffers are.

    runs = merged_runs([(span_of(layout, slice_), window_span(staged, at, size)), …])
    for run in runs:
        target[run.target : run.target + run.size].copy_(source[run.source : run.source + run.size])
"""

from bisect import bisect_right
from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from pipeline.inference.weight_sync.transports.gloo import ALIGNMENT, WeightLayout

if TYPE_CHECKING:
    from pipeline.inference.weight_sync.server_shards import Slice


class ByteRun(NamedTuple):
    """`size` bytes from `source` of one buffer to `target` of the other."""

    source: int
    target: int
    size: int


class ByteSpan(NamedTuple):
    """Contiguous bytes of one tensor in a buffer: whether they begin with its first byte, and end with its last."""

    start: int
    size: int
    begins: bool
    ends: bool

    @property
    def end(self) -> int:
        return self.start + self.size


def span_of(layout: WeightLayout, slice_: "Slice") -> ByteSpan | None:
    """The bytes of a slice in a buffer of the layout; None if they are not contiguous."""
    if not slice_.is_contiguous:
        return None
    parameter, elements = layout.parameters[slice_.tensor], slice_.elements
    start = layout.offsets[slice_.tensor] + slice_.offset * parameter.width
    ends = slice_.offset + elements == prod(parameter.shape)
    return ByteSpan(start, elements * parameter.width, slice_.offset == 0, ends)


def window_span(layout: WeightLayout, start: int, size: int) -> ByteSpan:
    """The bytes `start` to `start + size` of a buffer of the layout, which lie in one tensor."""
    # Empty tensors in front of it begin at the same byte.
    number = bisect_right(layout.offsets, start, hi=len(layout.parameters)) - 1
    first = layout.offsets[number]
    return ByteSpan(start, size, start == first, start + size == first + layout.parameters[number].bytes)


def merged_runs(spans: Iterable[tuple[ByteSpan, ByteSpan]]) -> tuple[ByteRun, ...]:
    """The copies of these spans, from the first of each pair to the second."""
    runs: list[ByteRun] = []
    last: tuple[ByteSpan, ByteSpan] | None = None
    for source, target in spans:
        if last is not None and _may_join(last, (source, target)):
            runs[-1] = runs[-1]._replace(size=source.end - runs[-1].source)
        else:
            runs.append(ByteRun(source.start, target.start, source.size))
        last = source, target
    return tuple(runs)


def _may_join(before: tuple[ByteSpan, ByteSpan], after: tuple[ByteSpan, ByteSpan]) -> bool:
    gaps = {then.start - first.end for first, then in zip(before, after, strict=True)}
    if gaps == {0}:
        return True
    if len(gaps) > 1 or not 0 < min(gaps) < ALIGNMENT:
        return False
    return all(span.ends for span in before) and all(span.begins for span in after)
