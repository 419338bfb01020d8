"""How the tensors of a checkpoint become the parameters of a model that serves, as a list of copies.

Owns the recorded plan and the proof that it is right. A model of vLLM fuses, slices and pads what it loads (query, key
and value in one matrix, gate and up in another, a slice of the vocabulary), each in its own way. Nothing here knows
how: the model's own `load_weights` is run once, over tensors without memory, and what it copies from where to where is
written down, not done. Promises that a plan which was verified gives bit for bit what a reload gives, from no more of
the weights than this process's `shard`. Must not know how the bytes came.

    plan = CopyPlan.record(model.load_weights, layout)
    plan.stage(device)                            # a buffer for the shard, no larger
    if plan.differs(model, reload) == "":
        ...                                       # plan.staging is filled
        plan.apply()                              # a few launches, between two steps of the engine
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync.server_shards import Shard, Slice
from pipeline.inference.weight_sync.transports.gloo import WeightLayout

NamedTensors = Iterator[tuple[str, Tensor]]
_PERIOD = 65_521
_BLOCK = 1 << 24


class NoPlan(WeightSyncError):
    """The model loads its weights by more than copies."""


@dataclass
class CopyPlan:
    """`targets[i] ← slices[i]`, broadcast where that is smaller; and what loading sets to a constant.

    Attributes:
        targets: views of the model's parameters; the plan is valid as long as these keep their storage.
        slices: of the tensors that are loaded.
        shard: all of the slices, as they lie in a staging buffer.
        staging: that buffer, once there is one; uint8.
    """

    layout: WeightLayout
    targets: list[Tensor] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    fills: list[tuple[Tensor, float]] = field(default_factory=list)

    @classmethod
    def record(cls, load: Callable[[NamedTensors], Any], layout: WeightLayout) -> "CopyPlan":
        """What `load` would copy out of tensors of this layout; nothing is copied. `NoPlan` names what else it does."""
        plan = cls(layout)
        blank = torch.empty(layout.bytes, dtype=torch.uint8, device="meta")
        with torch.no_grad(), _Recorder(plan, blank):
            load(iter(layout.views(blank)))
        plan.shard = Shard.of(layout, plan.slices)
        return plan

    shard: Shard = field(init=False)
    staging: Tensor = field(init=False)
    _sources: list[Tensor] = field(init=False)

    def stage(self, device: torch.device) -> None:
        """Make the buffer that is copied out of."""
        self.staging = torch.empty(self.shard.staged.bytes, dtype=torch.uint8, device=device)
        found = self.shard.find(self.slices, self.staging)
        self._sources = [source.expand_as(target) for source, target in zip(found, self.targets, strict=True)]

    def apply(self) -> None:
        """Copy everything, on the current stream."""
        with torch.no_grad():
            torch._foreach_copy_(self.targets, self._sources)

    def verify_against_reload(self, model: nn.Module, reload: Callable[[NamedTensors], None]) -> str:
        """Why this plan does not do what `reload` does; empty if it does. Leaves model and buffer with drawn values.

        `reload` loads a layout's tensors in the way that is known to be right. The model is first loaded with other
        values, so that whatever the plan does not reach keeps something of them, also what loading only derives from
        the weights.
        """
        with torch.no_grad():
            reload(self._drawn(0))
            self._fill(self._drawn(1))
            self.apply()
            planned = dict(_sums(model))
            reload(self._drawn(1))
            stock = dict(_sums(model))
        wrong = sorted(name for name in stock if planned.get(name) != stock[name])
        return f"{len(wrong)} of {len(stock)} tensors differ, such as {wrong[0]}" if wrong else ""

    def _drawn(self, seed: int) -> NamedTensors:
        """Tensors of the layout, the same at each call; one is in memory at a time."""
        generator = torch.Generator(self.staging.device)
        for index, parameter in enumerate(self.layout.parameters):
            generator.manual_seed(seed * len(self.layout.parameters) + index)
            drawn = torch.rand(parameter.shape, generator=generator, device=self.staging.device)
            yield parameter.name, (drawn * _LARGEST).to(parameter.torch_dtype)

    def _fill(self, tensors: NamedTensors) -> None:
        """Have the staging buffer hold these tensors' slices."""
        views = [view for _, view in self.shard.staged.views(self.staging)]
        waiting = list(zip(self.shard.slices, views, strict=True))[::-1]
        for index, (_, tensor) in enumerate(tensors):
            while waiting and waiting[-1][0].tensor == index:
                each, view = waiting.pop()
                view.copy_(each.of(tensor))


_LARGEST = 100
"""Of the drawn values: whole numbers of several sizes, for types that hold no fractions."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets views through, writes copies down, and refuses everything else."""

    def __init__(self, plan: CopyPlan, blank: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._plan, self._blank = plan, blank.untyped_storage()._cdata

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet = func.overloadpacket
        if packet is torch.ops.aten.copy_:
            self._plan.targets.append(args[0])
            self._plan.slices.append(self._slice(args[1]))
            return args[0]
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self._plan.fills.append((args[0], float(args[1]) if len(args) > 1 else 0.0))
            return args[0]
        if packet is torch.ops.aten._to_copy and (kwargs or {}).get("dtype") in (None, args[0].dtype):
            return args[0]  # to where the model is
        if not _is_view(func):
            raise NoPlan(f"loading the weights uses {func}")
        return func(*args, **(kwargs or {}))

    def _slice(self, source: Tensor) -> Slice:
        """Which part of which tensor `source` is."""
        layout = self._plan.layout
        at = int(source.storage_offset()) * source.element_size()
        index = bisect_right(layout.offsets, at) - 1
        parameter = layout.parameters[index] if index < len(layout.parameters) else None
        ours = source.is_meta and source.untyped_storage()._cdata == self._blank
        if not ours or parameter is None or source.dtype != parameter.torch_dtype:
            raise NoPlan(f"loading the weights copies what is no part of them, {source.dtype}{list(source.shape)}")
        offset = (at - layout.offsets[index]) // parameter.width
        return Slice(index, offset, tuple(source.shape), tuple(source.stride()))


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


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
    for start in range(0, len(flat), _BLOCK):
        part = flat[start : start + _BLOCK].to(torch.int64)
        place = torch.arange(start, start + len(part), device=part.device) % _PERIOD + 1
        total += int((part * place).sum())
    return total
