"""Copies of slices are merged, and write what they would write one by one."""

from random import Random

import pytest
import torch

from pipeline.inference.weight_sync.byte_runs import merged_runs, span_of
from pipeline.inference.weight_sync.rank_rows import RowSource
from pipeline.inference.weight_sync.server_shards import Shard, Slice, whole_slice
from pipeline.inference.weight_sync.transports.gloo import ALIGNMENT, Parameter, WeightLayout


def layout_of(*shapes: tuple[int, ...]) -> WeightLayout:
    return WeightLayout(tuple(Parameter(str(at), "bfloat16", shape) for at, shape in enumerate(shapes)))


def random_slices(layout: WeightLayout, random: Random) -> list[Slice]:
    """Some of the tensors: whole, some of their rows, or some of their columns."""
    slices = []
    for index, parameter in enumerate(layout.parameters):
        slice_ = whole_slice(index, parameter.shape)
        dim = random.randrange(len(parameter.shape))
        start = random.randrange(parameter.shape[dim])
        part = slice_.narrow(dim, start, random.randint(1, parameter.shape[dim] - start))
        slices += random.choice([[slice_], [slice_], [part], []])
    return slices


@pytest.mark.parametrize("seed", range(200))
def test_merged_copies_write_the_same_and_no_byte_of_another_tensor(seed: int) -> None:
    random = Random(seed)
    shapes = [(random.randint(1, 6), random.choice([1, 3, 32, 64])) for _ in range(random.randint(1, 12))]
    source = layout_of(*shapes)
    slices = [each for each in random_slices(source, random) if each.is_contiguous]
    gaps = [(random.randint(1, 3),) for _ in slices]  # tensors of the target between those of the slices
    kept = [random.random() < 0.8 for _ in slices]
    target_shapes, places = list[tuple[int, ...]](), list[Slice]()
    for slice_, gap, follows in zip(slices, gaps, kept, strict=True):
        target_shapes += [] if follows else [gap]
        places.append(whole_slice(len(target_shapes), slice_.shape))
        target_shapes.append(slice_.shape)
    target = layout_of(*target_shapes)
    pairs = [(span_of(source, here), span_of(target, there)) for here, there in zip(slices, places, strict=True)]
    spans = [(here, there) for here, there in pairs if here is not None and there is not None]
    assert len(spans) == len(slices)
    sent = torch.randint(1, 255, (source.bytes,), dtype=torch.uint8)
    one_by_one = torch.zeros(target.bytes, dtype=torch.uint8)
    merged = one_by_one.clone()
    for here, there in spans:
        one_by_one[there.start : there.end] = sent[here.start : here.end]
    for run in merged_runs(spans):
        merged[run.target : run.target + run.size] = sent[run.source : run.source + run.size]
    for index, parameter in enumerate(target.parameters):
        begin = target.offsets[index]
        assert torch.equal(merged[begin : begin + parameter.bytes], one_by_one[begin : begin + parameter.bytes])


def test_the_experts_of_a_mixture_are_a_few_copies() -> None:
    experts, layers = 16, 4
    layer = [(8, 16), *((4, 16),) * 2 * experts]
    layout = layout_of(*layer * layers)
    half = [whole_slice(at, shape) for at, shape in enumerate(layer * layers) if 0 < at % len(layer) <= experts]
    shard = Shard(layout, tuple(half))
    parts = RowSource(layout).parts(shard)
    (chunk,) = parts.chunks()
    assert len(shard.slices) == experts * layers
    assert len(shard.gathering(chunk).runs) == layers
    assert len(parts.scattering(chunk, shard.staged).runs) == 1


def test_slices_that_are_contiguous_are_recognized() -> None:
    tensor = torch.arange(24).view(2, 3, 4)
    whole = whole_slice(0, (2, 3, 4))
    for slice_ in (whole, whole.narrow(0, 1, 1), whole.narrow(1, 1, 2), whole.narrow(2, 0, 1), whole.narrow(0, 0, 0)):
        assert slice_.is_contiguous == slice_.of(tensor).is_contiguous()
    assert not Slice(0, 0, (4, 3), (1, 4)).is_contiguous
    assert Slice(0, 5, (), ()).is_contiguous


def test_the_unused_bytes_between_two_tensors_are_part_of_a_run_only_if_both_are_whole() -> None:
    source = layout_of((3,), (3,), (3,))
    first, second = (span_of(source, whole_slice(at, (3,))) for at in (0, 1))
    assert first is not None
    assert second is not None
    assert merged_runs([(first, first), (second, second)]) == ((0, 0, ALIGNMENT + 6),)
    part = second._replace(size=4, ends=False)
    third = span_of(source, whole_slice(2, (3,)))
    assert third is not None
    assert len(merged_runs([(part, part), (third, third)])) == 2
    assert len(merged_runs([(first, first), (third, third)])) == 2
