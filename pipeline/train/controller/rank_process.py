"""The processes of one trainer, as a torchrun world.

Owns how a process joins the world, receives operations from the controller (rank 0), runs them and reports; the process
groups that it does so in, with their deadlines; and the place (`RankState`) where what outlives an operation is kept,
models and staged rows. Promises that every rank runs the same operations in the same order; that a failure anywhere
reaches the controller with its rank and traceback, within `Deadlines.grace` even when the others are stuck in a
collective; that a rank which native code ends says where its Python threads were; and that ranks other than 0 leave
only when the controller tells them, is gone, or is silent for `Deadlines.control`. Must not know what an operation
does.

How one operation goes:

    controller: scatter (operation, arguments)  ─►  every rank: run it  ─►  controller: gather outcomes

A rank that fails marks its failure in the store and waits for the others to end theirs. If they do, the outcomes are
gathered and the world can go on. If they do not, they wait for the failed rank inside a collective: it exits, its
connections break, and the controller, thrown out of the collective, finds the first failure in the store.

| group | backend | carries | deadline |
|---|---|---|---|
| the world | gloo, with CUDA nccl too | what is not a model's | `Deadlines.operation` |
| of models (`RankState.mesh_of`, `context_of`) | gloo or nccl | parameters, gradients, attention |
`Deadlines.operation` | | control | gloo | orders and outcomes | `Deadlines.control` | | background | gloo | commits,
beside training | `Deadlines.checkpoint` |
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
from pipeline.train.model.context_parallel import ContextParallel
from pipeline.train.model.model_worker import ModelWorker
from pipeline.utils import heartbeat
from pipeline.utils.signed_store import SignedStore, signed_objects
from pipeline.utils.waiting import wait_for

Operation = Callable[..., Any]
"""What every rank calls with its `RankState` and its own arguments; importable by name, since it travels pickled."""
Device = Literal["cpu", "cuda"]
Allowance = Callable[[int], int]
"""Bytes that a process may allocate of a CUDA device of so many."""
Shares = dict[int, list[Batch]]
"""Of a staged batch: the micro-batches of each share that some model of this rank takes, by the share's number."""
Operations = tuple[Operation, tuple[Any, ...]]
"""An operation with the arguments of one rank."""
STOP = pickle.dumps(None)
"""The order that ends `serve`."""


_HANG_FRACTION = 0.9
"""Of the longest collective: an operation that stands still for so long hangs. Less than all, so that the rank which
hangs is reported before its peers time out."""
FINAL_REPORT_SECONDS = 3.0
"""For a rank to tell what it saw when another was lost."""


def end_with_lost_ranks() -> None:
    """Have this process end soon after torchrun lost another rank of this node.

    Torchrun tells the ranks that are left by TERM, and ends them 30 s later. The shield of roles blocks TERM, since
    schedulers send it to everybody; so a thread takes it, and minds who sent it. Only for a process that is shielded.
    """

    def listen() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            continue
        time.sleep(FINAL_REPORT_SECONDS)
        os._exit(1)

    threading.Thread(target=listen, name="lost ranks", daemon=True).start()


@dataclass(frozen=True)
class Deadlines:
    """Deadlines of a world, in seconds.

    Attributes:
        operation: for one collective inside an operation.
        control: longest silence of the controller; `RankGroup.keepalive` keeps it from running out.
        commit: for a commit from its beginning until it is durable, and so for each collective of its way there; as
            much for reading one.
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
    """What operations act on in one process: its place in the world, its models and its rows.

    Attributes:
        rank, ranks: its number in the world, and how many there are; 0 is the controller.
        store: where failures of the operation under way are marked.
        control, background: groups; see above. Operations of the background may run beside others.
        workers: models with their optimizers, by name.
        staged: rows that wait here for operations, by the number of their staging: its batches, in order.
        saver: writes its part of checkpoints, beside the operations.
        snapshots: versions of its rows that wait for servers; None on a rank that sends none.
        number: of the operation under way, or the last one; counted alike on every rank.
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
    number: int = 0
    _groups: dict[tuple[str, str, str], dist.ProcessGroup] = field(default_factory=dict)

    def worker(self, name: str) -> ModelWorker:
        """The model of that name; `TrainingError` with the known names if there is none."""
        if name not in self.workers:
            raise TrainingError(f"no model {name!r}; there are: {', '.join(self.workers) or 'none'}")
        return self.workers[name]

    def mesh_of(self, name: str, dp_replicate: int = 1) -> DeviceMesh:
        """The mesh of a model of this name: `dp_shard`, behind `dp_replicate` if there are several replicas.

        The rank of replica r and shard s is r × shards + s, so that the ranks of a replica are neighbors. On the CPU
        the groups are of that name alone, so that what models do at the same time cannot mix. On CUDA models take turns
        and share: a group of nccl costs memory, and several of them may block each other. Collective over all ranks.
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
        """The ranks of `mesh_of` as experts see them, `efsdp` × `ep`, behind `dp_replicate` if there are several
        replicas; None with ep 1. The ranks of `ep` are neighbors. Collective over all ranks."""
        if ep == 1:
            return None
        name = name if self.device == "cpu" else ""
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

        They are a part of the `dp_shard` of `mesh_of`, over all of which parameters are sharded. Collective over all
        ranks.
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
            made = [dist.new_group(group, patience) for group in ranks.tolist()]
            self._groups[key] = made[int((ranks == self.rank).nonzero()[0, 0])]
        return self._groups[key]

    def send(self, orders: Sequence[bytes]) -> None:
        """Controller: hand every rank its order (see `write_orders`)."""
        self._scatter(orders)

    def run(self, operation: Operation, arguments: tuple[Any, ...]) -> Any:
        """The operation's result, or its `Failure` once all ranks have ended it; `TrainingError` if some do not."""
        self.number += 1
        try:
            with heartbeat.busy_with(f"operation {self.number}", _HANG_FRACTION * self.patience.operation):
                outcome = operation(self, *arguments)
        except Exception:  # noqa: BLE001 - the boundary where a rank's failure becomes a report
            outcome = Failure(self.rank, traceback.format_exc())
            self.store.compare_set(self._key("failure"), "", f"{self.rank} {outcome.text}")
        self.store.add(self._key("ended"), 1)
        if isinstance(outcome, Failure):
            self._await_others(outcome)
        return outcome

    def report(self, outcome: Any) -> list[Any] | None:
        """Gather the outcomes: all of them, in rank order, on the controller; None elsewhere."""
        outcomes: list[Any] | None = [None] * self.ranks if self.rank == 0 else None
        with heartbeat.busy_with("gathering outcomes", self.patience.control):
            dist.gather_object(outcome, outcomes, dst=0, group=self.control)
        if self.rank == 0 and self.number > 1:
            self._forget(self.number - 1)
        return outcomes

    def first_failure(self) -> Failure | None:
        """The failure of the current operation that was marked first, wherever it happened."""
        if not self.store.check([self._key("failure")]):
            return None
        rank, _, text = self.store.get(self._key("failure")).decode().partition(" ")
        return Failure(int(rank), text)

    def serve(self) -> None:
        """Ranks other than 0: run what the controller sends until it ends the world.

        The agent's INT, which torchrun passes on to every rank, is left to the controller, which alone knows when state
        is whole.
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
    """The operation with each rank's arguments, pickled before anything is sent: what cannot travel harms nobody."""
    return [pickle.dumps((operation, each)) for each in arguments]


@contextmanager
def joined_world(
    device: Device, patience: Deadlines, secret: str = "", allowance: Allowance | None = None
) -> Iterator[RankState]:
    """This process as a member of the torchrun world (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, … as torchrun sets them).

    One process for each device: on CUDA, the one with the local rank's number. Gradients travel over gloo or nccl;
    control, and what goes on in the background, have gloo groups of their own, whose time-outs may be long without
    hiding a stuck collective. Raises `TrainingError` before it meets the others if there is no device for it. Of a
    CUDA device that others share, `allowance` says what this process may allocate.

    What the processes say to each other, in torchrun's store and in collectives of objects, is signed with the world's
    `secret`, since torch unpickles any message: `SignatureError` for anything else.

    From here on a signal of native code (SEGV, ABRT, BUS, …) ends the process with the stacks of its Python threads on
    standard error: a heap that glibc finds broken leaves one line otherwise, which names neither rank nor place.
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
    """Compute on the CUDA device of the local rank from now on.

    Without a limit torch's allocator keeps what it has freed until the device is full: a neighbour that starts later
    finds nothing, and nobody asks this process to give it back. At its limit it does so by itself.
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
