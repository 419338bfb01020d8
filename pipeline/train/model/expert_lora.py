"""Adapters on the experts of a mixture: which families can have them, and what files call their tensors.

Owns the mapping between a tensor that stacks a matrix of every expert, such as `experts.gate_up_proj`, and the names of
its adapters in files. Must not know values, ranks or optimizers.

- Files that hold a matrix of each expert, such as `experts.3.gate_proj`: each has a low-rank pair, under the names that
  peft and vLLM load (`…experts.3.gate_proj.lora_A.weight`).
- Files that hold the stacks of memory, transposed (gpt-oss): one pair for each stack, in peft's form of such parameters
  (`experts.base_layer.lora_A.weight` for the first stack, `experts.lora_A.weight` for the second).
- A family whose files hold neither has no such adapters.

In memory A and B are stacked like the matrices, with a row for each expert, so they are sharded and spread like them.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from pipeline.config import LoraConfig
from pipeline.train.model.experts import ADAPTERS, ExpertAdapter, fused_experts

_KEY = re.compile(r"(.+\.experts)\.(\d+)\.([^.]+)\.weight")


@dataclass(frozen=True)
class ExpertMatrix:
    """One matrix of each expert of a layer, as a part of a tensor [X, O, I] of an experts module.

    Attributes:
        module: name of the module; `tensor`: of its parameter.
        name: what files call the matrix, such as `gate_proj`.
        rows: of O that are this matrix's.
        keys: the matrix's name in files, of each expert, without `.weight`; of a stack in files, what its adapter is
            called there.
        is_stack: whether files hold the stack.
    """

    module: str
    tensor: str
    name: str
    rows: slice
    keys: tuple[str, ...]
    is_stack: bool = False


def expert_tensors(network: nn.Module) -> set[str]:
    """What the parameters of fused experts are called in memory, such as `gate_up_proj`."""
    return {name for module in fused_experts(network) for name, _ in module.named_parameters(recurse=False)}


def expert_matrices(network: Any) -> list[ExpertMatrix]:
    """Every matrix of the experts of a network that can have adapters, by layer, in the order of their rows.

    Empty where there are no fused experts, and for a family whose files hold neither whole matrices of each expert nor
    the stacks, as numbered rows on their way to a file show.
    """
    modules: list[Any] = fused_experts(network)
    transposed = [module.is_transposed for module in modules]
    if any(transposed) != all(transposed):
        return []
    names = {id(module): name for name, module in network.named_modules()}
    stacks = {
        (names[id(module)], tensor): parameter.shape
        for module in modules
        for tensor, parameter in module.named_parameters(recurse=False)
        if not module.is_transposed or parameter.ndim == 3  # the others are biases
    }
    if not stacks or any(len(shape) != 3 for shape in stacks.values()):
        return []
    with torch.device("cpu"):
        numbered = _numbered(stacks)
        written = _written(network, numbered)
        return _stacked(stacks, numbered, written) if all(transposed) else _placed(stacks, written)


def add_expert_adapters(network: nn.Module, matrices: Collection[ExpertMatrix], lora: LoraConfig) -> None:
    """Give each of the matrices an adapter, without numbers; only adapters have gradients."""
    for matrix in matrices:
        module = network.get_submodule(matrix.module)
        if not hasattr(module, ADAPTERS):
            module.add_module(ADAPTERS, nn.ModuleDict())
        of_tensors: Any = getattr(module, ADAPTERS)
        if matrix.tensor not in of_tensors:
            of_tensors[matrix.tensor] = nn.ModuleDict()
        stack = getattr(module, matrix.tensor).detach()
        adapted = stack.transpose(1, 2) if matrix.is_stack else stack[:, matrix.rows]
        adapter = ExpertAdapter(adapted, matrix.keys, lora.rank, lora.alpha, is_stack=matrix.is_stack)
        of_tensors[matrix.tensor][matrix.name] = adapter


def _numbered(stacks: Mapping[tuple[str, str], Size]) -> dict[str, Tensor]:
    """The stacks by name, [X, rows, 2], if each row is one number: its number among all rows."""
    numbered, count = {}, 0
    for (module, tensor), shape in stacks.items():
        rows = shape[0] * shape[1]
        numbered[f"{module}.{tensor}"] = _numbers(count, rows).reshape(*shape[:2], 2)
        count += rows
    return numbered


def _written(network: Any, numbered: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a directory's files hold of numbered stacks, by key."""
    try:
        written: dict[str, Tensor] = revert_weight_conversion(network, dict(numbered))
    except (ValueError, RuntimeError, NotImplementedError):  # of a conversion that minds widths
        return {}
    return written


def _stacked(
    stacks: Mapping[tuple[str, str], Size], numbered: Mapping[str, Tensor], written: Mapping[str, Tensor]
) -> list[ExpertMatrix]:
    """The stacks as matrices, if files hold them as they are: for each module the first one and `down_proj`, around
    which peft wraps the module once more."""
    if numbered.keys() != written.keys() or not all(torch.equal(numbered[key], written[key]) for key in numbered):
        return []
    return [
        ExpertMatrix(
            module,
            tensor,
            tensor,
            slice(shape[2]),
            (module if tensor == "down_proj" else f"{module}.base_layer",),
            True,
        )
        for (module, tensor), shape in stacks.items()
    ]


def _placed(stacks: Mapping[tuple[str, str], Size], written: Mapping[str, Tensor]) -> list[ExpertMatrix]:
    """The matrices whose rows are those of `written`; none unless all rows of all stacks are."""
    by_row = {int(rows.flatten()[0]): (key, rows) for key, rows in written.items()}
    matrices: list[ExpertMatrix] = []
    first = 0
    for (module, tensor), (experts, height, _) in stacks.items():
        start = 0
        while start < height:
            starts = [first + expert * height + start for expert in range(experts)]
            parts = [by_row.get(row, ("", torch.empty(0))) for row in starts]
            size = len(parts[0][1])
            if not all(_is_matrix(*part, expert, starts[expert], size) for expert, part in enumerate(parts)):
                return []
            keys = tuple(key.removesuffix(".weight") for key, _ in parts)
            name = keys[0].rpartition(".")[-1]
            matrices.append(ExpertMatrix(module, tensor, name, slice(start, start + size), keys))
            start += size
        first += experts * height
    return matrices


def _is_matrix(key: str, rows: Tensor, expert: int, first: int, size: int) -> bool:
    """Whether that key of a file is a matrix of this expert, whose `size` rows are those from `first` on."""
    match = _KEY.fullmatch(key)
    return match is not None and int(match[2]) == expert and torch.equal(rows, _numbers(first, size))


def _numbers(first: int, count: int) -> Tensor:
    """[count, 2]: numbered rows. Those of one column would be squeezed."""
    return torch.arange(first, first + count).repeat(2, 1).T


def adapter_tensors(network: nn.Module, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The whole adapter parameter of that name in the network as those of a file: of experts, one for each, or one for
    a stack. Views, but for B of a stack."""
    owner, _, leaf = name.rpartition(".")
    module = network.get_submodule(owner)
    if not isinstance(module, ExpertAdapter):
        yield name, tensor
    elif module.is_stack:
        # peft: A [X, rank, I] → [X · rank, I]; B [X, O, rank] → [O, rank · X]
        packed = tensor.flatten(0, 1) if leaf == "lora_A" else tensor.permute(1, 2, 0).flatten(1)
        yield f"{module.keys[0]}.{leaf}.weight", packed
    else:
        yield from ((f"{key}.{leaf}.weight", tensor[expert]) for expert, key in enumerate(module.keys))


def adapter_parameter(name: str, shape: Size, tensors: Sequence[Tensor]) -> Tensor:
    """The whole adapter parameter of that name and shape from those of a file; the inverse of `adapter_tensors`."""
    if len(tensors) > 1 or len(shape) == 2 or tensors[0].shape == shape[1:]:
        return torch.stack(list(tensors)).view(shape)  # of a linear layer, `view` drops the dimension of the single one
    if name.endswith("lora_A"):
        return tensors[0].view(shape)
    experts, outputs, rank = shape
    return tensors[0].view(outputs, rank, experts).permute(2, 0, 1)
