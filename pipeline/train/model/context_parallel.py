"""A packed line that is spread over several ranks (context parallelism, Ulysses: Jacobs et al. 2023).

Owns how a line is cut, and how attention sees all of it: a rank computes every layer for its part of the line, but
attention for the whole line and a part of the heads. So the tables that keep rows apart stay those of the whole line.
Promises that the ranks compute together what one rank would. Must not know rows, models or losses.

    rank 0: first half of the line, all heads  ─►  whole line, first half of the heads  ─►  first half of the line …
    rank 1: other half of the line, all heads  ─►  whole line, other half of the heads  ─►  other half of the line …
                                       scatter_heads                             gather_heads

Notation: P tokens of the line, of which each of c ranks has p = P / c; H query heads and G key heads of D numbers; N
numbers of a line, M of them on this rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from pipeline.config.mesh_checks import check_context_heads

SHORTEST = 2
"""Tokens that a rank has at least: layers are compiled once more for a single one."""


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share a line; `rank` is the place of this one among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def whole_length(self, length: int) -> int:
        """The length to which a line of `length` tokens has to be filled up, so that all parts are equal."""
        return max(SHORTEST, -(-length // self.size)) * self.size

    def own_part(self, length: int) -> slice:
        """The places of a line of this length that lie on this rank."""
        part = length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def scatter_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A part of the line with all heads, to the whole line with a part of the heads: [1, H, p, D], [1, G, p, D] →
        [1, H / c, P, D], [1, max(1, G / c), P, D].

        Key heads fewer than the ranks are repeated. `ConfigError` for numbers of heads that c ranks cannot share.
        """
        check_context_heads(self.size, query.shape[1], key.shape[1])
        repeats = max(1, self.size // key.shape[1])
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        return self._scatter(query), self._scatter(key), self._scatter(value)

    def gather_heads(self, attended: Tensor) -> Tensor:
        """The whole line with a part of the heads, to a part of the line with all heads: [1, H / c, P, D] →
        [1, H, p, D]."""
        heads, length, width = attended.shape[1:]
        parts = attended[0].transpose(0, 1).reshape(self.size, length // self.size, heads, width)
        return self._exchange(parts).transpose(0, 1).flatten(1, 2).transpose(0, 1).unsqueeze(0)

    def merge(self, own_M: Tensor, index_M: Tensor, count: int) -> Tensor:
        """All `count` (N) numbers of a line, of which this rank has those at `index_M`, on each of its ranks.

        The ranks go on to compute the same of them. So each passes back the gradient of its own numbers alone, and
        nothing is summed: the sum would count every token once for each rank.
        """
        zeros_N = own_M.new_zeros(count)
        return _SumOfParts.apply(zeros_N.index_copy(0, index_M, own_M), self.group)  # type: ignore[no-untyped-call, no-any-return]

    def _scatter(self, x: Tensor) -> Tensor:
        """[1, H, p, D] → [1, H / c, P, D], whose tokens lie one after another in memory."""
        heads, part, width = x.shape[1:]
        shares = x[0].reshape(self.size, heads // self.size, part, width).transpose(1, 2)
        return self._exchange(shares).flatten(0, 1).transpose(0, 1).unsqueeze(0)

    def _exchange(self, x: Tensor) -> Tensor:
        """x[i] goes to rank i; what came from rank i lies at i: [c, …] → [c, …]."""
        ones = [1] * self.size
        return all_to_all_single_autograd(x.contiguous(), ones, ones, self.group)


class _SumOfParts(torch.autograd.Function):
    """The sum over ranks, each of which passes its gradient on as it is; see `ContextParallel.merge`."""

    @staticmethod
    def forward(ctx: Any, part_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole_N = part_N.clone()
        dist.all_reduce(whole_N, group=group)
        return whole_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
