"""Loading of checkpoint tensors into a serving model as a recorded list of copies.

Owns the recorded plan and its verification. A vLLM model fuses, slices and pads the tensors that it loads (query, key
and value in one matrix, gate and up in another, a slice of the vocabulary), each model in another way. The plan is
recorded generically: the model's `load_weights` runs once over tensors without memory, and its copies are recorded
instead of executed. A verified plan gives bit for bit the result of a reload, and reads only this process's `shard` of
the weights.

    plan = CopyPlan.record(model.load_weights, layout)
    plan.stage(device)                            # a buffer of the shard's size, on the device or its host
    if plan.verify_against_reload(model, reload) == "":
        ...                                       # fill plan.staging
        plan.apply()                              # a few kernel launches, between two steps of the engine
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
from pipeline.utils.pinned_memory import pinned_tensor

NamedTensors = Iterator[tuple[str, Tensor]]
_PERIOD = 65_521
_BLOCK = 1 << 24


class NoPlan(WeightSyncError):
    """The model's `load_weights` does more than copy, so it has no plan."""


@dataclass
class CopyPlan:
    """A list of copies `targets[i] ← slices[i]`, with broadcasting.

    Attributes:
        layout: the checkpoint's tensors.
        targets: views of the model's parameters. The plan is valid as long as the parameters keep their storage.
        slices: parts of the checkpoint's tensors.
        fills: parameters (views) that loading sets to a constant, and the constant.
        shard: all slices, with their layout in a staging buffer.
        staging: the staging buffer, uint8; set by `stage`, which also sets `device`, that of the model.
    """

    layout: WeightLayout
    targets: list[Tensor] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    fills: list[tuple[Tensor, float]] = field(default_factory=list)

    @classmethod
    def record(cls, load: Callable[[NamedTensors], Any], layout: WeightLayout) -> "CopyPlan":
        """Record the copies that `load` makes from tensors of this layout, without executing them.

        `NoPlan` names an operation other than a copy.
        """
        plan = cls(layout)
        blank = torch.empty(layout.bytes, dtype=torch.uint8, device="meta")
        with torch.no_grad(), _Recorder(plan, blank):
            load(iter(layout.views(blank)))
        plan.shard = Shard.of(layout, plan.slices)
        return plan

    shard: Shard = field(init=False)
    staging: Tensor = field(init=False)
    device: torch.device = field(init=False)
    _sources: list[Tensor] = field(init=False)

    def stage(self, device: torch.device, on_host: bool = False) -> None:
        """Allocate the staging buffer, the source of all copies, on the model's device or in pinned host memory."""
        self.device = device
        self.staging = staging_buffer(self.shard.staged.bytes, device, on_host)
        sources = self.shard.find(self.slices, self.staging)
        self._sources = [source.expand_as(target) for source, target in zip(sources, self.targets, strict=True)]

    def apply(self) -> None:
        """Execute all copies, on the current stream."""
        with torch.no_grad():
            torch._foreach_copy_(self.targets, self._sources, non_blocking=True)  # the host need not wait

    def fill_constants(self) -> None:
        """Set what loading sets to a constant, such as padded rows of a vocabulary. No update changes it afterwards."""
        with torch.no_grad():
            for target, value in self.fills:
                target.fill_(value)

    def verify_against_reload(self, model: nn.Module, reload: Callable[[NamedTensors], None]) -> str:
        """The difference between the results of this plan and of `reload`; empty if they are equal.

        `reload` loads a layout's tensors in vLLM's own way. Model and buffer have random values afterwards.
        """
        with torch.no_grad():
            # Other values first: a tensor that the plan misses keeps them, also one that loading derives from weights.
            reload(self._random_tensors(0))
            self._fill(self._random_tensors(1))
            self.apply()
            planned = dict(_checksums(model))
            reload(self._random_tensors(1))
            stock = dict(_checksums(model))
        wrong = sorted(name for name in stock if planned.get(name) != stock[name])
        return f"{len(wrong)} of {len(stock)} tensors differ, such as {wrong[0]}" if wrong else ""

    def _random_tensors(self, seed: int) -> NamedTensors:
        """Random tensors of the layout, the same for each call with a seed. One is in memory at a time."""
        generator = torch.Generator(self.device)
        for index, parameter in enumerate(self.layout.parameters):
            generator.manual_seed(seed * len(self.layout.parameters) + index)
            values = torch.rand(parameter.shape, generator=generator, device=self.device)
            yield parameter.name, (values * _MAX_VALUE).to(parameter.torch_dtype)

    def _fill(self, tensors: NamedTensors) -> None:
        """Copy the slices of these tensors to the staging buffer."""
        views = [view for _, view in self.shard.staged.views(self.staging)]
        pending = list(zip(self.shard.slices, views, strict=True))[::-1]
        for index, (_, tensor) in enumerate(tensors):
            while pending and pending[-1][0].tensor == index:
                part, view = pending.pop()
                view.copy_(part.of(tensor))


def staging_buffer(size: int, device: torch.device, on_host: bool) -> Tensor:
    """uint8[size] for weights that arrive: on a model's device or, with `on_host` and a GPU, in pinned host memory."""
    if on_host and device.type == "cuda":
        return pinned_tensor(size)
    return torch.empty(size, dtype=torch.uint8, device=device)


_MAX_VALUE = 100
"""Bound of random values: integer types then have different values too."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Executes views, records copies and fills without executing them, and refuses all other operations."""

    def __init__(self, plan: CopyPlan, blank: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._plan, self._blank = plan, blank.untyped_storage()._cdata

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet = func.overloadpacket
        if packet is torch.ops.aten.copy_:
            # Operands of copy_: the parameter's view, and a view of the blank buffer of the checkpoint's layout.
            self._plan.targets.append(args[0])
            self._plan.slices.append(self._slice(args[1]))
            return args[0]
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self._plan.fills.append((args[0], float(args[1]) if len(args) > 1 else 0.0))
            return args[0]
        if packet is torch.ops.aten._to_copy and (kwargs or {}).get("dtype") in (None, args[0].dtype):
            return args[0]  # a move to the model's device
        if not _is_view(func):
            raise NoPlan(f"loading the weights uses {func}")
        return func(*args, **(kwargs or {}))

    def _slice(self, source: Tensor) -> Slice:
        """The part of the checkpoint that `source`, a view of the blank buffer, refers to."""
        layout = self._plan.layout
        # The blank buffer has the checkpoint's layout, so a byte offset identifies a tensor and the position in it.
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
    return bool(returns) and all(value.alias_info is not None and not value.alias_info.is_write for value in returns)


def _checksums(model: nn.Module) -> Iterator[tuple[str, int]]:
    """(name, checksum) of every tensor of a module, including those that are neither parameter nor buffer."""
    for path, module in model.named_modules():
        attributes = {**module.__dict__, **module._parameters, **module._buffers}
        for name, value in attributes.items():
            if isinstance(value, Tensor) and value.numel() and not value.is_meta:
                yield f"{path}.{name}", _checksum(value.detach())


def _checksum(tensor: Tensor) -> int:
    """A checksum of a tensor's bytes, weighted by their positions."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    total = 0
    for start in range(0, len(flat), _BLOCK):
        part = flat[start : start + _BLOCK].to(torch.int64)
        # uint8 times at most 65,521, summed over 2**24 bytes: below 2**48, so int64 does not overflow.
        positions = torch.arange(start, start + len(part), device=part.device) % _PERIOD + 1
        total += int((part * positions).sum())
    return total
