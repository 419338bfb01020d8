"""Public tensors: the tensors of a model as servers and exports receive them.

Owns their names, types and shapes, and three ways to make them: whole on every rank, one at a time; on every rank in
blocks of rows; or only the rows that this rank publishes. Promises that the ranks of a replica together publish each
row exactly once. A renamed tensor, and a stack of experts, needs no communication to be published: a rank publishes its
own rows or experts. Tensors with any other conversion are gathered and converted whole, one group at a time, and each
rank publishes its part. Must not know the receiver.

    tensors = PublicTensors(model, form, torch.bfloat16, group, lora)
    tensors.layout(torch.bfloat16)                    # gathers nothing
    for name, tensor in tensors.gathered(torch.bfloat16): ...
    for name, first, rows in tensors.blocks(torch.bfloat16): ...
    tensors.fill_rows(targets)                        # one for each (first, last) of `tensors.rows`
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config import LoraConfig
from pipeline.inference.weight_sync.transports.gloo import WeightLayout
from pipeline.train.model.adapter_merge import merger
from pipeline.train.model.checkpoint_layout import CheckpointLayout, Tensors
from pipeline.train.model.cpu_offload import local
from pipeline.train.model.hf_export import adapter_tensors
from pipeline.train.model.models import DecoderModel, PolicyModel, checkpoint_tensors
from pipeline.train.model.row_shards import BLOCK_BYTES, gather, owned_rows, row_blocks, share_of
from pipeline.train.model.safetensors_files import Block
from pipeline.utils import heartbeat

Make = Callable[[Tensor, torch.dtype], Tensor]
Rows = tuple[int, int]
Split = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class _TensorGroup:
    """Tensors of the network that are converted together.

    Attributes:
        public: converts them to the public tensors.
        renamed: whether the group is a single tensor that at most gets another name.
        split: for a single stack whose rows, such as experts, become separate tensors: converts a block of rows, in the
            order of `public` (gate of all experts, then up of all experts).
    """

    tensors: Tensors
    public: Callable[[Tensors], Tensors]
    renamed: bool = False
    split: Split | None = None

    @property
    def single(self) -> Tensor:
        (tensor,) = self.tensors.values()
        return tensor


class PublicTensors:
    """The public tensors of one model: those of its checkpoint, or of its adapter if that is published alone.

    A critic's tensors have their names in memory.
    """

    def __init__(
        self,
        model: DecoderModel,
        form: CheckpointLayout,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        lora: LoraConfig,
    ) -> None:
        """`dtype` is the type of published parameters; `group` has the ranks of one replica."""
        self._model, self._form, self._dtype, self._group = model, form, dtype, group
        self._adapted, self._merge = lora.travels_alone, merger(model.network, lora, group)

    def layout(self, dtype: torch.dtype) -> WeightLayout:
        """Names, types and shapes of the items of `gathered`."""
        return WeightLayout.of(self._converted(dtype, _outline))

    def gathered(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All public tensors, whole; every rank of the replica must take every item."""
        for item in self._converted(dtype, self._gather):
            heartbeat.beat()
            yield item

    def blocks(self, dtype: torch.dtype) -> Iterator[Block]:
        """All public tensors in blocks of rows; every rank of the replica must take every item.

        A block has at most `BLOCK_BYTES`, or one row or expert. The tensors of a conversion other than renaming and
        stacking come whole, one conversion at a time.
        """
        for group in self._groups():
            heartbeat.beat()
            if group.renamed or group.split is not None:
                yield from self._blocks_of(group, dtype)
            else:
                made = group.public(self._made(group, dtype, self._gather))
                yield from ((name, 0, tensor) for name, tensor in made.items())
                del made  # before the next are gathered

    def _blocks_of(self, group: _TensorGroup, dtype: torch.dtype) -> Iterator[Block]:
        names = list(self._outlines(group))
        dtype = dtype if isinstance(group.single, nn.Parameter) else group.single.dtype
        if not group.single.ndim:
            yield names[0], 0, self._gather(group.single, dtype)
            return
        tensor = self._merge(group.single)
        for rows in row_blocks(_outline(tensor, dtype)):
            block = gather(tensor, dtype, self._group, rows)
            if group.split is None:
                yield names[0], rows.start, block
                continue
            for index, matrix in enumerate(group.split(block)):
                # As in `_fill_stack`: matrix 0 of every expert of the block, then matrix 1 …
                number, expert = divmod(index, len(block))
                yield names[number * len(tensor) + rows.start + expert], 0, matrix

    @cached_property
    def rows(self) -> tuple[Rows, ...]:
        """The rows `first:last` of each public tensor that this rank publishes."""
        return tuple(rows for of_group in self._rows_by_group for rows in of_group)

    @cached_property
    def _rows_by_group(self) -> list[list[Rows]]:
        """`rows`, by group. Computed once: for a sharded tensor this takes DTensor a part of a millisecond."""
        return [self._rows_of(group) for group in self._groups()]

    @torch.no_grad()
    def fill_rows(self, targets: Sequence[Tensor]) -> None:
        """Fill each target with this rank's rows of its tensor. Collective over the replica."""
        # The trainer's GPU has no work meanwhile, so the host must not take long: no arithmetic for each tensor, and
        # one launch for all tensors that are only copied.
        waiting, copies = iter(targets), _Copies()
        heartbeat.beat()
        for group, rows in zip(self._groups(), self._rows_by_group, strict=True):
            own = [next(waiting) for _ in rows]
            if group.renamed:
                copies.add(own[0], group.single, self._merge(group.single), rows[0])
                continue
            heartbeat.beat()
            if group.split is not None:
                self._fill_stack(group.single, group.split, own)
            else:
                self._fill_made(group, own, rows)
        copies.run()

    def _fill_stack(
        self, stack: Tensor, split: Callable[[Tensor], Sequence[Tensor]], targets: Sequence[Tensor]
    ) -> None:
        """Fill the targets of this rank's experts, one block of experts at a time."""
        # stack is [X, …]: X experts; `mine` has those from rows.start to rows.stop.
        rows, mine = owned_rows(stack, self._group), self._local(stack)
        step = max(1, BLOCK_BYTES * len(stack) // stack.nbytes)
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            for index, matrix in enumerate(split(mine[start - rows.start : stop - rows.start])):
                # `split` gives matrix 0 of every expert of the block, then matrix 1 …; `targets` has all X of each.
                kind, expert = divmod(index, stop - start)
                _copy(targets[kind * len(stack) + start + expert], matrix, (0, len(matrix)))

    def _local(self, tensor: Tensor) -> Tensor:
        """This rank's rows, including merged adapters. Collective if adapters are merged."""
        return local(self._merge(tensor).detach())

    def _gather(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return gather(self._merge(tensor), dtype, self._group)

    def _fill_made(self, group: _TensorGroup, targets: Sequence[Tensor], rows: Sequence[Rows]) -> None:
        made = group.public(self._made(group, self._dtype, self._gather))
        for tensor, target, (first, last) in zip(made.values(), targets, rows, strict=True):
            _copy(target, tensor[first:last] if tensor.ndim else tensor, (first, last))

    def _rows_of(self, group: _TensorGroup) -> list[Rows]:
        if group.renamed:
            rows = owned_rows(group.single, self._group)
            return [(rows.start, rows.stop)]
        sizes = [len(tensor) if tensor.ndim else 1 for tensor in self._outlines(group).values()]
        if group.split is not None:
            experts, count = owned_rows(group.single, self._group), len(group.single)
            owned = (experts.start <= index % count < experts.stop for index in range(len(sizes)))
            return [(0, size if own else 0) for own, size in zip(owned, sizes, strict=True)]
        ranks, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        parts = [share_of(size, ranks, rank) for size in sizes]
        return [(part.start, part.stop) for part in parts]

    def _outlines(self, group: _TensorGroup) -> Tensors:
        """The public tensors of a group, on the meta device."""
        return group.public(self._made(group, self._dtype, _outline))

    def _converted(self, dtype: torch.dtype, make: Make) -> Iterator[tuple[str, Tensor]]:
        for group in self._groups():
            made = group.public(self._made(group, dtype, make))
            yield from made.items()
            del made  # before the next are gathered

    @staticmethod
    def _made(group: _TensorGroup, dtype: torch.dtype, make: Make) -> Tensors:
        """Apply `make` to each tensor: parameters get `dtype`, buffers keep their type."""
        return {
            name: make(tensor, dtype if isinstance(tensor, nn.Parameter) else tensor.dtype)
            for name, tensor in group.tensors.items()
        }

    def _groups(self) -> Iterator[_TensorGroup]:
        if self._adapted:
            yield from (self._adapter_group(name, parameter) for name, parameter in self._trained())
        elif not isinstance(self._model, PolicyModel):
            yield from (_TensorGroup({name: p}, _unchanged, renamed=True) for name, p in self._trained())
        else:
            own = checkpoint_tensors(self._model, self._form)
            yield from (self._file_group({name: own[name] for name in names}) for names in self._form.groups)

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name.removeprefix("network."), parameter

    def _adapter_group(self, name: str, parameter: Tensor) -> _TensorGroup:
        """The group of an adapter's parameter; a parameter of experts holds one adapter per row."""

        def public(tensors: Tensors) -> Tensors:
            return dict(adapter_tensors(self._model.network, name, tensors[name]))

        first, *others = public({name: _outline(parameter, self._dtype)}).values()
        if first.shape == parameter.shape:
            return _TensorGroup({name: parameter}, public, renamed=True)
        if not others:  # of a stack: no row of it is a tensor of a file
            return _TensorGroup({name: parameter}, public)
        return _TensorGroup({name: parameter}, public, split=torch.Tensor.unbind)

    def _file_group(self, tensors: Tensors) -> _TensorGroup:
        if not self._form.converted & tensors.keys():
            return _TensorGroup(tensors, self._form.public, renamed=True)
        if not self._form.stacks & tensors.keys():
            return _TensorGroup(tensors, self._form.public)
        (name,) = tensors
        return _TensorGroup(
            tensors, self._form.public, split=lambda block: list(self._form.public({name: block}).values())
        )


class _Copies:
    """Copies of whole shards, run together: on a GPU one launch for each pair of types."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[torch.dtype, torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}

    def add(self, target: Tensor, parameter: Tensor, merged: Tensor, rows: Rows) -> None:
        """Copy this rank's rows of `merged`: later if it is the parameter, else now, since it is a tensor of its own
        whose memory the next one needs."""
        source = local(merged)
        if merged is not parameter:
            _copy(target, source, rows)
        elif rows[0] < rows[1]:
            key = (target.dtype, source.dtype, _is_asynchronous(target, source))
            targets, sources = self._pairs.setdefault(key, ([], []))
            targets.append(target)
            sources.append(source)

    def run(self) -> None:
        for (_, _, asynchronous), (targets, sources) in self._pairs.items():
            torch._foreach_copy_(targets, sources, non_blocking=asynchronous)


def _outline(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _unchanged(tensors: Tensors) -> Tensors:
    return tensors


def _copy(target: Tensor, source: Tensor, rows: Rows) -> None:
    """Copy and convert to the target's type."""
    if rows[0] < rows[1]:
        target.copy_(source, non_blocking=_is_asynchronous(target, source))


def _is_asynchronous(target: Tensor, source: Tensor) -> bool:
    """Whether the host need not wait for a copy: within a GPU, or from a GPU to pinned memory."""
    return source.is_cuda and (target.is_cuda or target.is_pinned())
