"""One model with its optimizer, on one rank.

Owns the loop over micro-batches, the optimizer step, and the state that checkpoints and servers need. Promises sum
semantics: a gradient is the sum over all micro-batches, calls and ranks of the weighted loss, so the loss weights that
the controller put into the batch are the only normalization. Every method is a collective operation: all ranks call it
with the same number of micro-batches. Must not know tasks, rewards or when to step.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from torch.distributed.fsdp import FSDPModule

from pipeline.algorithms import loss_metrics
from pipeline.config import LoraConfig, OptimConfig
from pipeline.errors import TrainingError
from pipeline.inference.weight_sync.transports.gloo import WeightLayout
from pipeline.train.batching.packing import Packing
from pipeline.train.batching.sequences import Batch
from pipeline.train.loss_specs import LossSpec, MetricsLevel, ScoreLoss, ValueLoss
from pipeline.train.model.collate import MicroBatch, collate
from pipeline.train.model.context_parallel import ContextParallel
from pipeline.train.model.cpu_offload import Memory, Offloadable, Part, allocated, empty_cache
from pipeline.train.model.expert_load import ExpertLoad
from pipeline.train.model.fsdp import shard_model
from pipeline.train.model.hf_export import (
    refuse_unwritable,
    refuse_unwritable_score,
    write_model,
    write_reward_model,
)
from pipeline.train.model.loss_scale import LossScale
from pipeline.train.model.model_flops import ModelFlops
from pipeline.train.model.models import (
    PolicyModel,
    build_on_meta,
    compile_layers,
    copy_parameters,
    materialize,
    store_frozen,
)
from pipeline.train.model.optimizer import AdamSettings, Optimizer, OptimizerStep
from pipeline.train.model.public_tensors import PublicTensors
from pipeline.train.model.recomputation import recompute_activations
from pipeline.train.model.router_loss import RouterLoss
from pipeline.train.model.routing_replay import RoutingReplay
from pipeline.train.model.weight_loading import WeightLoader
from pipeline.train.model.worker_outputs import by_row, numbers
from pipeline.train.total_loss import total, total_score, total_value
from pipeline.train.worker_spec import ModelSpec
from pipeline.utils import heartbeat


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model for the controller.

    Attributes:
        parameters: number of parameters, including adapters.
        vocabulary: size of the vocabulary; valid token ids are 0 … vocabulary − 1.
        flops: operations of a forward and backward pass; see `DecoderModel.flops`.
    """

    parameters: int
    vocabulary: int
    flops: ModelFlops


class ModelWorker:
    """A sharded model and, if it is trained, its AdamW.

    Between `forward_backward` calls gradients accumulate; `optim_step` uses and clears them. Parameters are sharded
    whenever no method runs. Parameters without a gradient (with adapters, the whole base) are neither trained nor part
    of `full_parameters` and `state`, and are stored in the compute type; so is a model without an optimizer. The caller
    loads an offloaded part before a method that needs it. After an exception in the middle of a pass the model refuses
    passes, steps and `state`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        mesh: DeviceMesh,
        expert_mesh: DeviceMesh | None = None,
        context: ContextParallel | None = None,
    ) -> None:
        """Build the model on the meta device, shard it, and fill the shards on the device.

        Args:
            spec: the model and its optimizer.
            mesh: the ranks; the last dimension shards the parameters, the first of two replicates them (HSDP).
            expert_mesh: see `shard_model`.
            context: the ranks that share each micro-batch (context parallelism).

        Raises the errors of `build_on_meta`, `WeightLoader` and `materialize`.
        """
        self.device = torch.device(mesh.device_type)
        self._config, self.context = spec.model, context
        self.compute: torch.dtype = getattr(torch, spec.model.dtype)
        self._first_scale = spec.loss_scale
        self.model = build_on_meta(spec.model, spec.kind)
        if spec.optim is not None and spec.kind == "policy":
            refuse_unwritable(self.model.network, spec.model)
        store_frozen(self.model, self.compute, trained=spec.optim is not None)
        self._replay = RoutingReplay(self.model.network) if spec.routing_replay else None
        recompute_activations(self.model, spec.activation_checkpointing)
        self.compiled = spec.compile
        if spec.compile:
            compile_layers(self.model)
        self._reshard, self._broken = spec.reshard, False
        shard_model(self.model, mesh, self.compute, spec.reshard, expert_mesh)
        weights = WeightLoader(spec.model)
        materialize(self.model, weights, spec.model, spec.seed, self.device)
        self._untrained, self._kind = weights.form.untrained, spec.kind
        if spec.kind == "reward_model":
            refuse_unwritable_score(self.model.network, spec.model, converted=bool(weights.form.converted))
        self._expert_load, self._router_loss = ExpertLoad(self.model), RouterLoss(self.model)
        self.group, self.ranks = mesh.get_group(mesh.ndim - 1), mesh.size()
        self.replica = mesh.get_local_rank(0) if mesh.ndim > 1 else 0
        self.public = PublicTensors(self.model, weights.form, self.compute, self.group, spec.model.lora)
        self.optimizer = None if spec.optim is None else self._fresh_optimizer(spec.optim, spec.steps)
        self._parts: dict[Part, Offloadable] = {
            "model": Offloadable(self._model_tensors),
            "optimizer": Offloadable(self._moments),
        }

    @property
    def adapters(self) -> LoraConfig:
        """The settings of the model's adapters; `rank` is 0 without adapters."""
        return self._config.lora

    @property
    def info(self) -> ModelInfo:
        parameters = sum(p.numel() for p in self.model.parameters())
        return ModelInfo(parameters, self.model.vocabulary, self.model.flops)

    def forward(self, micro_batches: Sequence[Batch], how: Packing) -> list[NDArray[np.float32]]:
        """The model's output for each row's counted tokens, 0 elsewhere: float32[T], in the order of the rows.

        Of a policy, their log-probabilities in nats; of a critic, the value of the state before each token.
        """
        answers: list[Tensor] = []
        with torch.no_grad(), self.passes():
            for batch in micro_batches:
                micro = self._collate(batch, how)
                with self._replaying(micro):
                    answers.append(self._answer(micro, batch.temperature))
        return by_row(micro_batches, answers)

    def forward_backward(
        self,
        micro_batches: Sequence[Batch],
        how: Packing,
        objective: LossSpec,
        loss_weight: float = 1.0,
        level: MetricsLevel = "basic",
    ) -> dict[str, float]:
        """Add the gradient of `loss_weight` × loss.

        Returns this rank's sums of the loss and its metrics (see `pipeline.train.total_loss.total`).
        """
        optimizer = self._trainer()
        self._refuse_loss(objective)
        parts: list[dict[str, Tensor]] = []
        with self.passes():
            for number, batch in enumerate(micro_batches):
                self.reduce_after(number == len(micro_batches) - 1)
                micro = self._collate(batch, how)
                with self._expert_load.counting(micro.rows_T, self.device), self._replaying(micro):
                    loss, sums = self._loss(micro, batch.temperature, objective, level)
                    auxiliary, measured = self._router_loss.take(micro)
                    ((loss + auxiliary) * (loss_weight * optimizer.loss_scale)).backward()  # type: ignore[no-untyped-call]
                    self._router_loss.forget()
                parts.append(sums if level == "none" else sums | measured)
        loads = self._expert_load.collect(measured=level != "none", rate=optimizer.config.router_bias_rate)
        return loss_metrics.combine(numbers(parts)) | loads

    @property
    def loss_scale(self) -> int:
        """The factor of a loss in a backward pass outside of `forward_backward`; 1 unless compute is float16."""
        return self._trainer().loss_scale

    def optim_step(self, settings: AdamSettings | None = None) -> OptimizerStep:
        """One step of AdamW with clipping; see `Optimizer.step`."""
        self._refuse_if_broken()
        optimizer = self._trainer()
        step = optimizer.step(settings)
        self._expert_load.balance(optimizer.config.router_bias_rate, skipped=step.skipped)
        return step

    def set_lr(self, lr: float) -> None:
        """Set a constant learning rate in place of the schedule; see `Optimizer.set_lr`."""
        self._trainer().set_lr(lr)

    def reset_optimizer(self, optim: OptimConfig, steps: int) -> None:
        """Replace the optimizer by a new one for the next training job; drops moments, gradients and progress."""
        self._trainer()
        self.model.zero_grad(set_to_none=True)
        self.optimizer = self._fresh_optimizer(optim, steps)
        self._parts["optimizer"] = Offloadable(self._moments)

    def restart_optimizer(self) -> None:
        """Call `reset_optimizer` with the present settings."""
        own = self._trainer()
        self.reset_optimizer(own.config, own.steps)

    def copy_from(self, other: "ModelWorker") -> None:
        """Copy the parameters of another model of the same architecture and sharding.

        A critic copies the decoder and keeps its head. From a policy with adapters it copies the base weights.
        """
        copy_parameters(other.model, self.model)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The whole parameters as tensors of a Hugging Face checkpoint, in the compute type.

        The names and shapes are those of the model's directory; of a tied head, the embedding alone. Buffers keep their
        type. With adapters: the adapters alone, as tensors of a peft checkpoint, or with `lora.merge` the merged
        weights. A critic's tensors have their names in memory.

        Each item may be a collective operation: every rank must take all items.
        """
        return self.public.gathered(self.compute)

    @property
    def layout(self) -> WeightLayout:
        """Names, types and shapes of the items of `full_parameters`; gathers nothing."""
        return self.public.layout(self.compute)

    def state(self) -> dict[str, Any]:
        """Sharded state for `torch.distributed.checkpoint`: parameters and, of a trained model, the moments and the
        optimizer's progress.

        Tensors are the live ones, so a loader may fill them in place; then call `load_state` with the same tree.
        """
        self._refuse_if_broken()
        model = states.get_model_state_dict(self.model, options=self._options)
        if self.optimizer is None:
            return {"model": model}
        moments = states.get_optimizer_state_dict(self.model, self.optimizer.adamw, options=self._options)
        return {"model": model, "optimizer": moments, "progress": self.optimizer.progress()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a tree of the structure of `state()`.

        Betas, epsilon and weight decay stay those of the spec: torch stores them with the moments, and a resumed run
        may have changed them.
        """
        states.set_model_state_dict(self.model, state["model"], options=self._options)
        if self.optimizer is not None:
            with self.optimizer.own_settings() as adamw:
                states.set_optimizer_state_dict(self.model, adamw, state["optimizer"], options=self._options)
            self.optimizer.load_progress(state["progress"])

    def save_hf_model(self, path: Path) -> None:
        """Write a model directory for transformers and vLLM, with the tokenizer of the original model.

        A policy with unmerged adapters is written as an adapter directory for peft and vLLM, always in float32, so that
        a job which starts from it loses no precision. Whole models are written in the compute type; a reward model as a
        sequence classifier with one label.
        """
        if self._kind == "critic":
            raise TrainingError("a critic has no Hugging Face format; a policy or a reward model can be saved as one")
        dtype = torch.float32 if self._config.lora.travels_alone else self.compute
        blocks = self.public.blocks(dtype)
        try:
            if dist.get_rank() == 0:
                layout, untrained = self.public.layout(dtype), self._untrained
                if self._kind == "reward_model":
                    write_reward_model(path, self.model.network, layout, blocks, self._config)
                else:
                    write_model(path, self.model.network, layout, blocks, self._config, untrained)
        finally:
            # Each item is a collective operation. The other ranks take all items here, and so does rank 0 after a
            # failed write: else its peers would wait until their timeout.
            for _ in blocks:
                pass
        dist.barrier()

    def offload(self, part: Part) -> None:
        """Move a part to host memory; see `Offloadable`. Gradients move with the model."""
        self._parts[part].offload()

    def load(self, part: Part) -> None:
        """Move an offloaded part back to the device."""
        self._parts[part].load()

    def discard(self) -> None:
        """Free the memory of all parts, without a copy, for a model that is not used again."""
        for part in self._parts.values():
            part.discard()
        empty_cache(self.device)

    def memory(self) -> Memory:
        """Bytes on the device: of this process, and of this model's parts."""
        return Memory(allocated(self.device), self._parts["model"].resident, self._parts["optimizer"].resident)

    def empty_cache(self) -> None:
        """Return free blocks of torch's allocator to the device."""
        empty_cache(self.device)

    @property
    def _options(self) -> states.StateDictOptions:
        adapted = self._config.lora.rank > 0
        return states.StateDictOptions(ignore_frozen_params=adapted, strict=not adapted)

    def _trainer(self) -> Optimizer:
        if self.optimizer is None:
            raise TrainingError("this model is never trained: its spec has no optimizer (ModelSpec.optim)")
        return self.optimizer

    def _fresh_optimizer(self, optim: OptimConfig, steps: int) -> Optimizer:
        self._expert_load.refuse_rate(optim.router_bias_rate, adapted=self._config.lora.rank > 0)
        self._router_loss.use(optim.router_aux_loss_coef)
        scale = LossScale(self._first_scale) if self.compute == torch.float16 else None
        return Optimizer([p for p in self.model.parameters() if p.requires_grad], optim, steps, self.group, scale)

    def _model_tensors(self) -> Iterator[Tensor]:
        """Parameters, then gradients: gradients come and go, and must not change the index of a parameter."""
        parameters = list(self.model.parameters())
        yield from (p.detach() for p in parameters)
        yield from (p.grad for p in parameters if p.grad is not None)

    def _moments(self) -> list[Tensor]:
        return [] if self.optimizer is None else self.optimizer.moments()

    def _collate(self, batch: Batch, how: Packing) -> MicroBatch:
        return collate(batch, how, self.device, self.context)

    def _replaying(self, micro: MicroBatch) -> AbstractContextManager[None]:
        """The forward and backward passes of a micro-batch with the experts that its rows have recorded."""
        return nullcontext() if self._replay is None else self._replay.of(micro.routed)

    def _answer(self, micro: MicroBatch, temperature: float) -> Tensor:
        if isinstance(self.model, PolicyModel):
            return self._logprobs(micro, temperature, False)[0]
        return self._values(micro)

    def _loss(
        self, micro: MicroBatch, temperature: float, objective: LossSpec, level: MetricsLevel
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if isinstance(objective, ScoreLoss):
            scores_N = self._values(micro)
            return total_score(scores_N, micro.weights(scores_N), level)
        if isinstance(objective, ValueLoss):
            return total_value(micro.value_tokens(self._values(micro)), objective, level)
        entropy = objective.entropy > 0 or level == "with_entropy"
        logprobs, entropy_N = self._logprobs(micro, temperature, entropy, micro.support_MK)
        return total(micro.loss_tokens(logprobs, entropy_N), objective, level)

    def _refuse_loss(self, objective: LossSpec) -> None:
        if isinstance(objective, ValueLoss | ScoreLoss) == isinstance(self.model, PolicyModel):
            kind = "policy" if isinstance(self.model, PolicyModel) else "critic"
            raise TrainingError(f"the loss {objective.name!r} is not one of a {kind}")

    def _logprobs(
        self, micro: MicroBatch, temperature: float, entropy: bool, support_MK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [N], or of the tokens of `support_MK` [N, K], and entropies [N] of the counted tokens."""
        heartbeat.beat()
        where = micro.tokens_BT, micro.positions_BT, micro.segments, micro.before_M
        targets = micro.targets_M if support_MK is None else support_MK
        logprobs, entropy_M = self.model(*where, targets, temperature, entropy)
        return micro.complete(logprobs), None if entropy_M is None else micro.complete(entropy_M)

    def _values(self, micro: MicroBatch) -> Tensor:
        heartbeat.beat()
        values_M: Tensor = self.model(micro.tokens_BT, micro.positions_BT, micro.segments, micro.before_M)
        return micro.complete(values_M)

    def _refuse_if_broken(self) -> None:
        """Raise `TrainingError` after a failed pass: FSDP would add its partial gradients to those of the next pass."""
        if self._broken:
            raise TrainingError("this model failed in the middle of a pass: load it again from its checkpoint")

    def reduce_after(self, last: bool) -> None:
        """Reduce gradients over ranks after the last micro-batch only, unless FSDP reshards after every pass.

        Until then each rank accumulates whole, unreduced gradients: fewer reductions for more memory.
        """
        module = cast(FSDPModule, self.model)
        module.set_requires_gradient_sync(last or self._reshard)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """A context for forward and backward passes; reshards the parameters at its end.

        Without resharding after each layer, FSDP leaves gathered copies, which are stale after the next optimizer step.
        """
        self._refuse_if_broken()
        try:
            yield
        except BaseException:
            self._broken = True
            raise
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
