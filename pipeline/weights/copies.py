"""How the tensors of a checkpoint become the parameters of a model that serves, as a list of copies.

Owns the recorded plan and the proof that it is right. A model of vLLM fuses, slices and pads what it loads (query, key
and value in one matrix, gate and up in another, a slice of the vocabulary), each in its own way. Nothing here knows
how: the model's own `load_weights` is run once, and what it copies from where to where is written down, not done.
Promises that a plan which was verified gives bit for bit what a reload gives. Must not know how the bytes came.

    plan = CopyPlan.record(model.load_weights, layout.views(staging))
    if plan.differs(model, staging_tensors, reload) == "":
        plan.apply()                                  # a few launches, between two steps of the engine
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.errors import WeightSyncError

NamedTensors = Sequence[tuple[str, Tensor]]
_PERIOD = 65_521
_CHUNK = 1 << 24


class NoPlan(WeightSyncError):
    """The model loads its weights by more than copies."""


@dataclass
class CopyPlan:
    """`targets[i] ← sources[i]`, all of the same shape pairwise; and what loading sets to a constant."""

    targets: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    fills: list[tuple[Tensor, float]] = field(default_factory=list)

    @classmethod
    def record(cls, load: Callable[[Iterator[tuple[str, Tensor]]], Any], tensors: NamedTensors) -> "CopyPlan":
        """What `load(tensors)` would copy; nothing is copied. `NoPlan` names what it does besides.

        The sources are views of `tensors`, the targets views of the model's parameters: the plan is valid as long as
        both keep their storage.
        """
        plan = cls()
        with torch.no_grad(), _Recorder(plan):
            load(iter(tensors))
        return plan

    def apply(self) -> None:
        """Copy everything, on the current stream."""
        with torch.no_grad():
            torch._foreach_copy_(self.targets, self.sources)

    def differs(self, model: nn.Module, tensors: NamedTensors, reload: Callable[[], None]) -> str:
        """Why this plan does not do what `reload` does; empty if it does. Leaves the model as `reload` does.

        `reload` loads `tensors` in the way that is known to be right. The model is first loaded with other values, so
        that whatever the plan does not reach keeps something of them, also what loading only derives from the weights.
        """
        with torch.no_grad():
            _scale(tensors, -2.0)  # exact, and undone exactly
            reload()
            _scale(tensors, -0.5)
            self.apply()
            planned = dict(_sums(model))
            reload()
            stock = dict(_sums(model))
        wrong = sorted(name for name in stock if planned.get(name) != stock[name])
        return f"{len(wrong)} of {len(stock)} tensors differ, such as {wrong[0]}" if wrong else ""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets views through, writes copies down, and refuses everything else."""

    def __init__(self, plan: CopyPlan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._plan = plan

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet = func.overloadpacket
        if packet is torch.ops.aten.copy_:
            target, source = args[0], args[1]
            if target.shape != source.shape:
                source = source.expand_as(target)
            self._plan.targets.append(target)
            self._plan.sources.append(source)
            return target
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self._plan.fills.append((args[0], float(args[1]) if len(args) > 1 else 0.0))
            return args[0]
        if not _is_view(func):
            raise NoPlan(f"loading the weights uses {func}")
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _scale(tensors: NamedTensors, factor: float) -> None:
    for _, tensor in tensors:
        tensor.mul_(factor)


def _sums(model: nn.Module) -> Iterator[tuple[str, int]]:
    """(name, checksum) of every tensor that a module holds, also those that are neither parameter nor buffer."""
    for place, module in model.named_modules():
        held = {**module.__dict__, **module._parameters, **module._buffers}
        for name, value in held.items():
            if isinstance(value, Tensor) and value.numel() and not value.is_meta:
                yield f"{place}.{name}", _checksum(value.detach())


def _checksum(tensor: Tensor) -> int:
    """Of the bytes and their places."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    total = 0
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + len(part), device=part.device) % _PERIOD + 1
        total += int((part * place).sum())
    return total
