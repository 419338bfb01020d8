"""Attention with sinks, and its gradients, against the definition: packed, shared, in windows, by both functions."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.train.model import attention_sinks, packed_attention
from pipeline.train.model.attention_sinks import KernelOptions, KernelRows
from pipeline.train.model.packed_attention import Segments, attend
from tests.unit.train.test_packed_attention import LENGTHS, SHARED
from tests.unit.train.test_policy import draw

HEADS, GROUPS, SIZE, SCALE = 4, 2, 8, 0.3


@pytest.fixture(params=["rectangles", "kernel"])
def _function(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention through rectangles, or through a kernel of which torch's own needs a GPU."""
    if request.param == "kernel":
        monkeypatch.setattr(packed_attention, "_kernel_takes", lambda query: True)
        monkeypatch.setattr(attention_sinks, "varlen_attn", kernel)
        monkeypatch.setattr(attention_sinks, "_kernel_backward", kernel_backward)


@pytest.mark.usefixtures("_function")
@pytest.mark.parametrize("value_size", [SIZE, 5], ids=["one width", "narrow values"])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("shared", [False, True], ids=["packed", "shared"])
def test_outputs_and_gradients_are_those_of_the_definition(shared: bool, window: int | None, value_size: int) -> None:
    lengths, length = ((4, 5, 2, 4), 7) if shared else (LENGTHS, sum(LENGTHS))
    where = SHARED if shared else np.arange(length)
    sizes = ((HEADS, SIZE), (GROUPS, SIZE), (GROUPS, value_size))
    tensors = [draw(1, heads, length, size, seed=seed) for seed, (heads, size) in enumerate(sizes)]
    tensors = [tensor.double().requires_grad_() for tensor in (*tensors, draw(HEADS, seed=5))]
    segments = Segments.of(lengths, torch.device("cpu"), SHARED if shared else None)

    *inputs, sinks = tensors
    options = {"segments": segments, "sliding_window": window, "s_aux": sinks, "scaling": SCALE}
    found, _ = attend(torch.nn.Identity(), *inputs, None, **options)
    wanted = torch.zeros_like(found)
    for places in np.split(where, np.cumsum(lengths)[:-1]):
        row = defined(*(tensor[0][:, places] for tensor in inputs), sinks, window)
        wanted = wanted.index_copy(1, torch.from_numpy(places), row[None])

    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    slope = draw(*found.shape, seed=9).double()
    slopes = [torch.autograd.grad((output * slope).sum(), tensors) for output in (found, wanted)]
    torch.testing.assert_close(*slopes, rtol=1e-11, atol=1e-12)


def test_a_sink_far_below_the_scores_changes_nothing_and_one_far_above_takes_all() -> None:
    parts = draw(1, 4, 5, 8), draw(1, 2, 5, 8, seed=1), draw(1, 2, 5, 8, seed=2)
    plain, _ = attend(torch.nn.Identity(), *parts, None)
    for sink, factor in ((-40.0, 1.0), (40.0, 0.0)):
        found, _ = attend(torch.nn.Identity(), *parts, None, s_aux=torch.full((4,), sink))
        torch.testing.assert_close(found, factor * plain)


def defined(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """[T, H, D] of one row: a softmax with one more logit, of which the last probability is dropped."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=0) for x in (key, value))
    scores = _scores(query, key, window)
    whole = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1).softmax(-1)
    return (whole[..., :-1] @ value).transpose(0, 1)


def _scores(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """[H, T, L], of the last T of L tokens."""
    own, whole = query.shape[1], key.shape[1]
    distance = torch.arange(whole - own, whole)[:, None] - torch.arange(whole)
    hidden = (distance < 0) | (distance >= (whole if window is None else window))
    return (query @ key.transpose(-1, -2) * SCALE).masked_fill(hidden, float("-inf"))


def kernel(query: Tensor, key: Tensor, value: Tensor, *rows: Any, return_aux: Any, **options: Any) -> Any:
    """What `varlen_attn` computes without sinks: the output [P, H, D] and the logsumexp [H, P]."""
    assert return_aux.lse
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    outputs, sums = [], []
    for own, whole in _rows(rows):
        q, k, v = (x.transpose(0, 1) for x in (query[own], key[whole], value[whole]))
        scores = _scores(q, k, _window(options["window_size"]))
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(sums, 1)


def kernel_backward(
    slope: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse_HP: Tensor,
    rows: KernelRows,
    options: KernelOptions,
) -> tuple[Tensor, ...]:
    """As a flash kernel: it takes probabilities from the logsumexp, and never computes a softmax again."""
    slopes = tuple(torch.zeros_like(x) for x in (query, key, value))
    for own, whole in _rows(rows):
        for head in range(HEADS):
            group = head * GROUPS // HEADS
            q, k, v = query[own, head], key[whole, group], value[whole, group]
            scores = _scores(q[None], k[None], _window(options.window))[0]
            p = (scores - lse_HP[head, own, None]).exp()
            inner = (slope[own, head] * output[own, head]).sum(-1, keepdim=True)
            of_scores = p * (slope[own, head] @ v.T - inner) * SCALE
            slopes[0][own, head] += of_scores @ k
            slopes[1][whole, group] += of_scores.T @ q
            slopes[2][whole, group] += p.T @ slope[own, head]
    return slopes


def _rows(rows: Any) -> list[tuple[slice, slice]]:
    bounds = ([slice(*pair) for pair in pairwise(each.tolist())] for each in rows[:2])
    return list(zip(*bounds, strict=True))


def _window(size: tuple[int, int]) -> int | None:
    return None if size[0] < 0 else size[0] + 1
