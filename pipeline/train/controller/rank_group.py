"""The controller's handle on the trainer's ranks.

Owns how one call becomes the same operation on every rank: rows are split over ranks and micro-batches, results come
back in the order of the rows, sums become metrics, and what the operation needs is on the device before it begins.
Promises that the caller never sees how many ranks there are, how rows were cut, nor what had to move, and that no
result depends on it. Must not know tasks, rewards, or when to step.

    def algorithm(dispatch: RankGroup) -> None:
        dispatch.init_model("policy", ModelSpec("policy", config.model, config.optim, steps=100))
        batch = Batch.of(rows, normalize="token", temperature=1.0)
        metrics = dispatch.forward_backward("policy", batch, config.loss)
        metrics |= dispatch.optim_step("policy")
        sender.take(version)                  # of a sender that was opened with a `rank_publication.RankPublication`
        dispatch.finish_weight_sync("policy")

    run_controller_or_worker(algorithm, Budget(tokens=16384))      # in every process of torchrun; see `lead`

Rows that several operations take are staged; see `staging`. Where models are colocated, each leaves the device when
another computes; see `residency`.

While the caller waits for something else, it calls `idle()` now and then: the ranks take a controller that is silent
for `Deadlines.control` for dead. A heartbeat that the waiting code itself sends was chosen over an unbounded wait, and
over a thread that beats, because those two would also hide a controller that hangs.
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

from pipeline.checkpoints.async_save import AsyncSaver
from pipeline.config import LossConfig, OptimConfig
from pipeline.config.mesh_checks import check_context_packing
from pipeline.errors import TrainingError
from pipeline.inference.weight_sync.transports.gloo import WeightLayout
from pipeline.inference.weight_sync.weight_snapshot import RankSnapshots
from pipeline.train.algorithms import LossSpec, MetricsLevel, loss_metrics
from pipeline.train.batching.packing import Budget
from pipeline.train.batching.sequences import Batch, Column, refuse_unsampled_rows
from pipeline.train.controller import batch_staging, device_placement, rank_operations
from pipeline.train.controller.batch_staging import ShardedBatch, Staged, Values
from pipeline.train.controller.device_placement import Requirements
from pipeline.train.controller.operation_runner import OperationRunner
from pipeline.train.controller.rank_process import Deadlines, RankState
from pipeline.train.model.cpu_offload import Memory
from pipeline.train.model.model_worker import ModelInfo, ModelWorker
from pipeline.train.model.packing_probe import supports_packing
from pipeline.train.worker_spec import ModelSpec
from pipeline.utils.waiting import CLOCK, Clock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Answers = list[NDArray[np.float32]]


class RankGroup:
    """Models by name, each spread over all ranks; one operation at a time.

    A `TrainingError` that a check of the input raises leaves everything as it was. One that names a rank does not:
    gradients may be incomplete, and if the rank failed alone the world is gone (`broken`). Restart from a checkpoint
    then.
    """

    def __init__(self, site: RankState, budget: Budget, colocated: bool = False, clock: Clock = CLOCK) -> None:
        """With `colocated`, only what an operation needs is on the device while it runs and until the next."""
        self._site, self._budget = site, budget
        self._control = OperationRunner(site, colocated, clock)
        self._models: dict[str, ModelInfo] = {}
        self._sizes: dict[str, int] = {}
        self._replicas: dict[str, int] = {}
        self._staged: dict[int, Staged] = {}
        self._stagings = 0

    @property
    def broken(self) -> bool:
        """Whether an operation is under way, or ended in a way after which no other is possible."""
        return self._control.broken

    @property
    def patience(self) -> Deadlines:
        """Its deadlines."""
        return self._site.patience

    @property
    def saver(self) -> AsyncSaver:
        """What this rank writes its part of checkpoints with; see `pipeline.train.controller.model_saving`."""
        return self._site.saver

    @property
    def snapshots(self) -> RankSnapshots:
        """What this rank holds for servers; see `pipeline.train.controller.rank_publication`."""
        if self._site.snapshots is None:
            raise TrainingError("no model is published")
        return self._site.snapshots

    @property
    def device(self) -> torch.device:
        """Where models of this rank compute."""
        if self._site.device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def budget(self) -> Budget:
        """What a micro-batch may hold, as the models that there are allow it."""
        return self._budget

    @property
    def models(self) -> Mapping[str, ModelInfo]:
        """The models that there are, by name."""
        return MappingProxyType(self._models)

    def init_model(self, name: str, spec: ModelSpec) -> ModelInfo:
        """Build and shard a model and its optimizer; one of that name is replaced, and gone if that fails.

        From the first model on whose rows would see each other packed, all rows are padded; see `likeness`. They cannot
        be spread over ranks (`ModelSpec.cp`), and such a model is refused with a `ConfigError` then.
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
        """Drop a model and its optimizer, wherever they are."""
        self._check(name)
        self._forget(name)
        self._control.run_on_all("remove_model", rank_operations.remove_model, name)

    def reset_optimizer(self, name: str, optim: OptimConfig, *, steps: int) -> None:
        """Start the next job on the same parameters with a fresh optimizer: no moments, no gradients, step 0."""
        self._run_on_model("reset_optimizer", name, ModelWorker.reset_optimizer, optim, steps, needs="reset_optimizer")

    def copy_parameters(self, source: str, target: str) -> None:
        """Give `target` the parameters of `source`, a model of the same architecture; a critic takes the decoder."""
        self._check(source, target)
        if self._replicas[source] != self._replicas[target]:
            raise TrainingError(f"{source!r} has not as many replicas as {target!r}: parameters cannot be copied")
        needs: Requirements = {source: "copy_parameters", target: "copy_parameters"}
        self._control.run_on_all("copy_parameters", rank_operations.copy_parameters, source, target, needs=needs)

    def stage(self, batches: Sequence[Batch]) -> Staged:
        """Send batches to the ranks, where they stay until `unstage`; each is what an operation takes.

        They are cut for the models that there are. Raises `TrainingError` if there is none yet, and with the row's
        number in its batch for one that the budget cannot hold, or that has a token which one of the models does not
        know.
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
        """Give staged rows a further column, or another in its place: float32[T] for each row of each batch.

        Raises `TrainingError` with batch and row for values that are not finite or not one for each token; then no row
        was changed.
        """
        self._check_staged(staged.number)
        arrays = batch_staging.checked_values(staged.batches, column, values)
        ranks = range(self._site.ranks)
        each = list(zip(staged.batches, arrays, strict=True))
        arguments = [
            (staged.number, column, [batch.on_rank(rank, len(ranks), given) for batch, given in each]) for rank in ranks
        ]
        self._control.run("amend", batch_staging.put_column, arguments, {})

    def unstage(self, staged: Staged) -> None:
        """Forget staged rows."""
        self._check_staged(staged.number)
        del self._staged[staged.number]
        self._control.run_on_all("unstage", batch_staging.drop_rows, staged.number)

    def forward(self, name: str, data: Batch | ShardedBatch) -> Answers:
        """The answer about every row's counted tokens, 0 elsewhere: float32[T] for each row, in order.

        Of a policy, their log-probabilities (nats); of a critic, the value of the tokens before each.
        """
        return self._forward(name, self.cut((name,), data))

    def forward_each(self, names: Sequence[str], data: Batch | ShardedBatch) -> dict[str, Answers]:
        """`forward` of several models on the same rows: all at once on the CPU; on CUDA, where layers are compiled, and
        where models evict each other, in turn."""
        cut = self.cut(names, data)
        if self._control.colocated or len(names) < 2:
            return {name: self._forward(name, cut) for name in names}
        given = {name: cut.data(self._sizes[name], self._site.ranks) for name in names}
        arguments = [
            ({name: given[name][rank] for name in names}, self._budget.packing) for rank in range(self._site.ranks)
        ]
        needs: Requirements = dict.fromkeys(names, "forward")
        outcomes = self._control.run("forward_each", rank_operations.forward_each, arguments, needs)
        return {name: cut.in_order(self._of_places(name, [outcome[name] for outcome in outcomes])) for name in names}

    def forward_backward(
        self,
        name: str,
        data: Batch | ShardedBatch,
        loss: LossSpec,
        loss_weight: float = 1.0,
        level: MetricsLevel = "basic",
    ) -> dict[str, float]:
        """Add the gradient of `loss_weight` × loss over the whole batch; returns metrics (see
        `pipeline.train.algorithms.loss_metrics`).

        Gradients accumulate over calls until `optim_step`.
        """
        cut = self.cut((name,), data)
        if isinstance(loss, LossConfig):
            refuse_unsampled_rows(cut.batch.rows)
        settings = (self._budget.packing, loss, loss_weight, level)
        arguments = [(name, given, *settings) for given in cut.data(self._sizes[name], self._site.ranks)]
        outcomes = self._control.run(
            "forward_backward", rank_operations.forward_backward, arguments, {name: "forward_backward"}
        )
        return loss_metrics.means(loss_metrics.combine(self._of_places(name, outcomes)), cut.batch.counted)

    def optim_step(self, name: str) -> dict[str, float]:
        """One optimizer step: `grad_norm` before clipping, `lr`, and `skipped` (1 when the gradient was not finite)."""
        step = self._run_on_model("optim_step", name, ModelWorker.optim_step, needs="optim_step")[0]
        return {"grad_norm": step.grad_norm, "lr": step.lr, "skipped": float(step.skipped)}

    def set_lr(self, name: str, lr: float) -> None:
        """Step at this rate from now on, whatever the schedule says."""
        self._run_on_model("set_lr", name, ModelWorker.set_lr, lr, needs="set_lr")

    def prepare_weight_sync(self, name: str) -> None:
        """Bring what `full_parameters` gathers to the device."""
        self._run_on_model("prepare_weight_sync", name, _nothing, needs="prepare_weight_sync")

    def full_parameters(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Every trained parameter whole on this rank, under its Hugging Face name, one at a time.

        No other call is possible until the iterator is exhausted or closed.
        """
        self.prepare_weight_sync(name)
        parameters = self._site.worker(name).full_parameters()
        with self._control.run_alongside(
            "full_parameters", rank_operations.gather_parameters, (name,), rank_operations.join_gathers, (parameters,)
        ):
            for each in parameters:  # noqa: UP028 (`yield from` would close it when the caller stops early)
                yield each

    def layout(self, name: str) -> WeightLayout:
        """Names, types and shapes of what `full_parameters` yields; gathers nothing."""
        self._check(name)
        return self._site.worker(name).layout

    def finish_weight_sync(self, name: str) -> None:
        """Colocated, give the memory back that taking a version took; else the next operation has a use for it."""
        self._check(name)
        if self._control.colocated:
            self.empty_cache()

    def save_hf_model(self, name: str, path: Path) -> None:
        """Write the model as a Hugging Face directory (weights in compute type, config, tokenizer); of a model with
        adapters, them."""
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
        """Run `function(worker, *args)` on every rank; its results in rank order.

        The hook for what this module does not know: `function` is importable by name on every rank, and may be
        collective. It finds on the device what `needs` does; by default the whole model with its optimizer.
        """
        return self._run_on_model(function.__name__, name, function, *args, needs=needs)

    def run_on_all_models(
        self, function: Callable[[RankState, *Ts], T], *args: *Ts, needs: Requirements | None = None
    ) -> list[T]:
        """Run `function(site, *args)` on every rank, for what minds several models, or none; as `run_on_ranks`.

        `needs` says which operation each model of it counts as: `{"policy": "save_checkpoint"}`.
        """
        self._check(*(needs or {}))
        return self._control.run_on_all(function.__name__, function, *args, needs=needs)

    def memory(self) -> list[dict[str, Memory]]:
        """Bytes of every model, on each rank."""
        return self._control.run_on_all("memory", rank_operations.device_memory)

    def offload_all(self) -> None:
        """Give the device memory of all models back; each comes back when it is needed."""
        self._control.empty_device()

    def empty_cache(self) -> None:
        """Give memory that is free, but held by the ranks' allocators, back."""
        self._control.run_on_all("empty_cache", rank_operations.empty_device_cache)

    def keepalive(self) -> None:
        """Show the ranks that the controller lives; cheap, to be called in every loop that waits."""
        self._control.keepalive()

    def close(self) -> None:
        """End `serve` on all ranks."""
        self._control.close()

    def _forward(self, name: str, cut: ShardedBatch) -> Answers:
        arguments = [(name, given, self._budget.packing) for given in cut.data(self._sizes[name], self._site.ranks)]
        outcomes = self._control.run("forward", rank_operations.forward, arguments, {name: "forward"})
        return cut.in_order(self._of_places(name, outcomes))

    def _run_on_model(
        self, operation: str, name: str, function: Callable[..., T], *args: Any, needs: device_placement.Purpose
    ) -> list[T]:
        self._check(name)
        return self._control.run_on_all(operation, rank_operations.on_model, name, function, *args, needs={name: needs})

    def cut(self, names: Sequence[str], data: Batch | ShardedBatch) -> ShardedBatch:
        """The rows as operations on these models cut and take them; `TrainingError` if one cannot take them."""
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

    def _of_places(self, name: str, outcomes: list[T]) -> list[T]:
        """The outcome of the first rank of those that have the same rows."""
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
