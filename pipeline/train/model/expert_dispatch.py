"""Tokens that travel to the ranks of their experts, and back.

Owns the exchange: each rank of a group has an equal part of a layer's experts, rank 0 the first. Promises that no token
is dropped and that there is no capacity; that a rank which no token chose takes part all the same; and that gradients
travel the same ways back. Must not know what an expert computes.

    sorted tokens ─► counts to all ─► tokens to the owners ─► by expert ─► compute ─► by sender ─► back to the senders

The host waits once a layer, for the numbers of tokens that go and come.

Notation: S slots (tokens × experts of each) of this rank, R slots that arrive here, X experts, n ranks, E features.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of tokens [R, E] sorted by expert, the expert of each [R] and the number of each expert here: the outputs [R, E]."""


def run_on_owners(compute: Compute, sorted_SE: Tensor, counts_X: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[S, E]: `compute` of tokens sorted by expert, `counts_X` of each, done by the ranks that have the experts."""
    arriving_nX = torch.empty_like(counts_X)
    dist.all_to_all_single(arriving_nX, counts_X, group=group)
    arriving_nX, leaving_nX = (counts.view(group.size(), -1) for counts in (arriving_nX, counts_X))
    leaving, arriving = torch.stack([leaving_nX.sum(1), arriving_nX.sum(1)]).tolist()  # the host waits
    arrived_RE = all_to_all_single_autograd(sorted_SE, arriving, leaving, group)
    here = torch.arange(arriving_nX.shape[1], device=counts_X.device).repeat(len(arriving_nX))
    expert_R = here.repeat_interleave(arriving_nX.flatten(), output_size=sum(arriving))
    order_R = torch.argsort(expert_R, stable=True)
    inverse_R = inverse_of(order_R)
    output_RE = compute(apply(Permute, arrived_RE, order_R, inverse_R), expert_R[order_R], arriving_nX.sum(0))
    return all_to_all_single_autograd(apply(Permute, output_RE, inverse_R, order_R), leaving, arriving, group)


def inverse_of(order_S: Tensor) -> Tensor:
    """The permutation that undoes this one."""
    inverse_S = torch.empty_like(order_S)
    inverse_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    return inverse_S


def apply(function: Any, *arguments: Any) -> Tensor:
    """`function.apply`, of a `torch.autograd.Function`."""
    return cast(Tensor, function.apply(*arguments))


class Permute(torch.autograd.Function):
    """`table[order]` of a permutation; its gradient is the other way's gather."""

    @staticmethod
    def forward(ctx: Any, table_SE: Tensor, order_S: Tensor, inverse_S: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_S)
        return table_SE.index_select(0, order_S)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        (inverse_S,), (slope_SE,) = ctx.saved_tensors, slopes
        return slope_SE.index_select(0, inverse_S), None, None
