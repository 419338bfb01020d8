"""AdamW's two moments as they are stored between two steps.

Owns the types of `optim.state_dtype`. Promises that every step gets both moments in the type of the parameters, that a
skipped step changes nothing, and that moments are sharded by rows as their parameter is: a checkpoint can be loaded by
any number of ranks. Must not know the step.

With `float8` a row of a matrix is divided into blocks of at most `BLOCK` columns. A block has codes in float8 (e4m3)
and one scale, a power of two, after which its largest code is between 128 and 256. The code of the second moment is
that of its root: a step divides by the root, so it needs no larger range than the first moment. It is rounded up or
down at random, with the mean that was not rounded: with 4 significant bits, rounding to nearest would undo every change
by less than a sixteenth, and the second moment changes by 1 − beta2. Vectors stay in float32, and a row without a
divisor that is a fitting block is one block. Blocks of moments with a scale each are those of Dettmers et al. (arXiv
2110.02861, section 2.1); scales that are powers of two, of the OCP Microscaling Formats (MX) 1.0.

    state = zero_moments(parameter, "float8")     # exp_avg, exp_avg_sq, and a scale of each
    tensors = stored_tensors(state)
    first, second = read_moments(tensors, torch.float32)
    write_moments([tensors], [first], [second], torch.zeros(()), torch.Generator().manual_seed(step))
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.config.schema import MomentType
from pipeline.train.model.cpu_offload import local

MOMENTS = "exp_avg", "exp_avg_sq"
SCALES = "exp_avg_scale", "exp_avg_sq_scale"
BLOCK = 256
"""Most columns with one scale, in rows that have a divisor from `_MIN_BLOCK` to this."""
_MIN_BLOCK = 32
"""A row whose length has no divisor from here to `BLOCK` is one block."""
_CODE = torch.float8_e4m3fn
_MAX_EXPONENT = 8
_MIN_SCALE_EXPONENT = -100
_MIN_CODE_EXPONENT = -9
"""That of the least positive code, which has one significant bit."""


def block_size(columns: int) -> int:
    """Number of columns with one scale, in rows of `columns`."""
    fitting = (size for size in range(min(columns, BLOCK), _MIN_BLOCK - 1, -1) if columns % size == 0)
    return next(fitting, columns)


def zero_moments(parameter: Tensor, moment_type: MomentType) -> dict[str, Tensor]:
    """Zero moments of a parameter by their names in AdamW's state, sharded as the parameter is."""
    if moment_type != "float8" or parameter.ndim < 2:
        dtype = torch.bfloat16 if moment_type == "bfloat16" else torch.float32
        return {name: torch.zeros_like(parameter, dtype=dtype) for name in MOMENTS}
    codes = {name: torch.zeros_like(parameter, dtype=_CODE) for name in MOMENTS}
    return codes | {name: _zero_scales(parameter) for name in SCALES}


def stored_tensors(state: dict[str, Tensor]) -> list[Tensor]:
    """This rank's shards of all tensors that store the moments of a parameter: both moments, and their scales if they
    have any. All have the parameter's rows."""
    return [local(state[name]) for name in (*MOMENTS, *SCALES) if name in state]


def restored_types(state: dict[str, Tensor], moment_type: MomentType) -> dict[str, Tensor]:
    """The stored tensors of a state that torch has loaded, which changes every type to that of the parameters."""
    code = _CODE if SCALES[0] in state else torch.bfloat16 if moment_type == "bfloat16" else torch.float32
    return {name: state[name].to(code) for name in MOMENTS}


def read_moments(stored: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both moments in `dtype`; the stored tensors themselves if they have it."""
    if len(stored) == len(MOMENTS):
        first, second = stored
        return first.to(dtype), second.to(dtype)
    first, root = (_decoded(codes, scales).to(dtype) for codes, scales in zip(stored[:2], stored[2:], strict=True))
    return first, root.square_()


def write_moments(
    stored: Sequence[Sequence[Tensor]],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    skip: Tensor,
    generator: torch.Generator,
) -> None:
    """Store the moments of some parameters after a step; nothing changes if `skip` is 1. `generator` rounds roots of
    second moments in float8; everything else is rounded to nearest."""
    targets, values = list[Tensor](), list[Tensor]()
    for tensors, one, two in zip(stored, first, second, strict=True):
        if len(tensors) > len(MOMENTS):
            _write_codes(tensors, one, two, skip.bool(), generator)
            continue
        for target, value in zip(tensors, (one, two), strict=True):
            if target is not value:  # otherwise the step has changed it in place
                targets.append(target)
                values.append(value)
    if targets:
        torch._foreach_copy_(targets, values)


def _write_codes(
    tensors: Sequence[Tensor], first: Tensor, second: Tensor, skip: Tensor, generator: torch.Generator
) -> None:
    pairs = _coded(first, tensors[2].shape[-1]), _coded(second.sqrt(), tensors[3].shape[-1], generator)
    for (codes, scales), old_codes, old_scales in zip(pairs, tensors[:2], tensors[2:], strict=True):
        # The last bit of small codes can change when they are coded again, so a skipped step must not do it.
        current = old_codes.view(torch.uint8)
        current.copy_(torch.where(skip, current, codes.view(torch.uint8)))
        old_scales.copy_(torch.where(skip, old_scales, scales))


def _zero_scales(parameter: Tensor) -> Tensor:
    blocks = parameter.shape[-1] // block_size(parameter.shape[-1])
    shape = (*parameter.shape[:-1], blocks)
    shard = local(parameter)
    scales = torch.zeros((*shard.shape[:-1], blocks), dtype=torch.float32, device=shard.device)
    if not isinstance(parameter, DTensor):
        return scales
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        scales, parameter.device_mesh, parameter.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _decoded(codes: Tensor, scales: Tensor) -> Tensor:
    return _blocks(codes.to(torch.float32), scales.shape[-1]).mul_(scales.unsqueeze(-1)).flatten(-2)


def _coded(values: Tensor, blocks: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales. With `generator` values are roots: rounded at random, and above zero never to zero."""
    grouped = _blocks(values.float(), blocks)
    exponents = torch.frexp(grouped.abs().amax(-1)).exponent - _MAX_EXPONENT
    scales = torch.exp2(exponents.clamp(min=_MIN_SCALE_EXPONENT).float())
    scaled = grouped / scales.unsqueeze(-1)
    if generator is not None:
        rounded = _rounded_at_random(scaled, generator).clamp(min=2.0**_MIN_CODE_EXPONENT)
        scaled = torch.where(scaled > 0, rounded, scaled)
    return scaled.to(_CODE).flatten(-2), scales


def _rounded_at_random(values: Tensor, generator: torch.Generator) -> Tensor:
    """Positive values on the grid of the codes: one of the two neighbors, with a probability such that the mean is the
    value."""
    # Codes have four significant bits, and are multiples of the least one below 2⁻⁶.
    step = torch.exp2((torch.frexp(values).exponent - 4).clamp(min=_MIN_CODE_EXPONENT).float())
    noise = torch.rand(values.shape, generator=generator, device=values.device)
    return (values / step + noise).floor_().mul_(step)


def _blocks(rows: Tensor, blocks: int) -> Tensor:
    """Rows [..., columns] as [..., blocks, columns of a block]; there may be no rows."""
    return rows.view(*rows.shape[:-1], blocks, rows.shape[-1] // blocks)
