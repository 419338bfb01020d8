"""AdamW, its schedule, and the clipping of gradients.

Owns the optimizer of one model on one rank. Promises that the gradient norm is that of the whole model, the same on
every rank; and that a step with a gradient that is not finite is skipped and counted, without a change of parameters or
moments. With a loss scale (float16), gradients are of the loss times the scale; the norm and the step are those of the
loss. Must not know batches or losses.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config import OptimConfig
from pipeline.errors import TrainingError
from pipeline.train.model.cpu_offload import local
from pipeline.train.model.loss_scale import LossScale
from pipeline.train.model.moment_storage import (
    read_moments,
    restored_types,
    stored_tensors,
    write_moments,
    zero_moments,
)

PIECE = 1 << 26
"""Parameters, at least, whose stored moments are converted to float32 at a time: 512 MiB for both moments, and 1.4 GB
more while they are coded in float8."""


@dataclass(frozen=True)
class OptimizerStep:
    """The result of an optimizer step.

    Attributes:
        grad_norm: of the loss, before clipping.
        lr: the learning rate.
        skipped: whether the gradient was not finite, so that nothing changed.
        loss_scale: the scale of this step's loss; None without loss scaling.
        overflowed: whether a skipped step halved the scale.
    """

    grad_norm: float
    lr: float
    skipped: bool
    loss_scale: int | None = None
    overflowed: bool = False


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of step `step` (0, 1, …) of `steps`: linear warm-up, then constant, or decay to 0 at `steps`."""
    # (step + 1) / (warmup_steps + 1): the first step has a positive rate, and step `warmup_steps` the full one.
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    if config.schedule == "linear":
        return config.lr * (1 - progress)
    if config.schedule == "cosine":
        return config.lr * (1 + math.cos(math.pi * progress)) / 2
    return config.lr


@dataclass(frozen=True)
class AdamSettings:
    """All settings of one step, in place of the optimizer's. As in torch's AdamW, every parameter decays, including
    vectors. `clip_norm` 0: no clipping."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) over the shards of a model; matrices decay, vectors do not."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        config: OptimConfig,
        steps: int,
        group: dist.ProcessGroup | None = None,
        scale: LossScale | None = None,
    ) -> None:
        """Create the optimizer of `parameters`, sharded over the ranks of `group` (None: over all ranks)."""
        self._scale = scale
        self.config, self.steps, self._group = config, steps, group
        self.taken, self.skipped = 0, 0
        self._rate: float | None = None
        self._parameters = list(parameters)
        matrices = [p for p in self._parameters if p.ndim > 1]
        vectors = [p for p in self._parameters if p.ndim <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        # It holds settings and state for checkpoints; `_update` computes its step.
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self._make_moments()

    @property
    def loss_scale(self) -> int:
        """The factor of the loss in the next backward pass; 1 without loss scaling."""
        return 1 if self._scale is None else self._scale.value

    def set_lr(self, lr: float) -> None:
        """Use this learning rate from now on, instead of the schedule's; a checkpoint does not contain it."""
        if not lr >= 0 or math.isinf(lr):
            raise TrainingError(f"a learning rate of {lr}; expected a finite number that is not negative")
        self._rate = lr

    @torch.no_grad()
    def step(self, settings: AdamSettings | None = None) -> OptimizerStep:
        """Clip, step and clear the gradients. All ranks take part; `taken` counts steps that changed the parameters.

        `settings` replace the optimizer's and its schedule for this step. The host waits for the device once, for the
        norm that it returns, after everything has been launched.
        """
        gradients = [local(p.grad) for p in self._parameters if p.grad is not None]
        if not gradients:
            raise TrainingError("optim_step without gradients: call forward_backward first")
        # The scale is a power of two, so dividing by it rounds nothing: metrics and steps are those without it.
        factor = self.loss_scale
        norm = self._global_norm(gradients) / factor
        lr = learning_rate(self.config, self.taken, self.steps) if self._rate is None else self._rate
        clip = self.config.clip_norm
        if settings is not None:
            lr, clip = settings.lr, settings.clip_norm
            for group in self.adamw.param_groups:
                group.update(
                    betas=(settings.beta1, settings.beta2), eps=settings.eps, weight_decay=settings.weight_decay
                )
        # As in `clip_grad_norm_` (Pascanu et al. 2013), with a norm over all ranks. The kernel divides by the scale.
        scale = ((norm + 1e-6) / clip).clamp(min=1.0).float() if clip else None
        if factor != 1:
            scale = norm.new_tensor(factor, dtype=torch.float32) if scale is None else scale * factor
        # The norm is the same on all ranks, so all of them skip, or none.
        self._update(lr, scale, skip=(~norm.isfinite()).float())
        self.adamw.zero_grad(set_to_none=True)
        measured = norm.item()
        finite = math.isfinite(measured)
        self.taken, self.skipped = self.taken + finite, self.skipped + (not finite)
        if self._scale is None:
            return OptimizerStep(measured, lr, not finite)
        return OptimizerStep(measured, lr, not finite, factor, self._scale.update(finite))

    def moments(self) -> list[Tensor]:
        """Every tensor of the optimizer's state."""
        return [tensor for state in self.adamw.state.values() for tensor in state.values()]

    def progress(self) -> dict[str, int]:
        """The counters in a checkpoint, in addition to the moments."""
        counters = {"taken": self.taken, "skipped": self.skipped}
        if self._scale is None:
            return counters
        return counters | {"loss_scale": self._scale.value, "good_steps": self._scale.good_steps}

    def load_progress(self, progress: dict[str, int]) -> None:
        self.taken, self.skipped = progress["taken"], progress["skipped"]
        if self._scale is not None:
            self._scale.value, self._scale.good_steps = progress["loss_scale"], progress["good_steps"]

    @contextmanager
    def own_settings(self) -> Iterator[torch.optim.AdamW]:
        """The optimizer, to load a state into it: the state's betas, epsilon, weight decay do not replace its own, and
        moments keep their type, which torch changes to that of the parameters."""
        own = [{key: group[key] for key in ("betas", "eps", "weight_decay")} for group in self.adamw.param_groups]
        yield self.adamw
        for group, settings in zip(self.adamw.param_groups, own, strict=True):
            group.update(settings)
        for state in self.adamw.state.values():
            state.update(restored_types(state, self.config.state_dtype))

    def _make_moments(self) -> None:
        """Create zero moments at step 0. torch creates them at the first step; to load a checkpoint before it would
        need an extra step, which the bias correction of all later steps would count."""
        for p in self._parameters:
            self.adamw.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                **zero_moments(p, self.config.state_dtype),
            }

    def _update(self, lr: float, scale: Tensor | None, skip: Tensor) -> None:
        """AdamW on this rank's shards, with gradients divided by `scale`; nothing if `skip` is 1.

        One fused kernel for each group, as in `AdamW(fused=True)`, whose own step on DTensors costs the host several
        milliseconds: it unwraps each of five lists of tensors.
        """
        generator = torch.Generator(self._parameters[0].device).manual_seed(self.taken)  # the same in a resumed run
        for group in self.adamw.param_groups:
            group["lr"] = lr
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            states = [self.adamw.state[p] for p in parameters]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            for piece in self._pieces(parameters):
                _fused_step(piece, group, scale, skip, generator)
            torch._foreach_sub_(steps, [skip] * len(steps))

    def _pieces(self, parameters: Sequence[Tensor]) -> Iterator["_Piece"]:
        """What one launch of the kernel updates: everything if moments are stored in float32, else at least `PIECE`
        parameters, since the kernel needs them in one type."""
        piece = _Piece()
        for p in parameters:
            state = self.adamw.state[p]
            assert p.grad is not None
            tensors = [local(p), local(p.grad), *stored_tensors(state)]
            if tensors[2].dtype == p.dtype:
                piece.add(tensors, state["step"])
                continue
            rows = max(1, PIECE * len(tensors[0]) // max(1, tensors[0].numel()))
            for parts in zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True):
                piece.add(parts, state["step"])
                if piece.size >= PIECE:
                    yield piece
                    piece = _Piece()
        if piece.steps:
            yield piece

    def _global_norm(self, gradients: list[Tensor]) -> Tensor:
        """√(Σ over ranks and tensors of ‖gradient‖²), a scalar on the device, summed in double precision."""
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float64)  # one kernel launch for all tensors
        squares = torch.stack(norms).square().sum()
        # Each parameter's shards are disjoint, so the squares add up over the ranks of one replica.
        dist.all_reduce(squares, group=self._group)
        return squares.sqrt()


class _Piece:
    """Tensors of one launch. Attributes: parameters, gradients, steps; and of each parameter the stored moments."""

    def __init__(self) -> None:
        self.size = 0
        self.parameters, self.gradients, self.steps = list[Tensor](), list[Tensor](), list[Tensor]()
        self.stored: list[Sequence[Tensor]] = []

    def add(self, tensors: Sequence[Tensor], step: Tensor) -> None:
        parameter, gradient, *stored = tensors
        self.parameters.append(parameter)
        self.gradients.append(gradient)
        self.stored.append(stored)
        self.steps.append(step)
        self.size += parameter.numel()


def _fused_step(
    piece: _Piece, group: dict[str, Any], scale: Tensor | None, skip: Tensor, generator: torch.Generator
) -> None:
    pairs = [read_moments(stored, p.dtype) for stored, p in zip(piece.stored, piece.parameters, strict=True)]
    first, second = ([pair[number] for pair in pairs] for number in range(2))
    torch._fused_adamw_(
        piece.parameters,
        piece.gradients,
        first,
        second,
        [],
        piece.steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=scale,
        found_inf=skip,
    )
    write_moments(piece.stored, first, second, skip, generator)
