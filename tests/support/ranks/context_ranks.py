"""What each rank runs for `test_context_parallel`: attention of its part of a line, against attention of the whole."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipeline.errors import ConfigError
from pipeline.train.batching import packing
from pipeline.train.model.context_parallel import ContextParallel
from pipeline.train.model.packed_attention import Segments, attend

HEADS = ((8, 4), (8, 8), (4, 1), (8, 2))
"""Query and key heads: as many key heads as ranks and more, and fewer."""
LENGTHS = (13, 7, 21, 9, 14)
SIZE = 16


def compare_attention(rank: int) -> None:
    dist.init_process_group("gloo")
    context = ContextParallel(dist.group.WORLD, rank, dist.get_world_size())
    for heads in HEADS:
        for packed in ("packed", "shared"):
            for window in (None, 4):
                compare(context, heads, packed, window)
    with pytest.raises(ConfigError, match=r"training\.mesh\.cp"):
        context.scatter_heads(*(torch.zeros(1, heads, 2, SIZE) for heads in (9, 3, 3)))
    dist.destroy_process_group()


def compare(context: ContextParallel, heads: tuple[int, int], how: packing.Packing, window: int | None) -> None:
    """The output and the gradients of queries, keys and values are those of one rank, in float64."""
    layout = layout_of(how, context)
    where, length = (layout.where if layout.packing == "shared" else None), len(layout.positions)
    draw = torch.Generator().manual_seed(3)
    whole = [torch.randn(1, h, length, SIZE, dtype=torch.float64, generator=draw) for h in (*heads, heads[1])]
    slope = torch.randn(1, length, heads[0], SIZE, dtype=torch.float64, generator=draw)
    part, cpu = context.own_part(length), torch.device("cpu")
    results = []
    for own, shared in ((slice(None), None), (part, context)):
        given = [x[:, :, own].clone().requires_grad_() for x in whole]
        segments = Segments.of(layout.lengths.tolist(), cpu, where, shared)
        attended, _ = attend(torch.nn.Identity(), *given, None, segments=segments, sliding_window=window)
        (attended * slope[:, own]).sum().backward()
        results.append([attended.detach().transpose(1, 2), *(x.grad for x in given if x.grad is not None)])
    alone, together = results
    assert len(alone) == len(together) == 4
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(other, one[:, :, part], rtol=1e-12, atol=1e-12)


def layout_of(how: packing.Packing, context: ContextParallel) -> packing.Layout:
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, 9, length).astype(np.int32) for length in LENGTHS]
    rows[1][:5], rows[4][:8] = rows[0][:5], rows[0][:8]
    layout = packing.make_layout(LENGTHS, how, packing.group_by_prefix(rows, how))
    assert layout.packing == how
    filled = packing.fill(layout, context.whole_length(len(layout.positions)))
    assert not len(filled.positions) % context.size
    return filled
