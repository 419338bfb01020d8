"""Long rows of a packed line, attended one at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipeline.train.model import long_rows
from pipeline.train.model.long_rows import attend_long_rows, padded_length, takes_long_rows
from pipeline.train.model.packed_attention import Segments, attend

LENGTHS = [3, 40, 17, 1, 2, 64, 5]


def draw(heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    sizes = (heads, key_heads, key_heads)
    query, key, value = (torch.randn(sum(LENGTHS), size, 16, dtype=torch.float64, requires_grad=True) for size in sizes)
    return query, key, value


@pytest.mark.parametrize("key_heads", [4, 2])
def test_long_and_short_rows_are_attended_as_in_rectangles(monkeypatch: Any, key_heads: int) -> None:
    monkeypatch.setattr(long_rows, "LONG", 16)
    runs = []

    def attend_short(query: Tensor, key: Tensor, value: Tensor, first: int, end: int) -> Tensor:
        runs.append(LENGTHS[first:end])
        parts = []
        for q, k, v in zip(*(x.split(LENGTHS[first:end]) for x in (query, key, value)), strict=True):
            heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
            parts.append(scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(parts)

    tensors = draw(4, key_heads)
    attended = attend_long_rows(*tensors, LENGTHS, None, attend_short)
    line = (x.transpose(0, 1)[None] for x in tensors)
    expected, _ = attend(torch.nn.Module(), *line, None, segments=Segments.of(LENGTHS, torch.device("cpu")))
    slope = torch.randn_like(attended)
    gradients = torch.autograd.grad(attended, tensors, slope, retain_graph=True)
    expected_gradients = torch.autograd.grad(expected[0], tensors, slope)
    assert runs == [[3], [1, 2], [5]]
    torch.testing.assert_close(attended, expected[0])
    torch.testing.assert_close(gradients, expected_gradients)


def test_lengths_are_rounded_up_to_sixteen_in_an_octave() -> None:
    assert [padded_length(length) for length in (8192, 8193, 12_000, 16_383, 16_384, 16_385)] == [
        8192,
        8704,
        12_288,
        16_384,
        16_384,
        17_408,
    ]
    lengths = range(8192, 65_537)
    assert len({padded_length(length) for length in lengths}) == 3 * 16 + 1
    assert all(0 <= padded_length(length) - length < length / 16 for length in lengths)


def test_without_a_gpu_no_row_is_long() -> None:
    assert not takes_long_rows(torch.zeros(1, 1, 1), 10**6)
