"""The auxiliary loss that balances a mixture's experts (Shazeer et al. 2017; Switch: Fedus et al. 2021), of sequences.

    f_x = slots of a row's tokens that went to expert x / tokens of the row,   P_x = mean of softmax(logits)_x over them
    loss = Σ_rows share · mean over layers of (X · Σ_x f_x P_x)

That is transformers' `load_balancing_loss_func` of one row and one layer: K where the experts of a token are balanced,
up to X. f has no gradient. It is taken of each sequence, as in DeepSeek-V3 (section 2.1.2), not of a batch: a product
of two means over a batch needs the first of them before the backward pass of the batch's first micro-batch. A row lies
whole on one line, so the loss, and its gradient, do not depend on the cut of a batch into micro-batches and ranks. The
share of a row is that of its counted tokens in the loss, Σ weights: shares add up to 1 for means.

Owns the sum over a micro-batch's rows, and what routers keep for it. Ranks that share a line sum f, and each has the
gradient of its own tokens. Must not know tasks, models or when to step.

Notation: T tokens of the line on this rank, B rows, X experts, K of them for a token, L layers.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.train.model.collate import MicroBatch
from pipeline.train.model.experts import fused_experts
from pipeline.train.model.routers import RECORDED_EXPERTS, ROUTING, Routing, routers

METRIC = "experts/aux_loss"


class RouterLoss:
    """The auxiliary loss of one network; `coefficient` is its weight in the loss, 0: routers keep nothing for it."""

    coefficient = 0.0

    def __init__(self, network: nn.Module) -> None:
        self._routers = routers(network)
        self._experts: list[int] = [len(cast(Any, module).down_proj) for module in fused_experts(network)]

    def use(self, coefficient: float) -> None:
        """Have the loss computed from now on if the coefficient is above 0: `ConfigError` for a network with a layer
        of experts whose router is not known, or without experts."""
        if coefficient and (not self._routers or None in self._routers):
            expected = "0 for a model without layers of fused experts and their routers"
            raise ConfigError("optim.router_aux_loss_coef", coefficient, expected, "remove it")
        self.coefficient = coefficient
        for module, experts in zip(self._routers, self._experts, strict=True):
            if module is not None:
                setattr(module, RECORDED_EXPERTS, experts if coefficient else 0)

    def take(self, micro: MicroBatch) -> tuple[Tensor | float, dict[str, Tensor]]:
        """The weighted loss of a micro-batch from its forward pass, and `METRIC`, the sum without the coefficient.

        The loss of ranks that share a line is the sum over them. Collective over these ranks.
        """
        if not self.coefficient:
            return 0.0, {}
        records: list[Routing] = [module.__dict__.pop(ROUTING) for module in self._routers if module]
        share_B, means_BT = (tensor.to(records[0].logits_TX.device) for tensor in micro.row_means())
        chosen_LBX = [means_BT @ _counts(record).to(means_BT.dtype) for record in records]
        likely_LBX = [means_BT @ record.logits_TX.softmax(-1).to(means_BT.dtype) for record in records]
        context = None if micro.segments is None else micro.segments.context
        if context is not None:
            chosen_LBX, whole_LBX = (_sum(parts, context.group) for parts in (chosen_LBX, likely_LBX))
        else:
            whole_LBX = likely_LBX
        loss, measured = (_loss(share_B, chosen_LBX, parts) for parts in (likely_LBX, whole_LBX))
        return self.coefficient * loss, {METRIC: measured.detach()}

    def forget(self) -> None:
        """Drop what a backward pass that computed activations again has left."""
        for module in self._routers:
            if module is not None:
                module.__dict__.pop(ROUTING, None)


def _counts(record: Routing) -> Tensor:
    """[T, X]: 1 where a token went to an expert."""
    zeros_TX = torch.zeros_like(record.logits_TX, dtype=torch.float32)
    return zeros_TX.scatter_(1, record.chosen_TK, 1.0)


def _loss(share_B: Tensor, chosen_LBX: list[Tensor], likely_LBX: list[Tensor]) -> Tensor:
    of_layers = [
        likely_BX.shape[1] * (share_B[:, None] * chosen_BX * likely_BX).sum()
        for chosen_BX, likely_BX in zip(chosen_LBX, likely_LBX, strict=True)
    ]
    return torch.stack(of_layers).mean()


def _sum(parts: list[Tensor], group: Any) -> list[Tensor]:
    """The sums over ranks, without gradients, in one message."""
    flat = torch.cat([part.detach().flatten() for part in parts])
    dist.all_reduce(flat, group=group)
    pieces = torch.split(flat, [part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
