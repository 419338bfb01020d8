"""The controller's handle on the trainer's ranks.

Owns how one call becomes the same operation on every rank: rows are split over ranks and micro-batches, results come
back in the order of the rows, sums become metrics. Promises that the caller never sees how many ranks there are, nor
how rows were cut, and that no result depends on it. Must not know tasks, rewards, or when to step.

    def algorithm(dispatch: Dispatch) -> None:
        dispatch.init_model("policy", ModelSpec("policy", config.model, config.optim, steps=100))
        batch = Batch.of(rows, normalise="token", temperature=1.0)
        metrics = dispatch.forward_backward("policy", batch, config.loss)
        metrics |= dispatch.optim_step("policy")
        for name, tensor in dispatch.full_parameters("policy"):
            ...

    lead_or_serve(algorithm, Budget(tokens=16384))      # in every process of torchrun

While the caller waits for something else, it calls `idle()` now and then: the ranks take a controller that is silent
for `Patience.control` for dead. A heartbeat that the waiting code itself sends was chosen over an unbounded wait, and
over a thread that beats, because those two would also hide a controller that hangs.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pipeline import packing
from pipeline.config import OptimConfig
from pipeline.errors import TrainingError
from pipeline.losses import Objective, measures
from pipeline.packing import Bins, Budget
from pipeline.training.ranks import STOP, Failure, Operation, Patience, Site, joined, write_orders
from pipeline.training.rows import Batch
from pipeline.training.spec import ModelSpec
from pipeline.training.worker import ModelInfo, Worker
from pipeline.waiting import CLOCK, Clock

P = ParamSpec("P")
T = TypeVar("T")


class Dispatch:
    """Models by name, each spread over all ranks; one operation at a time.

    A `TrainingError` that a check of the input raises leaves everything as it was. One that names a rank does not:
    gradients may be incomplete, and if the rank failed alone the world is gone (`broken`). Restart from a checkpoint
    then.
    """

    def __init__(self, site: Site, budget: Budget, clock: Clock = CLOCK) -> None:
        self._site, self._budget, self._clock = site, budget, clock
        self._models: dict[str, ModelInfo] = {}
        self._running = ""
        self._heard = clock.now()
        self.broken = False

    def init_model(self, name: str, spec: ModelSpec) -> ModelInfo:
        """Build and shard a model and its optimizer; one of that name is replaced."""
        self._models[name] = self._everywhere("init_model", _init_model, name, spec)[0]
        return self._models[name]

    def reset_optimizer(self, name: str, optim: OptimConfig, *, steps: int) -> None:
        """Start the next job on the same parameters with a fresh optimizer: no moments, no gradients, step 0."""
        self.pass_through(name, Worker.reset_optimizer, optim, steps)

    def forward(self, name: str, batch: Batch) -> list[NDArray[np.float32]]:
        """Log-probabilities (nats) of every row's counted tokens, 0 elsewhere: float32[T] for each row, in order."""
        shares = self._split(name, batch)
        parts = self._cut(batch, shares)
        answers = self._run("forward", _on_model, [(name, Worker.forward, part, self._budget.packed) for part in parts])
        return packing.restore(shares, answers)

    def forward_backward(self, name: str, batch: Batch, loss: Objective, loss_weight: float = 1.0) -> dict[str, float]:
        """Add the gradient of `loss_weight` × loss over the whole batch; returns metrics (see
        `pipeline.losses.measures`).

        Gradients accumulate over calls until `optim_step`.
        """
        shares = self._split(name, batch)
        settings = (self._budget.packed, loss, loss_weight)
        arguments = [(name, Worker.forward_backward, part, *settings) for part in self._cut(batch, shares)]
        sums = self._run("forward_backward", _on_model, arguments)
        return measures.means(measures.combine(sums), batch.counted)

    def optim_step(self, name: str) -> dict[str, float]:
        """One optimizer step: `grad_norm` before clipping, `lr`, and `skipped` (1 when the gradient was not finite)."""
        step = self.pass_through(name, Worker.optim_step)[0]
        return {"grad_norm": step.grad_norm, "lr": step.lr, "skipped": float(step.skipped)}

    def full_parameters(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole on this rank, under its Hugging Face name, one at a time.

        No other call is possible until the iterator is exhausted or closed.
        """
        orders = write_orders(_take_parameters, [(name,)] * self._site.ranks)
        parameters = self._site.worker(name).full_parameters()
        self._begin("full_parameters")
        self._site.send(orders)
        try:
            for name, whole in parameters:  # not `yield from`, which would close it when the caller stops early
                yield name, whole
        finally:
            self._end(_take_rest, (parameters,))

    def export_hf(self, name: str, path: Path) -> None:
        """Write the model as a Hugging Face directory (weights in compute type, config, tokenizer)."""
        self.pass_through(name, Worker.save_hf_model, path)

    def pass_through(
        self, name: str, function: Callable[Concatenate[Worker, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Run `function(worker, *args)` on every rank; its results in rank order.

        The hook for what this module does not know, such as checkpoints: `function` is importable by name on every
        rank, may use `worker.state()` and `worker.load_state()`, and may be collective.
        """
        return self._everywhere(function.__name__, _with_keywords, name, function, args, kwargs)

    def idle(self) -> None:
        """Show the ranks that the controller lives; cheap, to be called in every loop that waits."""
        if self._clock.now() - self._heard > self._site.patience.control / 4:
            self._everywhere("idle", _nothing)

    def close(self) -> None:
        """End `serve` on all ranks."""
        if not self.broken:
            self._site.send([STOP] * self._site.ranks)

    def _split(self, name: str, batch: Batch) -> list[Bins]:
        vocabulary = self._info(name).vocabulary
        for index, row in enumerate(batch.rows):
            if int(row.tokens.max()) >= vocabulary or int(row.tokens.min()) < 0:
                raise TrainingError(f"row {index} has a token outside the model's vocabulary of {vocabulary}")
        return packing.split(batch.lengths, self._site.ranks, self._budget)

    def _info(self, name: str) -> ModelInfo:
        if name not in self._models:
            raise TrainingError(f"no model {name!r}; there are: {', '.join(self._models) or 'none'}")
        return self._models[name]

    @staticmethod
    def _cut(batch: Batch, shares: list[Bins]) -> list[list[Batch]]:
        """The micro-batches of each rank."""
        return [[batch.take(indices) for indices in bins] for bins in shares]

    def _everywhere(self, name: str, operation: Operation, *args: Any) -> list[Any]:
        return self._run(name, operation, [args] * self._site.ranks)

    def _run(self, name: str, operation: Operation, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        orders = write_orders(operation, arguments)
        self._begin(name)
        self._site.send(orders)
        return self._end(operation, arguments[0])

    def _begin(self, name: str) -> None:
        if self.broken or self._running:
            state = f"{self._running} is still running" if self._running else "the world is broken"
            raise TrainingError(f"{name} is not possible: {state}")
        self._running, self.broken = name, True

    def _end(self, operation: Operation, arguments: tuple[Any, ...]) -> list[Any]:
        """Run this rank's part, gather all outcomes, and raise the first failure."""
        name, self._running = self._running, ""
        try:
            outcomes = self._site.report(self._site.run(operation, arguments)) or []
        except (RuntimeError, TrainingError) as error:
            raise self._error(name, self._site.first_failure(), str(error)) from error
        self.broken = False
        self._heard = self._clock.now()
        if any(isinstance(outcome, Failure) for outcome in outcomes):
            raise self._error(name, self._site.first_failure())
        return outcomes

    @staticmethod
    def _error(name: str, failure: Failure | None, otherwise: str = "") -> TrainingError:
        if failure is None:
            return TrainingError(f"{name} failed: {otherwise}")
        reason = failure.text.strip().splitlines()[-1]
        return TrainingError(f"{name} failed on rank {failure.rank}: {reason}\n{failure.text}")


def lead_or_serve(
    algorithm: Callable[[Dispatch], None],
    budget: Budget,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    patience: Patience | None = None,
) -> None:
    """In each process of torchrun: rank 0 runs `algorithm`, the others serve it; returns when the algorithm has."""
    with joined(device, patience or Patience()) as site:
        if site.rank != 0:
            site.serve()
            return
        dispatch = Dispatch(site, budget)
        try:
            algorithm(dispatch)
        finally:
            dispatch.close()


def _init_model(site: Site, name: str, spec: ModelSpec) -> ModelInfo:
    site.workers[name] = Worker(spec, site.mesh)
    return site.workers[name].info


def _on_model(site: Site, name: str, function: Callable[..., T], *args: Any) -> T:
    return function(site.worker(name), *args)


def _with_keywords(
    site: Site, name: str, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> T:
    return function(site.worker(name), *args, **kwargs)


def _take_parameters(site: Site, name: str) -> None:
    for _ in site.worker(name).full_parameters():
        pass


def _take_rest(site: Site, parameters: Iterator[tuple[str, Tensor]]) -> None:
    for _ in parameters:
        pass


def _nothing(site: Site) -> None:
    pass
