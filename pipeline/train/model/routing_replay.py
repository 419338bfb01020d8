"""Routing replay: the routers of a mixture choose the experts that a server chose for each token (R3, Ma et al. 2025).

Owns the replaced choice. Promises that all else is the router's: the weights of the chosen experts are computed from
its own logits, by its own rule (softmax before or after the choice, sigmoid with a bias, normalization), and have their
gradient; and that tokens without a record keep the router's own choice. Must not know rows, losses or servers.

    replay = RoutingReplay(network)
    with replay.of(micro.routed):        # each micro-batch, forward and backward
        …

Every router chooses by one `torch.topk` over the scores of all experts. While a router runs, that call answers with the
recorded experts and their scores. A router in which no such call happens is refused at its first pass.

Notation: T tokens that a rank reads, L layers, K experts of each token, X experts of a layer.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeline.errors import ConfigError, TrainingError
from pipeline.train.batching.sequences import TrainSequence
from pipeline.train.model.experts import fused_experts
from pipeline.train.model.routers import routers
from pipeline.train.model.to_device import to_device

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_TOPK = (torch.topk, torch.Tensor.topk)


@dataclass(frozen=True)
class RoutedTokens:
    """The recorded experts of a micro-batch.

    Attributes:
        experts_TLK: uint8 or int16, by token, layer and choice.
        recorded_T: bool, whether a token has a record.
    """

    experts_TLK: Tensor
    recorded_T: Tensor

    @classmethod
    def from_rows(
        cls, rows: Sequence[TrainSequence], where: NDArray[np.int64], tokens: int, part: slice, device: torch.device
    ) -> "RoutedTokens | None":
        """The records of `part` of a rectangle of `tokens`, in which `where` is the index of each token of each row;
        None if no row has any.

        Of rows that share a token, the first one with a record counts.
        """
        arrays = [row.routed_experts for row in rows if row.routed_experts is not None]
        if not arrays:
            return None
        experts_TLK, recorded_T = np.zeros((tokens, *arrays[0].shape[1:]), arrays[0].dtype), np.zeros(tokens, np.bool_)
        first = 0
        for row in rows:
            ids = row.routed_experts
            if ids is not None:
                at = where[first : first + len(ids)]
                fresh = ~recorded_T[at]
                experts_TLK[at[fresh]] = ids[fresh]
                recorded_T[at] = True
            first += len(row)
        wide = experts_TLK if experts_TLK.dtype == np.uint8 else experts_TLK.astype(np.int16)  # few kernels take uint16
        return cls(*(to_device(np.ascontiguousarray(values[part]), device) for values in (wide, recorded_T)))


class RoutingReplay:
    """The routers of one network."""

    def __init__(self, network: nn.Module) -> None:
        """Patch the routers, before layers are compiled; `ConfigError` for a layer of experts without a known one, and
        for a network without fused experts."""
        self._routers = {layer: _ReplayedRouter(router) for layer, router in _numbered_routers(network)}
        if not self._routers:
            expected = f"none for {type(network).__name__}, which has no fused experts"
            raise ConfigError("training.routing_replay", "rollout", expected, "remove it")

    @contextmanager
    def of(self, routed: RoutedTokens | None) -> Iterator[None]:
        """Replay these records in the passes within; None: routers choose themselves."""
        for layer, router in self._routers.items():
            router.choice = None if routed is None else (routed.experts_TLK[:, layer], routed.recorded_T)
        yield
        for router in self._routers.values():
            router.choice = None


class _ReplayedRouter:
    """A router whose choice can be replaced by `choice`: experts [T, K] and whether each token has any, bool [T]."""

    def __init__(self, router: nn.Module) -> None:
        self.choice: tuple[Tensor, Tensor] | None = None
        self._stock: Callable[..., Any] = router.forward
        self._running = False
        self._name, self._experts = type(router).__name__, len(router.get_parameter("weight"))
        # A graph would be compiled again for each micro-batch, whose records are other tensors.
        router.forward = torch.compiler.disable(self._forward)  # type: ignore[no-untyped-call]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.choice is None or self._running:  # an exact router calls its module's forward once more
            return self._stock(*args, **kwargs)
        self._running = True
        try:
            with _Choice(self._experts, *self.choice) as choice:
                output = self._stock(*args, **kwargs)
        finally:
            self._running = False
        if choice.used != 1:
            raise TrainingError(f"training.routing_replay: {self._name} does not choose by one topk over its experts")
        return output


class _Choice(TorchFunctionMode):
    """While it is active, a `topk` of K among the scores [T, X] answers with the recorded experts and their scores."""

    def __init__(self, experts: int, experts_TK: Tensor, recorded_T: Tensor) -> None:
        super().__init__()
        self._experts, self._experts_TK, self._recorded_T, self.used = experts, experts_TK, recorded_T, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in _TOPK or output.indices.shape != self._experts_TK.shape or args[0].shape[-1] != self._experts:
            return output  # also of a router that chooses groups of experts first: its scores are [T, groups]
        self.used += 1
        scores_TX = args[0]
        chosen_TK = torch.where(self._recorded_T[:, None], self._experts_TK.long(), output.indices)
        return torch.return_types.topk((scores_TX.gather(-1, chosen_TK), chosen_TK))


def _numbered_routers(network: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """The router of each layer of fused experts, with the number of the layer."""
    names = {id(module): name for name, module in network.named_modules()}
    for experts, router in zip(fused_experts(network), routers(network), strict=True):
        layer = _LAYER.search(names[id(experts)])
        if router is None or layer is None:
            expected = f"none for {type(network).__name__}, whose layers of experts have no router of a known name"
            raise ConfigError("training.routing_replay", "rollout", expected, "remove it")
        yield int(layer[1]), router
