"""Attention inside rows: packed, padded, and where rows share their first tokens; by the rectangle and the kernel."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import ConfigError
from pipeline.train.batching.packing import group_by_prefix, make_layout
from pipeline.train.model import attention_sinks, packed_attention
from pipeline.train.model.packed_attention import Segments, attend
from tests.unit.train.test_packing import alike
from tests.unit.train.test_policy import Largest, draw

LENGTHS = (3, 1, 5)
SHARED = np.array([0, 1, 2, 3, 0, 1, 4, 5, 6, 0, 1, 0, 1, 2, 3])
"""Where the tokens of rows of 4, 5, 2 and 4 tokens lie that begin with the same two; the third is no more than these,
and the last the same as the first."""


@pytest.mark.parametrize("lengths", [LENGTHS, (70, 3, 33, 130, 1, 64, 40)])
@pytest.mark.parametrize("window", [None, 1, 2, 100])
def test_a_packed_row_attends_as_if_it_were_alone(window: int | None, lengths: tuple[int, ...]) -> None:
    total = sum(lengths)
    query, key, value = draw(1, 4, total, 8), draw(1, 2, total, 8, seed=1), draw(1, 2, total, 8, seed=2)
    segments = Segments.of(lengths, torch.device("cpu"))
    module = torch.nn.Identity()
    packed, _ = attend(module, query, key, value, None, segments=segments, sliding_window=window)
    start = 0
    for length in lengths:
        part = [tensor[:, :, start : start + length] for tensor in (query, key, value)]
        alone, _ = attend(module, *part, None, sliding_window=window)
        torch.testing.assert_close(packed[:, start : start + length], alone)
        start += length


@pytest.mark.parametrize("window", [None, 1, 2, 3, 100])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_rows_that_share_their_first_tokens_attend_as_if_each_were_alone(
    window: int | None, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_kernel:
        monkeypatch.setattr(packed_attention, "_kernel_takes", lambda query: True)
        monkeypatch.setattr(attention_sinks, "varlen_attn", kernel)
    lengths = (4, 5, 2, 4)
    query, key, value = (draw(1, heads, 7, 8, seed=heads).requires_grad_() for heads in (4, 2, 1))
    value = value.expand(1, 2, 7, 8)
    segments = Segments.of(lengths, torch.device("cpu"), SHARED)
    shared, _ = attend(torch.nn.Identity(), query, key, value, None, segments=segments, sliding_window=window)
    parts = []
    for places in np.split(SHARED, np.cumsum(lengths)[:-1]):
        row = [tensor[:, :, places] for tensor in (query, key, value)]
        alone, _ = attend(torch.nn.Identity(), *row, None, sliding_window=window)
        torch.testing.assert_close(shared[:, places], alone)
        parts.append(alone)
    slope = draw(7, 4, 8, seed=9)
    counted = np.array([0, 1, 2, 3, 6, 7, 8])  # each token of the line once, among those of the rows
    ours = torch.autograd.grad((shared[0] * slope).sum(), (query, key))
    theirs = torch.autograd.grad((torch.cat(parts, 1)[0, counted] * slope).sum(), (query, key))
    torch.testing.assert_close(ours, theirs)


def test_gradients_of_what_many_rows_share_add_up_in_float32() -> None:
    """Added in bfloat16, those of the first tokens are off by 0.014 and 0.030."""
    begin, own, rows = 4, 2, 256
    where = np.concatenate([[*range(begin), *range(begin + row * own, begin + (row + 1) * own)] for row in range(rows)])
    segments = Segments.of([begin + own] * rows, torch.device("cpu"), where)
    length = begin + rows * own

    def slopes(dtype: torch.dtype) -> list[torch.Tensor]:
        tensors = [draw(1, 2, length, 8, seed=seed).to(dtype).requires_grad_() for seed in range(3)]
        given = [tensor.bfloat16().to(dtype) for tensor in tensors]  # the same numbers for both
        output, _ = attend(torch.nn.Identity(), *given, None, segments=segments)
        return [
            each.double() for each in torch.autograd.grad(output.to(dtype), given[1:], draw(*output.shape).to(dtype))
        ]

    for rounded, exact in zip(slopes(torch.bfloat16), slopes(torch.float64), strict=True):
        off = (rounded - exact)[:, :, :begin].norm() / exact[:, :, :begin].norm()
        assert off < 2**-7


@given(alike().filter(bool))
def test_what_is_each_row_s_own_makes_the_line(rows: list[NDArray[np.int32]]) -> None:
    """The kernel writes nothing else, and puts a row's last query at its last key."""
    layout = make_layout([len(row) for row in rows], "shared", group_by_prefix(rows))
    where = layout.where if layout.packing == "shared" else None
    segments = Segments.of(layout.lengths.tolist(), torch.device("cpu"), where)
    own, whole = (list(pairwise(ragged.bounds.tolist())) for ragged in (segments.own, segments.whole))
    line = np.arange(layout.shape[1]) if segments.line_R is None else segments.line_R.numpy()
    assert own[-1][1] == layout.shape[1]
    for (first, end), (begin, last) in zip(own, whole, strict=True):
        assert line[begin:last][first - end :].tolist() == list(range(first, end))
    assert segments.own.longest == max(end - first for first, end in own)
    assert segments.whole.longest == max(last - begin for begin, last in whole)
    line_A = torch.cat([each.flatten() for each in segments.rectangles])
    assert line_A[segments.rectangle_P].tolist() == list(range(layout.shape[1]))


def test_a_window_hides_what_lies_further_back() -> None:
    query, key, value = draw(1, 1, 4, 8), draw(1, 1, 4, 8, seed=1), draw(1, 1, 4, 8, seed=2)
    seen, _ = attend(torch.nn.Identity(), query, key, value, None, sliding_window=1)
    torch.testing.assert_close(seen.transpose(1, 2), value)


def test_an_argument_that_attention_does_not_know_is_refused_unless_it_is_none() -> None:
    part = draw(1, 1, 4, 8)
    attend(torch.nn.Identity(), part, part, part, None, softcap=None, dropout=0.0)
    unknown: list[dict[str, Any]] = [{"softcap": 1.0}, {"position_bias": part}, {"news": False}]
    for argument in unknown:
        with pytest.raises(ConfigError, match=f"Identity with {next(iter(argument))}"):
            attend(torch.nn.Identity(), part, part, part, None, **argument)


def kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    of_queries: torch.Tensor,
    of_keys: torch.Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What `varlen_attn` promises, row by row and token by token: all are [P, H, D], or keys and values [R, H, D]; the
    last query of a row stands at its last key."""
    assert of_queries.dtype == of_keys.dtype == torch.int32
    assert most_queries == int(of_queries.diff().max())
    assert most_keys == int(of_keys.diff().max())
    assert window_size[1] == 0
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    output = []
    for (start, end), (begin, last) in zip(pairwise(of_queries.tolist()), pairwise(of_keys.tolist()), strict=True):
        for place in range(start, end):
            token = last - end + place
            near = slice(begin if window_size[0] < 0 else max(begin, token - window_size[0]), token + 1)
            scores = torch.einsum("hd,phd->hp", query[place], key[near]) * (scale or query.shape[-1] ** -0.5)
            output.append(torch.einsum("hp,phd->hd", scores.softmax(-1), value[near]))
    return torch.stack(output)


@pytest.mark.parametrize("groups", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 100])
def test_the_kernel_for_ragged_rows_gets_what_the_rectangle_gets(
    window: int | None, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = draw(1, 4, 9, 8), draw(1, 2, 9, 8, seed=1), draw(1, 2, 9, 8, seed=2)
    segments = Segments.of(LENGTHS, torch.device("cpu"))
    given = {"segments": segments, "sliding_window": window, "scaling": 0.3}
    rectangle, _ = attend(torch.nn.Identity(), *parts, None, **given)
    monkeypatch.setattr(packed_attention, "_kernel_takes", lambda query: True)
    monkeypatch.setattr(attention_sinks, "varlen_attn", kernel)
    monkeypatch.setattr(packed_attention, "_GROUPS", groups)
    ragged, _ = attend(torch.nn.Identity(), *parts, None, **given)
    assert ragged.is_contiguous()
    torch.testing.assert_close(ragged, rectangle)


def test_the_host_makes_no_table_that_is_longer_than_the_line() -> None:
    with Largest() as host:
        segments = Segments.of([1000] + [30] * 40, torch.device("meta"))
    assert [each.shape for each in segments.rectangles] == [(40, 30), (1, 1000)]
    assert host.entries == 2200


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=30))
def test_rows_are_laid_out_beside_rows_of_their_size(lengths: list[int]) -> None:
    """Attention without a kernel computes each rectangle whole: its area less than twice its rows, its work less than
    four times what they need, as if short rows had `SHORT` tokens."""
    rectangles = Segments.of(lengths, torch.device("cpu")).rectangles
    held = [max(packed_attention.SHORT, length) for length in lengths]
    assert sum(each.shape[0] for each in rectangles) == len(lengths)
    assert sum(each.numel() for each in rectangles) <= 2 * sum(held)
    assert sum(each.numel() * each.shape[1] for each in rectangles) <= 4 * sum(length**2 for length in held)
