"""The processes of one trainer, as a torchrun world.

Owns the protocol by which a process joins the world, receives operations from the controller (rank 0), runs them and
reports; the process groups for it, with their deadlines; and the state of a rank between operations (`RankState`):
models and staged rows. Promises that every rank runs the same operations in the same order; that a failure on any rank
reaches the controller with the rank and its traceback, within `Deadlines.grace` even when other ranks are stuck in a
collective; that a crash in native code writes the stacks of the Python threads; and that ranks other than 0 exit only
at the controller's order, at its loss, or after its silence of `Deadlines.control`. Must not know what an operation
does.

One operation:

    controller: scatter (operation, arguments)  ─►  every rank: run it  ─►  controller: gather outcomes

A rank that fails records its failure in the store and waits for the others to end the operation. If they end, the
outcomes are gathered and the world continues. If they do not, they wait for the failed rank inside a collective: it
exits, its connections break, the collective raises on the controller, and the controller reads the first failure from
the store.

| group | backend | carries | deadline |
|---|---|---|---|
| the world | gloo; with CUDA also nccl | all traffic outside of models | `Deadlines.operation` |
| models (`mesh_of`, `context_of`) | gloo or nccl | parameters, gradients, attention | `Deadlines.operation` |
| control | gloo | orders and outcomes | `Deadlines.control` |
| background | gloo | checkpoints, during training | `Deadlines.checkpoint` |
"""

import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipeline.checkpoints.async_save import AsyncSaver
from pipeline.errors import DeadlineError, TrainingError
from pipeline.inference.weight_sync.weight_snapshot import RankSnapshots
from pipeline.train.batching.sequences import Batch
from pipeline.train.controller.rank_traces import RankTraces
from pipeline.train.model.context_parallel import ContextParallel
from pipeline.train.model.model_worker import ModelWorker
from pipeline.utils import heartbeat
from pipeline.utils.signed_store import SignedStore, signed_objects
from pipeline.utils.subprocesses import starting_process
from pipeline.utils.waiting import wait_for

Operation = Callable[..., Any]
"""A function that every rank calls with its `RankState` and the rank's arguments; importable, since it is pickled."""
Device = Literal["cpu", "cuda"]
Allowance = Callable[[int], int]
"""The bytes that a process may allocate on a CUDA device, as a function of the device's bytes."""
Shares = dict[int, list[Batch]]
"""The micro-batches of a staged batch on one rank, by the number of the share (see `batch_staging`)."""
Operations = tuple[Operation, tuple[Any, ...]]
"""An operation with the arguments of one rank."""
STOP = pickle.dumps(None)
"""The order that ends `serve`."""


_HANG_FRACTION = 0.9
"""Fraction of the collective timeout after which an operation without progress hangs. Less than 1, so that the hanging
rank is reported before its peers' collectives time out."""
FINAL_REPORT_SECONDS = 3.0
"""Time for a rank to report the loss of another rank before it exits."""


def end_with_lost_ranks() -> None:
    """Make this process exit `FINAL_REPORT_SECONDS` after torchrun lost another rank of this node.

    Torchrun sends TERM to the remaining ranks, and KILL 30 s later. The shield of roles blocks TERM, since schedulers
    send it to every process. So a thread waits for TERM and checks its sender. Only for a shielded process.
    """

    def listen() -> None:
        starter = starting_process()
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != starter:
            continue
        time.sleep(FINAL_REPORT_SECONDS)
        os._exit(1)

    threading.Thread(target=listen, name="lost ranks", daemon=True).start()


@dataclass(frozen=True)
class Deadlines:
    """Deadlines of a world, in seconds.

    Attributes:
        operation: for one collective inside an operation.
        control: longest silence of the controller; `RankGroup.keepalive` ends a silence.
        checkpoint: for a checkpoint from its beginning until it is durable, and for each collective of it; also for
            reading one.
        grace: how long a failed rank waits for the others to end the operation.
    """

    operation: float = 600.0
    control: float = 1800.0
    checkpoint: float = 1800.0
    grace: float = 10.0


@dataclass(frozen=True)
class Failure:
    """An operation raised on a rank; `text` is its traceback."""

    rank: int
    text: str


@dataclass
class RankState:
    """The state of one rank on which operations act: its groups, models and rows.

    Attributes:
        rank, ranks: the rank's number, and the size of the world; rank 0 is the controller.
        store: holds the failures of the running operation.
        control, background: groups, see the module. Background operations run concurrently with all others.
        patience: the deadlines of the groups.
        workers: models with their optimizers, by name.
        staged: staged batches, in order, by the number of their staging.
        saver: writes this rank's part of checkpoints, in the background.
        snapshots: versions of the rank's rows, held for servers; None on a rank that sends none.
        number: number of the running operation, or of the last one; equal on every rank.
    """

    rank: int
    ranks: int
    device: Device
    store: Store
    control: dist.ProcessGroup
    background: dist.ProcessGroup
    patience: Deadlines
    workers: dict[str, ModelWorker] = field(default_factory=dict)
    staged: dict[int, list[Shares]] = field(default_factory=dict)
    saver: AsyncSaver = field(default_factory=AsyncSaver)
    snapshots: RankSnapshots | None = None
    traces: RankTraces = field(default_factory=RankTraces)
    number: int = 0
    _groups: dict[tuple[str, str, str], dist.ProcessGroup] = field(default_factory=dict)

    def worker(self, name: str) -> ModelWorker:
        """The model of that name; `TrainingError` with the known names if there is none."""
        if name not in self.workers:
            raise TrainingError(f"no model {name!r}; there are: {', '.join(self.workers) or 'none'}")
        return self.workers[name]

    def mesh_of(self, name: str, dp_replicate: int = 1) -> DeviceMesh:
        """The mesh of a model of this name: `dp_shard`, behind `dp_replicate` if there are several replicas.

        The rank of replica r and shard s is r × shards + s, so the ranks of a replica are neighbors. On the CPU each
        model has separate groups, so that concurrent models cannot mix their messages. On CUDA models run in turn and
        share groups: a group of nccl costs memory, and several groups can block each other. Collective over all ranks.
        """
        name = name if self.device == "cpu" else ""
        ranks = torch.arange(self.ranks).view(dp_replicate, -1)
        shards = self._group(name, "dp_shard", ranks)
        if dp_replicate == 1:
            return DeviceMesh.from_group(shards, self.device, mesh_dim_names=("dp_shard",))
        groups = [self._group(name, "dp_replicate", ranks.T), shards]
        names = ("dp_replicate", "dp_shard")
        return DeviceMesh.from_group(groups, self.device, mesh=ranks, mesh_dim_names=names)

    def expert_mesh_of(self, name: str, dp_replicate: int, ep: int) -> DeviceMesh | None:
        """The mesh of a model's experts: the ranks of `mesh_of` as `efsdp` × `ep`, behind `dp_replicate` if there are
        several replicas; None with ep 1. The ranks of `ep` are neighbors. Collective over all ranks."""
        if ep == 1:
            return None
        name = name if self.device == "cpu" else ""
        # [replicas, efsdp, ep]. Each row of a matrix given to `_group` is one group: transposing puts the ranks that
        # differ only in `efsdp` into one row.
        ranks = torch.arange(self.ranks).view(dp_replicate, -1, ep)
        groups = [self._group(name, "efsdp", ranks.mT.reshape(-1, ranks.shape[1]))]
        groups.append(self._group(name, "ep", ranks.reshape(-1, ep)))
        if dp_replicate == 1:
            return DeviceMesh.from_group(groups, self.device, mesh=ranks[0], mesh_dim_names=("efsdp", "ep"))
        groups.insert(0, self._group(name, "dp_replicate", ranks.view(dp_replicate, -1).T))
        names = ("dp_replicate", "efsdp", "ep")
        return DeviceMesh.from_group(groups, self.device, mesh=ranks, mesh_dim_names=names)

    def context_of(self, name: str, cp: int = 1) -> ContextParallel | None:
        """The `cp` neighboring ranks that share the micro-batches of a model of this name; None if no two do.

        They are a subset of the model's `dp_shard` ranks: parameters are sharded over all of `dp_shard`. Collective
        over all ranks.
        """
        if cp == 1:
            return None
        name = name if self.device == "cpu" else ""
        group = self._group(name, "cp", torch.arange(self.ranks).view(-1, cp))
        return ContextParallel(group, self.rank % cp, cp)

    def _group(self, name: str, dimension: str, ranks: Tensor) -> dist.ProcessGroup:
        """This rank's group along a dimension of a mesh; each row of `ranks` is a group. Collective over all ranks."""
        key = name, dimension, str(ranks.tolist())
        if key not in self._groups:
            patience = timedelta(seconds=self.patience.operation)
            # torch requires every rank to create every group, in one order, also those without this rank.
            groups = [dist.new_group(group, patience) for group in ranks.tolist()]
            self._groups[key] = groups[int((ranks == self.rank).nonzero()[0, 0])]
        return self._groups[key]

    def send(self, orders: Sequence[bytes]) -> None:
        """Send every rank its order (see `write_orders`); called on the controller."""
        self._scatter(orders)

    def run(self, operation: Operation, arguments: tuple[Any, ...]) -> Any:
        """Run an operation; its result, or a `Failure` once all ranks have ended it.

        Raises `TrainingError` if this rank failed and another does not end within `Deadlines.grace`.
        """
        self.number += 1
        try:
            with heartbeat.busy_with(f"operation {self.number}", _HANG_FRACTION * self.patience.operation):
                outcome = operation(self, *arguments)
        except Exception:  # noqa: BLE001 - the boundary where a rank's failure becomes a report
            outcome = Failure(self.rank, traceback.format_exc())
            # Only the first failure is the cause: later ones are broken collectives.
            self.store.compare_set(self._key("failure"), "", f"{self.rank} {outcome.text}")
        self.store.add(self._key("ended"), 1)
        if isinstance(outcome, Failure):
            self._await_others(outcome)
        return outcome

    def report(self, outcome: Any) -> list[Any] | None:
        """Gather the outcomes of all ranks; in rank order on the controller, None elsewhere."""
        outcomes: list[Any] | None = [None] * self.ranks if self.rank == 0 else None
        with heartbeat.busy_with("gathering outcomes", self.patience.control):
            dist.gather_object(outcome, outcomes, dst=0, group=self.control)
        if self.rank == 0 and self.number > 1:
            self._forget(self.number - 1)
        return outcomes

    def first_failure(self) -> Failure | None:
        """The first recorded failure of the current operation on any rank."""
        if not self.store.check([self._key("failure")]):
            return None
        rank, _, text = self.store.get(self._key("failure")).decode().partition(" ")
        return Failure(int(rank), text)

    def serve(self) -> None:
        """Run the controller's operations until its order to stop; for ranks other than 0.

        Ignores INT, which torchrun forwards from the agent to every rank: only the controller can end the world between
        two operations.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            order: Operations | None = pickle.loads(self._scatter(None))
            if order is None:
                return
            self.report(self.run(*order))

    def _scatter(self, orders: Sequence[bytes] | None) -> bytes:
        mine: list[Any] = [None]
        try:
            with heartbeat.busy_with("scattering orders", self.patience.control):
                dist.scatter_object_list(mine, None if orders is None else list(orders), src=0, group=self.control)
        except RuntimeError as error:
            raise TrainingError(f"rank {self.rank} lost the other ranks between two operations: {error}") from error
        return bytes(mine[0])

    def _await_others(self, failure: Failure) -> None:
        try:
            wait_for(
                "the other ranks to end the failed operation",
                lambda: self.store.add(self._key("ended"), 0) == self.ranks,
                self.patience.grace,
            )
        except DeadlineError:
            raise TrainingError(f"rank {failure.rank} failed alone:\n{failure.text}") from None

    def _key(self, kind: str, number: int | None = None) -> str:
        return f"operation/{self.number if number is None else number}/{kind}"

    def _forget(self, number: int) -> None:
        self.store.delete_key(self._key("ended", number))


def write_orders(operation: Operation, arguments: Sequence[tuple[Any, ...]]) -> list[bytes]:
    """Pickle the operation with each rank's arguments, before any is sent: a pickling error then reaches no rank."""
    return [pickle.dumps((operation, of_rank)) for of_rank in arguments]


@contextmanager
def joined_world(
    device: Device, patience: Deadlines, secret: str = "", allowance: Allowance | None = None
) -> Iterator[RankState]:
    """Join the torchrun world (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, … as torchrun sets them) and leave it at the end.

    There is one process per device; on CUDA, local rank i uses device i. Gradients travel over gloo or nccl. Control
    and background have separate gloo groups, so that their long timeouts do not delay the detection of a stuck
    collective. Raises `TrainingError` before the rendezvous if the process has no device. On a CUDA device that other
    processes share, `allowance` limits the memory of this process.

    Messages in torchrun's store and in collectives of objects are signed with the world's `secret`, since torch
    unpickles every message; `SignatureError` for an unsigned one.

    A fatal signal (SEGV, ABRT, BUS, …) from now on ends the process with the stacks of its Python threads on standard
    error: glibc's message about a corrupted heap names neither rank nor code.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__ or 2)
    if device == "cuda":
        _take_device(allowance)
    open_store, rank, ranks = next(iter(rendezvous("env://")))
    store = SignedStore(open_store, secret)
    backend, operation = "gloo", timedelta(seconds=patience.operation)
    if device == "cuda":
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=PrefixStore("world", store),
        rank=rank,
        world_size=ranks,
        timeout=operation,
    )
    try:
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience.control))
        background = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience.checkpoint))
        with signed_objects(secret):
            yield RankState(rank, ranks, device, PrefixStore("control", store), control, background, patience)
    finally:
        dist.destroy_process_group()


def _take_device(allowance: Allowance | None) -> None:
    """Select the CUDA device of the local rank, and limit its allocator to the allowance.

    Without a limit torch's allocator holds freed blocks until the device is full, and a process that starts later on
    the device finds no memory. At the limit the allocator releases its free blocks.
    """
    local, seen = dist.get_node_local_rank(), torch.cuda.device_count()
    if local >= seen:
        raise TrainingError(
            f"process {local} of this node has no GPU: CUDA shows {seen}, expected one for each process; lower "
            "resources.trainer.processes, ask for more GPUs, or set resources.device=cpu"
        )
    torch.cuda.set_device(local)
    if allowance:
        total = torch.cuda.get_device_properties(local).total_memory
        torch.cuda.set_per_process_memory_fraction(allowance(total) / total, local)
