"""The experts of a mixture: one grouped matrix product for all experts of a layer.

transformers calls a registered function with an experts module, as it calls an attention function. This one serves
every family whose experts are fused: stacked in `up_proj` or `gate_up_proj`, and `down_proj`. Activation, biases and
the order of dimensions are attributes of the module. Other experts keep their own forward pass.

With expert parallelism a rank has some experts of each layer, and tokens travel to them (`expert_dispatch`).

An adapter on experts (`ExpertAdapter`) adds two thin grouped products of the sorted tokens; no whole matrix is made.

Tokens are sorted by expert once. The gradient of the sort is a gather and a sum in float32, where autograd's own is a
scatter in compute type.

A compiled layer contains the function where it can: in bfloat16, the only type that `grouped_mm` takes in a graph, and
without expert parallelism, whose sizes of messages the host must know. Elsewhere the graph breaks around it.

Notation: T tokens, K experts of each token, S = T × K slots, X experts, E features.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import grouped_mm
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from pipeline.config.model_directory import EXPERTS_PER_TOKEN
from pipeline.errors import ConfigError
from pipeline.train.model.cpu_offload import local
from pipeline.train.model.expert_dispatch import run_on_owners

EXPERTS = "rollcall"
GROUP = "expert_group"
"""The attribute of an experts module that has the process group over which its experts are spread."""
ADAPTERS = "adapters"
"""The attribute of an experts module with the adapters of its tensors, by the tensor's name (`expert_lora`)."""
GATE, SCALE = "compiled_gate", "compiled_scale"
"""The attributes of an experts module with its compiled functions of arrived tokens, if layers are compiled."""
COUNTS = "expert_counts"
"""The attribute with int64[X], to which passes with gradients add the tokens that were sent to each expert; without it
nothing is counted. Where activations are recomputed, each token may count twice."""
WEIGHTS = "token_weights"
"""The attribute with how often each token counts."""
_ALIGNMENT = 16
"""Bytes. `grouped_mm` needs rows of this alignment."""


def use_grouped_experts(network: nn.Module) -> int:
    """Have the fused experts of a network computed by `experts_forward`; returns the number of such layers."""
    fused = fused_experts(network)
    for module in fused:
        cast(Any, module).config._experts_implementation = EXPERTS
    return len(fused)


def fused_experts(network: nn.Module) -> list[nn.Module]:
    """The experts modules of a network that `experts_forward` computes, in order."""
    return [module for module in network.modules() if is_fused(module)]


def experts_per_token(settings: Any) -> int:
    """How many experts of a layer each token is sent to; 0 where the text config of a model does not say."""
    return next((k for name in EXPERTS_PER_TOKEN if isinstance(k := getattr(settings, name, None), int)), 0)


def is_fused(module: nn.Module) -> bool:
    """Whether a module holds all experts of a layer in the form that `experts_forward` computes."""
    named = dict(module.named_parameters(recurse=False))
    up = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    return hasattr(module, "is_transposed") and up in named and "down_proj" in named


def spread_experts(network: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Give each rank of `mesh` an equal part of the experts of each layer; returns the modules, in order.

    Each tensor becomes a DTensor, sharded by its first dimension. Raises what `refuse_unspreadable` raises.
    """
    refuse_unspreadable(network, mesh.size())
    modules = fused_experts(network)
    for module in modules:
        setattr(module, GROUP, mesh.get_group())
        for owner in module.modules():  # adapters too have a row for each expert
            for name, parameter in list(owner.named_parameters(recurse=False)):
                spread = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
                owner.register_parameter(name, nn.Parameter(spread, parameter.requires_grad))
    return modules


def refuse_unspreadable(network: nn.Module, ranks: int) -> None:
    """`ConfigError` unless the network has experts, all of them fused, which the ranks can share evenly."""
    modules: list[Any] = fused_experts(network)
    named = ((name.rpartition(".")[-1], type(module).__name__, module) for name, module in network.named_modules())
    others = [kind for leaf, kind, module in named if (leaf == "experts" or "Experts" in kind) and not is_fused(module)]
    if others or not modules:
        what = f"with experts that are not fused ({others[0]})" if others else "without experts"
        raise ConfigError("training.mesh.ep", ranks, f"1 for a model {what}", "remove it")
    for count in sorted({len(module.down_proj) for module in modules}):
        if count % ranks:
            allowed = ", ".join(str(divisor) for divisor in range(1, count + 1) if count % divisor == 0)
            expected = f"a divisor of {count}, the experts of a layer: {allowed}"
            raise ConfigError("training.mesh.ep", ranks, expected, "change it")


def experts_forward(module: Any, hidden_TE: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The weighted sum [T, E] over each token's experts, summed in float32 (float64 for float64 input)."""
    in_graph = hidden_TE.dtype == torch.bfloat16 and not hasattr(module, GROUP)
    return (_forward if in_graph else _forward_eagerly)(module, hidden_TE, chosen_TK, weights_TK)


def _forward(module: Any, hidden_TE: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    T, K = chosen_TK.shape
    expert_S = chosen_TK.reshape(-1)
    counts_X = _tokens_per_expert(expert_S, len(module.down_proj))
    if torch.is_grad_enabled() and hasattr(module, COUNTS):
        # In place: a graph would be compiled again for a new tensor.
        getattr(module, COUNTS).scatter_add_(0, expert_S, getattr(module, WEIGHTS).repeat_interleave(K))
    if group := getattr(module, GROUP, None):
        compute = partial(_of_arrived, module)
        return run_on_owners(compute, hidden_TE, chosen_TK, weights_TK, len(counts_X), group)
    order_S = torch.argsort(expert_S, stable=True)
    inverse_S = _inverse_of(order_S)
    sorted_SE = _apply(_Take, hidden_TE, order_S, inverse_S, K)
    output_SE = _of_experts(module, sorted_SE, expert_S[order_S], counts_X)
    output_TKE = _apply(_Permute, output_SE, inverse_S, order_S).view(T, K, hidden_TE.shape[1])
    total_TE = (output_TKE * weights_TK.unsqueeze(-1)).sum(1, dtype=_exact(hidden_TE.dtype))
    return total_TE.to(hidden_TE.dtype)


_forward_eagerly = torch.compiler.disable(_forward)  # type: ignore[no-untyped-call]


def compile_arrived(network: nn.Module) -> None:
    """Compile the functions between the grouped products of arrived tokens; products and exchange stay eager."""
    for module in cast(list[Any], fused_experts(network)):
        if module.has_gate:
            setattr(module, GATE, torch.compile(module._apply_gate))
        setattr(module, SCALE, torch.compile(_scale))


def _of_arrived(module: Any, sorted_SE: Tensor, weights_S: Tensor, expert_S: Tensor, counts_X: Tensor) -> Tensor:
    """[S, E]: what the experts that this rank has make of tokens sorted by expert, times the weight of each."""
    gate = getattr(module, GATE, None)
    output_SE = _of_experts(module, sorted_SE, expert_S, counts_X, gate)
    return cast(Tensor, getattr(module, SCALE, _scale)(output_SE, weights_S))


def _scale(rows_SE: Tensor, weights_S: Tensor) -> Tensor:
    return (rows_SE * weights_S.unsqueeze(-1)).to(rows_SE.dtype)


def _of_experts(
    module: Any, sorted_SE: Tensor, expert_S: Tensor, counts_X: Tensor, gate: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """[S, E]: what the experts that this rank has make of tokens sorted by expert; X counts the experts here.

    `gate` stands in for the module's own.
    """
    ends_X = counts_X.cumsum(0).to(torch.int32)
    if module.has_gate:
        inner_SI = (gate or module._apply_gate)(_linear(module, "gate_up_proj", sorted_SE, expert_S, ends_X))
    else:
        inner_SI = module.act_fn(_linear(module, "up_proj", sorted_SE, expert_S, ends_X))
    return _linear(module, "down_proj", inner_SI, expert_S, ends_X)


def grouped_product(x_SI: Tensor, matrices_XIO: Tensor, ends_X: Tensor) -> Tensor:
    """[S, O]: rows of `x_SI` up to `ends_X[i]` by matrix i.

    A loop stands in where `grouped_mm` has no kernel: float64, rows without alignment, float32 on CUDA.
    """
    aligned = matrices_XIO.shape[-1] * matrices_XIO.itemsize % _ALIGNMENT == 0  # rows of the output's gradient
    if aligned and _has_kernel(x_SI) and _has_kernel(matrices_XIO):
        return grouped_mm(x_SI, matrices_XIO, offs=ends_X)
    return _apply(_Loop, x_SI, matrices_XIO, ends_X)


def _linear(module: Any, name: str, x_SI: Tensor, expert_S: Tensor, ends_X: Tensor) -> Tensor:
    matrices = local(getattr(module, name)).to(x_SI.dtype)
    y_SO = grouped_product(x_SI, matrices if module.is_transposed else matrices.transpose(-2, -1), ends_X)
    if module.has_bias:
        y_SO = y_SO + local(getattr(module, f"{name}_bias")).index_select(0, expert_S)
    adapters = getattr(module, ADAPTERS, None)
    return (
        y_SO
        if adapters is None
        else y_SO + torch.cat([adapter(x_SI, ends_X) for adapter in adapters[name].values()], -1)
    )


class ExpertAdapter(nn.Module):
    """LoRA of one matrix of each expert: its product gains alpha / rank · B A, with A [X, rank, I] and B [X, O, rank].

    Attributes:
        keys: what a model directory calls the matrix of each expert, in order.
        is_stack: whether the directory has one tensor for all experts; then there is one key, its adapter's.
    """

    def __init__(
        self, matrices: Tensor, keys: Sequence[str], rank: int, alpha: float, *, is_stack: bool = False
    ) -> None:
        """`matrices` [X, O, I] are adapted; A and B get their type and device, and no numbers."""
        super().__init__()
        experts, outputs, inputs = matrices.shape
        self.keys, self.is_stack, self.scale = tuple(keys), is_stack, alpha / rank
        self.lora_A = nn.Parameter(matrices.new_empty(experts, rank, inputs))
        self.lora_B = nn.Parameter(matrices.new_empty(experts, outputs, rank))

    def forward(self, x_SI: Tensor, ends_X: Tensor) -> Tensor:
        """[S, O]: what the adapters of the experts that are here add for sorted tokens."""
        A, B = (local(parameter).to(x_SI.dtype).transpose(-2, -1) for parameter in (self.lora_A, self.lora_B))
        output_SO = grouped_product(grouped_product(x_SI, A, ends_X), B, ends_X)
        return output_SO * self.scale


def _tokens_per_expert(expert_S: Tensor, experts: int) -> Tensor:
    counts_X = torch.zeros(experts, dtype=torch.int64, device=expert_S.device)
    return counts_X.scatter_add_(0, expert_S, torch.ones_like(expert_S))


def _has_kernel(x: Tensor) -> bool:
    kinds = (torch.bfloat16,) if x.is_cuda else (torch.bfloat16, torch.float16, torch.float32)
    strides = (stride * x.itemsize % _ALIGNMENT == 0 for stride in x.stride() if stride != 1)
    # A graph cannot read addresses; inductor allocates on boundaries of 16 bytes.
    aligned = torch.compiler.is_compiling() or x.data_ptr() % _ALIGNMENT == 0
    return x.dtype in kinds and x.numel() > 0 and aligned and all(strides)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _inverse_of(order_S: Tensor) -> Tensor:
    """The permutation that undoes this one."""
    inverse_S = torch.empty_like(order_S)
    inverse_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    return inverse_S


def _apply(function: Any, *arguments: Any) -> Tensor:
    """`function.apply`, of a `torch.autograd.Function`."""
    return cast(Tensor, function.apply(*arguments))


class _Permute(torch.autograd.Function):
    """`table[order]` of a permutation; its gradient is the other way's gather."""

    @staticmethod
    def forward(ctx: Any, table_SE: Tensor, order_S: Tensor, inverse_S: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_S)
        return table_SE.index_select(0, order_S)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        (inverse_S,), (slope_SE,) = ctx.saved_tensors, slopes
        return slope_SE.index_select(0, inverse_S), None, None


class _Take(torch.autograd.Function):
    """`table[order // K]`: each row K times, sorted. Its gradient is gathered and summed, not scattered."""

    @staticmethod
    def forward(ctx: Any, table_TE: Tensor, order_S: Tensor, inverse_S: Tensor, K: int) -> Tensor:
        ctx.save_for_backward(inverse_S)
        ctx.K = K
        return table_TE.index_select(0, order_S // K)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_S,), (slope_SE,) = ctx.saved_tensors, slopes
        slope_TKE = slope_SE.index_select(0, inverse_S).view(len(inverse_S) // ctx.K, ctx.K, slope_SE.shape[-1])
        return slope_TKE.sum(1, dtype=_exact(slope_SE.dtype)).to(slope_SE.dtype), None, None, None


class _Loop(torch.autograd.Function):
    """`grouped_mm` by a loop over experts."""

    @staticmethod
    def forward(ctx: Any, x_SI: Tensor, matrices_XIO: Tensor, ends_X: Tensor) -> Tensor:
        ctx.save_for_backward(x_SI, matrices_XIO)
        ends = ends_X.tolist()
        ctx.parts = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        return torch.cat([x_SI[part] @ matrices_XIO[i] for i, part in enumerate(ctx.parts)])

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x_SI, matrices_XIO), (slope_SO,) = ctx.saved_tensors, slopes
        of_x = torch.cat([slope_SO[part] @ matrices_XIO[i].T for i, part in enumerate(ctx.parts)])
        if not ctx.needs_input_grad[1]:  # below adapters
            return of_x, None, None
        return of_x, torch.stack([x_SI[part].T @ slope_SO[part] for part in ctx.parts]), None


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
