"""Tokens that travel to the ranks of their experts, and back.

Owns the exchange: each rank of a group has an equal part of a layer's experts, rank 0 the first. A token travels once
to each rank that has some of its experts, with their numbers and weights, and comes back as the weighted sum of their
outputs. With 8 uniformly chosen experts of a token, two ranks exchange a quarter and four ranks 45 % of what one copy
for each expert would be. Promises that no token is dropped and that there is no capacity; that a rank which no token
chose takes part all the same; that no result depends on the order of atomic additions; and that gradients travel the
same ways back. Must not know what an expert computes.

    tokens ─► counts to all ─► one copy for each rank ─► by expert ─► compute ─► weighted sums ─► back ─► sums of ranks

The host waits once a layer, for the numbers of tokens that go and come.

Notation: T tokens of this rank, K experts of each, n ranks, E features. U copies leave this rank, V arrive at it, which
have R slots (token × expert) here. X experts are here. Functions with N rows and S slots hold for both sides.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import embedding_bag

Compute = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of tokens [R, E] sorted by expert, the weight and the expert of each [R], and the number of each expert here: the
weighted outputs [R, E]."""
_ELSEWHERE = -1
"""In place of an expert that another rank has."""


def run_on_owners(
    compute: Compute, hidden_TE: Tensor, chosen_TK: Tensor, weights_TK: Tensor, experts: int, group: dist.ProcessGroup
) -> Tensor:
    """[T, E]: the weighted sum over each token's experts, computed by the ranks that have them.

    `experts` is their number in the layer. Sums are in float32 at least; a rank's part of a sum travels in the type of
    `hidden_TE`.
    """
    ranks, here = group.size(), experts // group.size()
    owner_TK = chosen_TK // here
    is_sent_nT = chosen_TK.new_zeros(ranks, len(chosen_TK), dtype=torch.bool).scatter_(0, owner_TK.T, value=True)
    slots_n = chosen_TK.new_zeros(ranks).scatter_add_(0, owner_TK.flatten(), torch.ones_like(chosen_TK).flatten())
    leaving_n2 = torch.stack([is_sent_nT.sum(1), slots_n], 1)
    arriving_n2 = torch.empty_like(leaving_n2)
    dist.all_to_all_single(arriving_n2, leaving_n2, group=group)
    leaving, arriving, slots = torch.stack([leaving_n2[:, 0], *arriving_n2.T]).tolist()  # the host waits

    # Copies are in the order of ranks, and of tokens for each rank.
    copy_U = is_sent_nT.flatten().argsort(descending=True, stable=True)[: sum(leaving)]
    rank_U, token_U = copy_U // len(chosen_TK), copy_U % len(chosen_TK)
    copies = _Bags.of(token_U, is_sent_nT.sum(0))
    is_there_UK = owner_TK[token_U] == rank_U[:, None]
    expert_UK = (chosen_TK[token_U] - here * rank_U[:, None]).masked_fill(~is_there_UK, _ELSEWHERE)
    expert_VK = expert_UK.new_empty(sum(arriving), expert_UK.shape[1])
    dist.all_to_all_single(expert_VK, expert_UK, arriving, leaving, group=group)
    hidden_VE = all_to_all_single_autograd(_Spread.of(hidden_TE, copies), arriving, leaving, group)
    weights_UK = _Spread.of(weights_TK, copies)
    weights_VK = all_to_all_single_autograd(weights_UK, arriving, leaving, group)

    is_here_VK = expert_VK != _ELSEWHERE
    slot_R = expert_VK.flatten().masked_fill(~is_here_VK.flatten(), here).argsort(stable=True)[: sum(slots)]
    expert_R = expert_VK.flatten()[slot_R]
    counts_X = expert_R.new_zeros(here).scatter_add_(0, expert_R, torch.ones_like(expert_R))
    arrived = _Bags.of(slot_R // expert_VK.shape[1], is_here_VK.sum(1), slot_R)
    weights_R = weights_VK.flatten()[slot_R]
    weighted_RE = compute(_Spread.of(hidden_VE, arrived), weights_R, expert_R, counts_X)
    back_UE = all_to_all_single_autograd(_Collect.of(weighted_RE, arrived), leaving, arriving, group)
    return _Collect.of(back_UE, copies)


class _Bags(NamedTuple):
    """Which slots belong to each row.

    Attributes:
        row_S: int64, the row of each slot.
        slot_S: int64, the slots, grouped by row in the order of rows.
        first_N: int64, where the slots of each row begin in `slot_S`.
    """

    row_S: Tensor
    slot_S: Tensor
    first_N: Tensor

    @classmethod
    def of(cls, row_S: Tensor, sizes_N: Tensor, rank_S: Tensor | None = None) -> "_Bags":
        """Rows of `sizes_N` slots; `rank_S` orders slots by row and, inside a row, as they are to be added."""
        order_S = torch.argsort(row_S if rank_S is None else rank_S, stable=True)
        return cls(row_S, order_S, sizes_N.cumsum(0) - sizes_N)


def _sum_slots(table_SE: Tensor, bags: _Bags) -> Tensor:
    """[N, E]: the sum of each row's slots, 0 for rows without any."""
    if not len(table_SE):
        return table_SE.new_zeros(len(bags.first_N), table_SE.shape[1])
    return embedding_bag(bags.slot_S, table_SE, bags.first_N, mode="sum")


class _Spread(torch.autograd.Function):
    """[N, E] → [S, E]: the row of each slot. Its gradient is the sum of each row's slots."""

    @staticmethod
    def of(table_NE: Tensor, bags: _Bags) -> Tensor:
        return cast(Tensor, _Spread.apply(table_NE, *bags))  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(ctx: Any, table_NE: Tensor, *bags: Tensor) -> Tensor:
        ctx.save_for_backward(*bags)
        return table_NE.index_select(0, bags[0])

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_slots(slopes[0].contiguous(), _Bags(*ctx.saved_tensors)), None, None, None


class _Collect(torch.autograd.Function):
    """[S, E] → [N, E]: the sum of each row's slots. Its gradient is the row of each slot."""

    @staticmethod
    def of(table_SE: Tensor, bags: _Bags) -> Tensor:
        return cast(Tensor, _Collect.apply(table_SE, *bags))  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(ctx: Any, table_SE: Tensor, *bags: Tensor) -> Tensor:
        ctx.save_for_backward(bags[0])
        return _sum_slots(table_SE, _Bags(*bags))

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        return slopes[0].index_select(0, ctx.saved_tensors[0]), None, None, None
