"""The controller's handle on the trainer's ranks.

Owns the translation of one call to the same operation on every rank: rows are split over ranks and micro-batches,
results return in the order of the rows, sums become metrics, and the models that the operation needs are on the device
before it begins. Promises that neither the interface nor any result depends on the number of ranks, the split of rows,
or the placement of models. Must not know tasks, rewards, or when to step.

    def algorithm(dispatch: RankGroup) -> None:
        dispatch.init_model("policy", ModelSpec("policy", config.model, config.optim, steps=100))
        batch = Batch.of(rows, normalize="token", temperature=1.0)
        metrics = dispatch.forward_backward("policy", batch, config.loss)
        metrics |= dispatch.optim_step("policy")
        sender.take(version)                  # a sender that was opened with a `rank_publication.RankPublication`
        dispatch.finish_weight_sync("policy")

    run_controller_or_worker(algorithm, Budget(tokens=16384))      # in every process of torchrun; see `lead_or_serve`

Rows for several operations are staged; see `batch_staging`. Colocated models leave the device when another computes;
see `device_placement`.

A caller that waits for something else calls `keepalive()` regularly: the ranks exit after a silence of the controller
of `Deadlines.control`. The waiting code itself sends this heartbeat. An unbounded wait of the ranks, or a thread that
sends heartbeats, would hide a controller that hangs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.algorithms import loss_metrics
from pipeline.checkpoints.async_save import AsyncSaver
from pipeline.config import LossConfig, OptimConfig
from pipeline.config.mesh_checks import check_context_packing
from pipeline.errors import TrainingError
from pipeline.inference.weight_sync.transports.gloo import WeightLayout
from pipeline.inference.weight_sync.weight_snapshot import RankSnapshots
from pipeline.train.batching.packing import Budget
from pipeline.train.batching.sequences import Batch, Column, refuse_unsampled_rows
from pipeline.train.controller import batch_staging, device_placement, rank_operations
from pipeline.train.controller.batch_staging import ShardedBatch, Staged, Values
from pipeline.train.controller.device_placement import Requirements
from pipeline.train.controller.operation_runner import OperationRunner
from pipeline.train.controller.rank_process import Deadlines, RankState
from pipeline.train.loss_specs import LossSpec, MetricsLevel
from pipeline.train.model.cpu_offload import Memory
from pipeline.train.model.model_worker import ModelInfo, ModelWorker
from pipeline.train.model.packing_probe import supports_packing
from pipeline.train.worker_spec import ModelSpec
from pipeline.utils.waiting import CLOCK, Clock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Answers = list[NDArray[np.float32]]


class RankGroup:
    """Models by name, each sharded over all ranks; one operation at a time.

    A `TrainingError` of an input check changes no state. After a `TrainingError` that names a rank, gradients may be
    incomplete, and if only this rank failed the world has ended (`broken`): restart from a checkpoint.
    """

    def __init__(self, site: RankState, budget: Budget, colocated: bool = False, clock: Clock = CLOCK) -> None:
        """With `colocated`, only the parts that the current or last operation needs are on the device."""
        self._site, self._budget = site, budget
        self._control = OperationRunner(site, colocated, clock)
        self._models: dict[str, ModelInfo] = {}
        self._sizes: dict[str, int] = {}
        self._replicas: dict[str, int] = {}
        self._staged: dict[int, Staged] = {}
        self._stagings = 0

    @property
    def broken(self) -> bool:
        """Whether an operation is running, or the last one left the ranks unable to run another."""
        return self._control.broken

    @property
    def patience(self) -> Deadlines:
        """The deadlines of the world."""
        return self._site.patience

    @property
    def saver(self) -> AsyncSaver:
        """The writer of this rank's part of checkpoints; see `pipeline.train.controller.model_saving`."""
        return self._site.saver

    @property
    def snapshots(self) -> RankSnapshots:
        """The versions that this rank holds for servers; see `pipeline.train.controller.rank_publication`."""
        if self._site.snapshots is None:
            raise TrainingError("no model is published")
        return self._site.snapshots

    @property
    def device(self) -> torch.device:
        """The device on which models of this rank compute."""
        if self._site.device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def budget(self) -> Budget:
        """The size of a micro-batch; packed if every present model supports packing."""
        return self._budget

    @property
    def models(self) -> Mapping[str, ModelInfo]:
        """The present models, by name."""
        return MappingProxyType(self._models)

    def init_model(self, name: str, spec: ModelSpec) -> ModelInfo:
        """Build and shard a model and its optimizer. Drops an earlier model of this name first, also if this fails.

        From the first model on that does not support packing (`packing_probe`), all rows are padded. Padded rows cannot
        be split over ranks: `ConfigError` for a model with context parallelism (`ModelSpec.cp`) then.
        """
        ranks, replicas, cp = self._site.ranks, spec.dp_replicate, spec.cp
        if replicas < 1 or ranks % replicas:
            raise TrainingError(f"{replicas} replicas of {name!r}; expected a divisor of {ranks} ranks")
        for dimension, size in (("ep", spec.ep), ("cp", cp)):
            if size < 1 or ranks // replicas % size:
                expected = f"a divisor of {ranks // replicas}, the ranks of a replica"
                raise TrainingError(f"{dimension}={size} of {name!r}; expected {expected}")
        packed = supports_packing(spec.model, self._budget.packed)
        check_context_packing(spec.model, cp, packed)
        self._budget = replace(self._budget, packed=packed)
        self._forget(name)
        needs: Requirements = {name: "init_model"}
        info: ModelInfo = self._control.run_on_all("init_model", rank_operations.init_model, name, spec, needs=needs)[0]
        self._models[name], self._sizes[name], self._replicas[name] = info, ranks // cp, replicas
        self._control.states |= device_placement.states_of_new(name, spec.optim is not None)
        return info

    def remove_model(self, name: str) -> None:
        """Drop a model and its optimizer, on the device or offloaded."""
        self._check(name)
        self._forget(name)
        self._control.run_on_all("remove_model", rank_operations.remove_model, name)

    def reset_optimizer(self, name: str, optim: OptimConfig, *, steps: int) -> None:
        """Replace the optimizer for the next training job: no moments, no gradients, step 0; parameters stay."""
        self._run_on_model("reset_optimizer", name, ModelWorker.reset_optimizer, optim, steps, needs="reset_optimizer")

    def copy_parameters(self, source: str, target: str) -> None:
        """Copy the parameters of `source` to `target`, a model of the same architecture; to a critic, the decoder."""
        self._check(source, target)
        if self._replicas[source] != self._replicas[target]:
            raise TrainingError(f"{source!r} has not as many replicas as {target!r}: parameters cannot be copied")
        needs: Requirements = {source: "copy_parameters", target: "copy_parameters"}
        self._control.run_on_all("copy_parameters", rank_operations.copy_parameters, source, target, needs=needs)

    def stage(self, batches: Sequence[Batch]) -> Staged:
        """Send batches to the ranks, where they stay until `unstage`; an operation takes one of them.

        The batches are sharded for the present models. Raises `TrainingError` if there is no model, and with the index
        of the row for a row that exceeds the budget or has a token outside of a model's vocabulary.
        """
        if not self._models:
            raise TrainingError("rows are cut for the models that take them, and there is none yet: init_model first")
        number = self._stagings
        cut = tuple(self._stageable(batch, number, index) for index, batch in enumerate(batches))
        ranks = range(self._site.ranks)
        arguments = [(number, [batch.on_rank(rank, len(ranks)) for batch in cut]) for rank in ranks]
        self._control.run("stage", batch_staging.put_rows, arguments, {})
        self._stagings += 1
        self._staged[number] = Staged(number, cut)
        return self._staged[number]

    def set_column(self, staged: Staged, column: Column, values: Values) -> None:
        """Add or replace a column of staged rows: float32[T] for each row of each batch.

        Raises `TrainingError` with batch and row for values that are not finite or not one per token; no row is changed
        then.
        """
        self._check_staged(staged.number)
        arrays = batch_staging.checked_values(staged.batches, column, values)
        ranks = range(self._site.ranks)
        pairs = list(zip(staged.batches, arrays, strict=True))
        arguments = [
            (staged.number, column, [batch.on_rank(rank, len(ranks), array) for batch, array in pairs])
            for rank in ranks
        ]
        self._control.run("amend", batch_staging.put_column, arguments, {})

    def unstage(self, staged: Staged) -> None:
        """Drop staged rows on all ranks."""
        self._check_staged(staged.number)
        del self._staged[staged.number]
        self._control.run_on_all("unstage", batch_staging.drop_rows, staged.number)

    def forward(self, name: str, data: Batch | ShardedBatch) -> Answers:
        """The model's output for every row's counted tokens, 0 elsewhere: float32[T] for each row, in order.

        Of a policy, their log-probabilities in nats; of a critic, the value of the state before each token.
        """
        return self._forward(name, self.cut((name,), data))

    def forward_models(self, names: Sequence[str], data: Batch | ShardedBatch) -> dict[str, Answers]:
        """Run `forward` of several models on the same rows.

        The models run concurrently on the CPU, and in turn on CUDA, with compiled layers, and if colocated.
        """
        cut = self.cut(names, data)
        if self._control.colocated or len(names) < 2:
            return {name: self._forward(name, cut) for name in names}
        by_rank = {name: cut.data(self._sizes[name], self._site.ranks) for name in names}
        arguments = [
            ({name: by_rank[name][rank] for name in names}, self._budget.packing) for rank in range(self._site.ranks)
        ]
        needs: Requirements = dict.fromkeys(names, "forward")
        outcomes = self._control.run("forward_models", rank_operations.forward_models, arguments, needs)
        return {
            name: cut.in_order(self._per_data_rank(name, [outcome[name] for outcome in outcomes])) for name in names
        }

    def forward_backward(
        self,
        name: str,
        data: Batch | ShardedBatch,
        loss: LossSpec,
        loss_weight: float = 1.0,
        level: MetricsLevel = "basic",
    ) -> dict[str, float]:
        """Add the gradient of `loss_weight` × loss over the whole batch; returns metrics (see
        `pipeline.algorithms.loss_metrics`), and the `flops` of the passes.

        Gradients accumulate over calls until `optim_step`.
        """
        cut = self.cut((name,), data)
        if isinstance(loss, LossConfig):
            refuse_unsampled_rows(cut.batch.rows)
        settings = (self._budget.packing, loss, loss_weight, level)
        arguments = [(name, rows, *settings) for rows in cut.data(self._sizes[name], self._site.ranks)]
        outcomes = self._control.run(
            "forward_backward", rank_operations.forward_backward, arguments, {name: "forward_backward"}
        )
        sums, counted = loss_metrics.combine(self._per_data_rank(name, outcomes)), cut.batch.counted
        return loss_metrics.means(sums, counted) | {"flops": self._models[name].flops.of_rows(cut.rows, counted)}

    def optim_step(self, name: str) -> dict[str, float]:
        """One optimizer step: `grad_norm` before clipping, `lr`, and `skipped` (1 when the gradient was not finite).

        In float16 also `loss_scale`, and `overflows`: 1 when the step was skipped and the scale halved.
        """
        step = self._run_on_model("optim_step", name, ModelWorker.optim_step, needs="optim_step")[0]
        metrics = {"grad_norm": step.grad_norm, "lr": step.lr, "skipped": float(step.skipped)}
        if step.loss_scale is None:
            return metrics
        return metrics | {"loss_scale": float(step.loss_scale), "overflows": float(step.overflowed)}

    def set_lr(self, name: str, lr: float) -> None:
        """Set a constant learning rate in place of the schedule."""
        self._run_on_model("set_lr", name, ModelWorker.set_lr, lr, needs="set_lr")

    def prepare_weight_sync(self, name: str) -> None:
        """Move the parameters that `full_parameters` gathers to the device."""
        self._run_on_model("prepare_weight_sync", name, _nothing, needs="prepare_weight_sync")

    def full_parameters(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Every trained parameter, whole on this rank, by its Hugging Face name, one at a time.

        No other call is possible until the iterator is exhausted or closed.
        """
        self.prepare_weight_sync(name)
        parameters = self._site.worker(name).full_parameters()
        with self._control.run_alongside(
            "full_parameters", rank_operations.gather_parameters, (name,), rank_operations.join_gathers, (parameters,)
        ):
            for item in parameters:  # noqa: UP028 (`yield from` would close it when the caller stops early)
                yield item

    def layout(self, name: str) -> WeightLayout:
        """Names, types and shapes of the items of `full_parameters`; gathers nothing."""
        self._check(name)
        return self._site.worker(name).layout

    def finish_weight_sync(self, name: str) -> None:
        """Return free memory to the device if models are colocated; else the next operation reuses it."""
        self._check(name)
        if self._control.colocated:
            self.empty_cache()

    def save_hf_model(self, name: str, path: Path) -> None:
        """Write the model as a Hugging Face directory: weights in compute type, config, tokenizer; or its adapter."""
        self._check(name)
        needs: Requirements = {name: "save_hf_model"}
        self._control.run_on_all("save_hf_model", rank_operations.save_hf_model, name, path, needs=needs)

    def run_on_ranks(
        self,
        name: str,
        function: Callable[[ModelWorker, *Ts], T],
        *args: *Ts,
        needs: device_placement.Purpose = "run_on_ranks",
    ) -> list[T]:
        """Run `function(worker, *args)` on every rank; returns the results in rank order.

        An extension point: `function` must be importable by name on every rank, and may be collective. The parts of the
        model that the operation `needs` requires are on the device; by default the whole model with its optimizer.
        """
        return self._run_on_model(function.__name__, name, function, *args, needs=needs)

    def run_on_all_models(
        self, function: Callable[[RankState, *Ts], T], *args: *Ts, needs: Requirements | None = None
    ) -> list[T]:
        """Run `function(site, *args)` on every rank, for a function of several models or of none; see `run_on_ranks`.

        `needs` maps each of its models to the operation with the same requirements: `{"policy": "save_checkpoint"}`.
        """
        self._check(*(needs or {}))
        return self._control.run_on_all(function.__name__, function, *args, needs=needs)

    def memory(self) -> list[dict[str, Memory]]:
        """Bytes of every model, on each rank."""
        return self._control.run_on_all("memory", rank_operations.device_memory)

    def offload_all(self) -> None:
        """Offload all models; each returns to the device when an operation needs it."""
        self._control.empty_device()

    def empty_cache(self) -> None:
        """Return free blocks of the ranks' allocators to their devices."""
        self._control.run_on_all("empty_cache", rank_operations.empty_device_cache)

    def keepalive(self) -> None:
        """Send the ranks a heartbeat of the controller; cheap, to be called in every waiting loop."""
        self._control.keepalive()

    def close(self) -> None:
        """End `serve` on all ranks."""
        self._control.close()

    def _forward(self, name: str, cut: ShardedBatch) -> Answers:
        arguments = [(name, rows, self._budget.packing) for rows in cut.data(self._sizes[name], self._site.ranks)]
        outcomes = self._control.run("forward", rank_operations.forward, arguments, {name: "forward"})
        return cut.in_order(self._per_data_rank(name, outcomes))

    def _run_on_model(
        self, operation: str, name: str, function: Callable[..., T], *args: Any, needs: device_placement.Purpose
    ) -> list[T]:
        self._check(name)
        return self._control.run_on_all(operation, rank_operations.on_model, name, function, *args, needs={name: needs})

    def cut(self, names: Sequence[str], data: Batch | ShardedBatch) -> ShardedBatch:
        """Shard the rows for operations on these models; `TrainingError` if a model cannot take them."""
        self._check(*names)
        vocabulary = min(self._models[name].vocabulary for name in names)
        if isinstance(data, Batch):
            batch_staging.refuse_foreign_tokens(data, vocabulary)
            return ShardedBatch.shard(data, self._sizes.values(), self._budget)
        self._check_staged(data.number)
        if data.highest >= vocabulary:
            batch_staging.refuse_foreign_tokens(data.batch, vocabulary)
        if not {self._sizes[name] for name in names} <= data.sizes:
            raise TrainingError("these rows were staged before a model with another cp was made: stage them again")
        return data

    def _stageable(self, batch: Batch, number: int, index: int) -> ShardedBatch:
        try:
            for info in self._models.values():
                batch_staging.refuse_foreign_tokens(batch, info.vocabulary)
            return ShardedBatch.shard(batch, self._sizes.values(), self._budget, number, index)
        except TrainingError as error:
            raise TrainingError(f"batch {index}: {error}") from None

    def _per_data_rank(self, name: str, outcomes: list[T]) -> list[T]:
        """One outcome per data-parallel rank: the ranks of a context-parallel group have the same rows and outcomes."""
        return outcomes[:: self._site.ranks // self._sizes[name]]

    def _check(self, *names: str) -> None:
        for name in names:
            if name not in self._models:
                raise TrainingError(f"no model {name!r}; there are: {', '.join(self._models) or 'none'}")

    def _check_staged(self, number: int) -> None:
        if number >= 0 and number not in self._staged:
            raise TrainingError("these rows are staged no longer")

    def _forget(self, name: str) -> None:
        self._models.pop(name, None)
        self._sizes.pop(name, None)
        self._replicas.pop(name, None)
        self._control.states = device_placement.without(self._control.states, name)


def _nothing(worker: ModelWorker) -> None:
    pass
