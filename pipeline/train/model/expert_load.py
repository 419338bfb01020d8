"""How tokens spread over a mixture's experts, and the bias that evens them out.

Owns the count of each expert's tokens over all ranks, its metric, and the update of balancing biases without an
auxiliary loss (Wang et al. 2024, DeepSeek-V3). Promises that a token counts once for each row that has it, and padding
never, so that counts depend on the rows alone; and that biases stay equal on all ranks, as each adds the same. Must not
know what is computed, nor when a step is taken.

    load = ExpertLoad(network)
    with load.counting(micro.rows_T):             # each micro-batch, forward and backward
        …
    metrics = load.collect(measured=True)         # collective; after each forward-backward
    load.balance(rate)                            # after each step

A router adds the bias to its scores where it chooses experts, not where it weighs them. It has no gradient: after a
step it moves by `rate` toward the experts that got fewer tokens than the mean of their layer.

Notation: T tokens that a rank reads, X experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.train.model.experts import COUNTS, WEIGHTS, fused_experts

BIAS = "e_score_correction_bias"
"""What transformers calls the bias, in every family that has one."""


class ExpertLoad:
    """The counts of one network's fused experts, and its biases."""

    def __init__(self, network: nn.Module) -> None:
        self._modules: list[Any] = fused_experts(network)
        self._biases = [_bias_beside(network, module) for module in self._modules]
        self._counts: list[Tensor] = []  # since the last `collect`, by layer; empty: no pass since then
        self._sums: list[Tensor] = []

    def refuse_rate(self, rate: float, adapted: bool) -> None:
        """`ConfigError` for a rate above 0 unless every layer of experts has a bias that leaves the trainer."""
        if rate and (adapted or not self._biases or any(bias is None for bias in self._biases)):
            expected = "0 with adapters, whose base stays as it is" if adapted else f"0 for a model without {BIAS}"
            raise ConfigError("optim.router_bias_rate", rate, expected, "remove it")

    @contextmanager
    def counting(self, rows_T: NDArray[np.int64], device: torch.device) -> Iterator[None]:
        """Count each token of the passes within for as many rows as `rows_T` says."""
        if not self._modules:
            yield
            return
        weights_T = torch.from_numpy(rows_T).to(device)
        sizes = (len(module.down_proj) for module in self._modules)
        self._counts = self._counts or [torch.zeros(size, dtype=torch.int64, device=device) for size in sizes]
        for module, counts_X in zip(self._modules, self._counts, strict=True):
            setattr(module, WEIGHTS, weights_T)
            setattr(module, COUNTS, counts_X)
        yield
        for module in self._modules:
            delattr(module, WEIGHTS)
            delattr(module, COUNTS)

    def collect(self, *, measured: bool, rate: float) -> dict[str, float]:
        """`experts/load_max`, if `measured`: the tokens of the busiest expert of a layer / the mean over the layer's
        experts, at most over all layers. Of the tokens of all ranks that had a gradient since the last call.

        Empty for a network without fused experts. Collective over all ranks; with a rate, `balance` gets the counts.
        """
        counts, self._counts = self._counts, []
        if not counts or not (measured or rate):
            return {}
        whole = torch.cat(counts)
        dist.all_reduce(whole)
        layers = torch.split(whole, [len(counts_X) for counts_X in counts])
        if rate:
            earlier = self._sums or [torch.zeros_like(counts_X) for counts_X in layers]
            self._sums = [one + other for one, other in zip(earlier, layers, strict=True)]
        loads = [len(counts_X) * counts_X.max().double() / counts_X.sum().clamp_min(1) for counts_X in layers]
        return {"experts/load_max": torch.stack(loads).max().item()} if measured else {}

    @torch.no_grad()
    def balance(self, rate: float, *, skipped: bool) -> None:
        """Move each bias by `rate`, unless the step was skipped; the counts begin again."""
        sums, self._sums = self._sums, []
        if skipped or not rate:
            return
        for bias, counts_X in zip(self._biases, sums, strict=True):
            assert bias is not None
            lacking_X = torch.sign(counts_X.sum() - len(counts_X) * counts_X)  # of whole numbers: equal on all ranks
            bias.add_(rate * lacking_X.view_as(bias).to(bias.dtype))


def _bias_beside(network: nn.Module, experts: nn.Module) -> Tensor | None:
    """The balancing bias of the router in the same block as these experts; None if it has none, or as a parameter."""
    name = next(name for name, module in network.named_modules() if module is experts)
    block: Any = network.get_submodule(name.rpartition(".")[0])
    biases = [buffer for leaf, buffer in block.named_buffers() if leaf.rpartition(".")[-1] == BIAS]
    return biases[0] if len(biases) == 1 else None
