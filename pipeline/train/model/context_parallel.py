"""Context parallelism: a packed line distributed over several ranks (Ulysses: Jacobs et al. 2023).

Owns the split of a line, and the exchange for attention: a rank computes every layer for its part of the line, but
attention for the whole line and a part of the heads. So the tables of row bounds stay those of the whole line. Promises
that the ranks together compute the result of one rank. Must not know rows, models or losses.

    rank 0: first half of the line, all heads  ─►  whole line, first half of the heads  ─►  first half of the line …
    rank 1: other half of the line, all heads  ─►  whole line, other half of the heads  ─►  other half of the line …
                                       scatter_heads                             gather_heads

Notation: a line of P tokens, p = P / c on each of c ranks; H query heads and G key heads of D numbers; N predicted
tokens of a line, M of them on this rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from pipeline.config.mesh_checks import check_context_heads

SHORTEST = 2
"""Minimum number of tokens on a rank: layers are compiled once more for a single one."""


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share a line; `rank` is the index of this one among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def whole_length(self, length: int) -> int:
        """The length to which a line of `length` tokens must be extended, so that all parts are equal."""
        return max(SHORTEST, -(-length // self.size)) * self.size

    def own_part(self, length: int) -> slice:
        """This rank's part of a line of this length."""
        part = length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def scatter_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange a part of the line with all heads for the whole line with a part of the heads: [1, H, p, D],
        [1, G, p, D] → [1, H / c, P, D], [1, max(1, G / c), P, D].

        If there are fewer key heads than ranks, they are repeated. `ConfigError` for numbers of heads that c ranks
        cannot share.
        """
        check_context_heads(self.size, query.shape[1], key.shape[1])
        repeats = max(1, self.size // key.shape[1])
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        return self._scatter(query), self._scatter(key), self._scatter(value)

    def gather_heads(self, attended: Tensor) -> Tensor:
        """Exchange the whole line with a part of the heads for a part of the line with all heads: [1, H / c, P, D] →
        [1, H, p, D]."""
        heads, length, width = attended.shape[1:]
        # [H / c, P, D] → [P, H / c, D] → [c, p, H / c, D]: block i is the part of rank i. After the exchange block i
        # has the heads of rank i: [c, p, H / c, D] → [p, c, H / c, D] → [p, H, D] → [1, H, p, D].
        parts = attended[0].transpose(0, 1).reshape(self.size, length // self.size, heads, width)
        return self._exchange(parts).transpose(0, 1).flatten(1, 2).transpose(0, 1).unsqueeze(0)

    def merge(self, own_M: Tensor, index_M: Tensor, count: int) -> Tensor:
        """All `count` (N) values of a line on each of its ranks, from this rank's values at `index_M`: [M] → [N], or
        [M, K] → [N, K].

        Every rank computes the same loss from them. So the backward pass returns to each rank the gradient of its own
        values and sums nothing: a sum would count every token once per rank.
        """
        zeros_N = own_M.new_zeros(count, *own_M.shape[1:])
        return _SumOfParts.apply(zeros_N.index_copy(0, index_M, own_M), self.group)  # type: ignore[no-untyped-call, no-any-return]

    def _scatter(self, x: Tensor) -> Tensor:
        """[1, H, p, D] → [1, H / c, P, D], with tokens contiguous in memory."""
        heads, part, width = x.shape[1:]
        # [H, p, D] → [c, H / c, p, D] → [c, p, H / c, D]: block i has the heads of rank i. After the exchange block i
        # has the tokens of rank i: [c, p, H / c, D] → [P, H / c, D] → [1, H / c, P, D].
        shares = x[0].reshape(self.size, heads // self.size, part, width).transpose(1, 2)
        return self._exchange(shares).flatten(0, 1).transpose(0, 1).unsqueeze(0)

    def _exchange(self, x: Tensor) -> Tensor:
        """Send x[i] to rank i and return the blocks of all ranks, in their order: [c, …] → [c, …]."""
        ones = [1] * self.size
        return all_to_all_single_autograd(x.contiguous(), ones, ones, self.group)


class _SumOfParts(torch.autograd.Function):
    """The sum over ranks, with the identity as its backward pass; see `ContextParallel.merge`."""

    @staticmethod
    def forward(ctx: Any, part_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole_N = part_N.clone()
        dist.all_reduce(whole_N, group=group)
        return whole_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
