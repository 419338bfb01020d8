"""One model with its optimizer, on one rank.

Owns sharding (FSDP2), mixed precision, the loop over micro-batches, and the state that checkpoints and servers need.
Promises sum semantics: a gradient is the sum over all micro-batches, calls and ranks of the weighted loss, so the
weights that the controller put into the batch are the only normalisation. Every method is a collective operation: all
ranks call it with the same number of micro-batches. Knows ranks; must not know tasks, rewards or when to step.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pipeline.config import OptimConfig
from pipeline.losses import Objective, measures, total
from pipeline.training.collate import MicroBatch, collate
from pipeline.training.model import Policy, build
from pipeline.training.optimizer import Optimizer, Step
from pipeline.training.rows import Batch
from pipeline.training.spec import ModelSpec

LAYER_UNIT = 1 << 20
_PREFIX = "network."


@dataclass(frozen=True)
class ModelInfo:
    """What the controller may know of a model."""

    parameters: int
    vocabulary: int


class Worker:
    """A sharded policy and its AdamW.

    Between `forward_backward` calls gradients accumulate; `optim_step` uses and clears them. Parameters are sharded
    whenever no method runs.
    """

    def __init__(self, spec: ModelSpec, mesh: DeviceMesh) -> None:
        """Build, shard and place the model."""
        self.device = torch.device(mesh.device_type)
        self.source = Path(spec.model.path)
        self.compute = torch.bfloat16 if spec.model.dtype == "bfloat16" else torch.float32
        self.policy = build(spec.model, spec.seed)
        _shard(self.policy, mesh, self.compute)
        self.policy.to(self.device)
        self.optimizer = Optimizer(self.policy, spec.optim or OptimConfig(), spec.steps)

    @property
    def info(self) -> ModelInfo:
        parameters = sum(p.numel() for p in self.policy.parameters())
        return ModelInfo(parameters, self.policy.network.config.vocab_size)

    def forward(self, micro_batches: Sequence[Batch], packed: bool) -> list[NDArray[np.float32]]:
        """Log-probabilities (nats) of each row's counted tokens, 0 elsewhere: float32[T] in the order of the rows."""
        answers: list[NDArray[np.float32]] = []
        with torch.no_grad():
            for batch in micro_batches:
                logprobs_N, _ = self._logprobs(collate(batch, packed, self.device), batch.temperature, False)
                answers += _by_row(batch, logprobs_N)
        self._reshard()
        return answers

    def forward_backward(
        self, micro_batches: Sequence[Batch], packed: bool, objective: Objective, loss_weight: float = 1.0
    ) -> dict[str, float]:
        """Add the gradient of `loss_weight` × loss; returns this rank's sums (see `pipeline.losses.total`)."""
        parts: list[dict[str, float]] = []
        for number, batch in enumerate(micro_batches):
            self._reduce_after(number == len(micro_batches) - 1)
            micro = collate(batch, packed, self.device)
            logprobs_N, entropy_N = self._logprobs(micro, batch.temperature, objective.entropy > 0)
            loss, sums = total(micro.loss_tokens(logprobs_N, entropy_N), objective)
            (loss * loss_weight).backward()  # type: ignore[no-untyped-call]
            parts.append(_numbers(sums))
        return measures.combine(parts)

    def optim_step(self) -> Step:
        """One step of AdamW with clipping; see `Optimizer.step`."""
        return self.optimizer.step()

    def reset_optimizer(self, optim: OptimConfig, steps: int) -> None:
        """Forget moments, gradients and progress: the next job's optimizer starts fresh."""
        self.policy.zero_grad(set_to_none=True)
        self.optimizer = Optimizer(self.policy, optim, steps)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, in compute type, under its Hugging Face name; a tied head appears once, as the
        embedding.

        Each item is a collective operation: every rank must take all items.
        """
        for name, parameter in self.policy.named_parameters():
            yield name.removeprefix(_PREFIX), _whole(parameter.detach().to(self.compute))

    def state(self) -> dict[str, Any]:
        """Sharded state for `torch.distributed.checkpoint`: parameters, moments and the optimizer's progress.

        Tensors are the live ones, so a loader may fill them in place; then call `load_state` with the same tree.
        """
        model, moments = states.get_state_dict(self.policy, self.optimizer.adamw)
        return {"model": model, "optimizer": moments, "progress": self.optimizer.progress()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a state of the form of `state()`."""
        states.set_state_dict(
            self.policy, self.optimizer.adamw, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.optimizer.load_progress(state["progress"])

    def export_hf(self, path: Path) -> None:
        """Write a directory that transformers and vLLM load, with the tokenizer of the model it came from."""
        whole = {name: tensor.cpu() for name, tensor in self.full_parameters()}
        if dist.get_rank() == 0:
            _copy_tokenizer(self.source, path)
            self.policy.network.save_pretrained(path, state_dict=whole)
        dist.barrier()

    def _logprobs(self, micro: MicroBatch, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
        answer = self.policy(micro.tokens_BT, micro.positions_BT, micro.segments, micro.predict_N, temperature, entropy)
        return cast(tuple[Tensor, Tensor | None], answer)

    def _reduce_after(self, last: bool) -> None:
        """Gradients cross ranks once a call, after the last micro-batch; until then they add up unsharded."""
        module = cast(FSDPModule, self.policy)
        module.set_requires_gradient_sync(last)

    def _reshard(self) -> None:
        """Without a backward pass the root keeps its parameters whole: give them back."""
        cast(FSDPModule, self.policy).reshard()


def _shard(policy: Policy, mesh: DeviceMesh, compute: torch.dtype) -> None:
    """FSDP2 over each large layer and the root, with gradients summed, not averaged, over the ranks.

    Layers of fewer than `LAYER_UNIT` parameters stay in the root's unit: gathering them one by one would save no memory
    worth having, and every collective operation waits for the slowest rank.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    large = [layer for layer in policy.layers if sum(p.numel() for p in layer.parameters()) >= LAYER_UNIT]
    for module in (*large, policy):
        sharded = fully_shard(module, mesh=mesh, mp_policy=precision)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _numbers(sums: dict[str, Tensor]) -> dict[str, float]:
    """All scalars in one transfer from the device."""
    values = torch.stack([value.double() for value in sums.values()]).tolist()
    return dict(zip(sums, values, strict=True))


def _by_row(batch: Batch, logprobs_N: Tensor) -> list[NDArray[np.float32]]:
    flat = logprobs_N.float().cpu().numpy()
    rows: list[NDArray[np.float32]] = []
    used = 0
    for row in batch.rows:
        whole = np.zeros(len(row), np.float32)
        whole[np.asarray(row.mask, bool)] = flat[used : used + row.counted]
        used += row.counted
        rows.append(whole)
    return rows


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Every file of a model directory except its weights and its config, which the export writes itself."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        weights = file.suffix in (".safetensors", ".bin") or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name != "config.json":
            shutil.copy2(file, target / file.name)
