"""How the trainer's other ranks send their rows while rank 0 leads the updates.

Rank 0 alone sends HTTP requests to the servers and decides which version goes where (`server_sync`). It writes its
orders to its store, which is signed with the cluster's password. Every other sending rank follows the orders for each
server in one thread per server, and reports the result. Owns orders and reports. Promises that no wait outlasts the
deadline of its order, that a rank which fails reports the reason, that a rank skips an order which rank 0 has
abandoned, and that a rank sends only versions that every rank took in one operation of the trainer. Must not know HTTP,
nor when a version is taken.

    rank 0, for one server                              every other rank
    meet    the server's processes are announced        joins a group with each of them
    send    the server has begun to receive             sends its rows of the version to each
    drop    the server failed, or was left              drops its groups
    leave   the server has left the attempt             ends its thread for the server
    close   no version is needed any more               ends its threads, forgets its versions
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Literal

import msgspec
import torch
from torch._C._distributed_c10d import Store

from pipeline.errors import SignatureError, WeightSyncError, reason_of
from pipeline.inference.weight_sync.rank_rows import RowSource
from pipeline.inference.weight_sync.transfer_route import SendingRank, TransferRoute
from pipeline.inference.weight_sync.transports.gpu_group import await_event
from pipeline.inference.weight_sync.weight_snapshot import RankSnapshots, ShardGatherer
from pipeline.utils.waiting import Deadline

log = logging.getLogger(__name__)
ORDERS_IN_STORE = 1024
"""Number of orders whose reports the store holds; each new order deletes the reports of the order 1024 before it, which
every rank has followed or abandoned."""
_LISTEN_SECONDS = 3600.0
"""Length of one wait for the next order; long, since torch writes two lines to standard error whenever a wait ends."""
OrderKind = Literal["meet", "send", "drop", "leave", "close"]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """An order of rank 0 to the other ranks.

    Attributes:
        server: `host:port` of the server that rank 0 updates.
        group: for `meet`, the prefix of the names of the server's processes.
        processes: for `meet`, the number of the server's processes.
        version: for `send`, the policy version to send.
        seconds: time limit of the order.
    """

    kind: OrderKind
    server: str = ""
    group: str = ""
    processes: int = 0
    version: int = -1
    seconds: float = 0.0


class RankOrders:
    """Rank 0's orders to the others; may be used from several threads.

    Attributes:
        sources: the ranks that send, rank 0 first; known before the first version is taken.
    """

    sources: tuple[RowSource, ...] = ()

    def __init__(self, store: Store) -> None:
        self._store, self._lock, self._next = store, Lock(), 0

    def give(self, order: Order) -> int:
        """Publish an order and return its number; `WeightSyncError` when the store is lost."""
        if len(self.sources) < 2:
            return -1
        with self._lock:
            number, self._next = self._next, self._next + 1
            try:
                self._store.set(_key(number), msgspec.json.encode(order).decode())
                for rank in range(len(self.sources) if number >= ORDERS_IN_STORE else 0):
                    self._store.delete_key(_key(number - ORDERS_IN_STORE, rank))
            except RuntimeError as error:
                raise WeightSyncError(f"the store is lost: {error}") from error
        return number

    def await_reports(self, number: int, store: Store, deadline: Deadline) -> None:
        """Wait until every rank has executed the order; `WeightSyncError` with the reason of a rank that failed."""
        for rank in range(1, len(self.sources)):
            with _of_rank(rank, deadline):
                store.wait([_key(number, rank)], timedelta(seconds=max(deadline.left, 0.001)))
                _raise_reason(store.get(_key(number, rank)))

    def raise_reported(self, number: int, store: Store, deadline: Deadline) -> None:
        """Raise `WeightSyncError` with the reason of a rank that has already reported a failure; does not wait."""
        for rank in range(1, len(self.sources)):
            with _of_rank(rank, deadline):
                if store.check([_key(number, rank)]):
                    _raise_reason(store.get(_key(number, rank)))


class OrderedRank:
    """A rank of the trainer that follows rank 0's orders from its construction until `close` or the loss of rank 0."""

    def __init__(self, rank: SendingRank, snapshots: RankSnapshots, connect: Callable[[], Store]) -> None:
        """`connect` opens a connection to rank 0's store. Each thread opens one, since a wait blocks its connection."""
        self.rank, self.snapshots, self.connect = rank, snapshots, connect
        self._queues: dict[str, SimpleQueue[tuple[int, Order]]] = {}
        Thread(target=self._listen, name="weight orders", daemon=True).start()

    def _listen(self) -> None:
        try:
            store, number = self.connect(), 0
            while self._follow(number, _order(store, number)):
                number += 1
            store.set(_key(number, self.rank.number), "")
        except (WeightSyncError, SignatureError, RuntimeError) as error:
            log.warning("rank %s sends no weights any more: %s", self.rank.number, error)
        self.snapshots.close()
        for queue in self._queues.values():
            queue.put((-1, Order(kind="close")))

    def _follow(self, number: int, order: Order) -> bool:
        if order.kind == "close":
            return False
        if order.kind == "leave":
            if (queue := self._queues.pop(order.server, None)) is not None:
                queue.put((number, order))
            return True
        if order.server not in self._queues:
            self._queues[order.server] = SimpleQueue()
            feeder = _ServerFeeder(self, self._queues[order.server])
            Thread(target=feeder.run, name=order.server, daemon=True).start()
        self._queues[order.server].put((number, order))
        return True


class _ServerFeeder:
    """A rank's thread for one server."""

    def __init__(self, owner: OrderedRank, orders: "SimpleQueue[tuple[int, Order]]") -> None:
        self._rank, self._snapshots, self._connect = owner.rank, owner.snapshots, owner.connect
        self._orders = orders
        self._routes: Sequence[TransferRoute] = ()
        self._gatherer = ShardGatherer(owner.rank.device)

    def run(self) -> None:
        """Execute orders until `leave` or `close`."""
        try:
            if self._rank.device.type == "cuda":
                torch.cuda.set_device(self._rank.device)
            store = self._connect()
            while self._serve(store, *self._orders.get()):
                pass
        except (WeightSyncError, RuntimeError) as error:
            log.warning("rank %s feeds a server no more: %s", self._rank.number, error)
        finally:
            self._routes = ()

    def _serve(self, store: Store, number: int, order: Order) -> bool:
        if order.kind in ("leave", "close"):
            return False
        reason = self._do(store, order)
        if order.kind != "drop":
            store.set(_key(number, self._rank.number), reason)
        # The report precedes the end of the groups: rank 0's own transfer to the server then fails too, and rank 0
        # must find this rank's reason in the store at that moment.
        if reason:
            self._drop()
        return True

    def _do(self, store: Store, order: Order) -> str:
        """Why an order could not be followed; empty when it was."""
        deadline = Deadline(f"{order.server} and rank {self._rank.number} of the trainer", order.seconds)
        try:
            # Rank 0 gives a server its next order only after the last one ended or was abandoned.
            if not self._orders.empty():
                raise WeightSyncError("rank 0 has abandoned this order")
            if order.kind == "send":
                if not self._routes:
                    raise WeightSyncError("this rank has not met the server")
                self._send(order.version, deadline)
                return ""
            self._drop()
            if order.kind == "meet":
                self._routes = self._rank.meet(store, order.group, order.processes, deadline)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: rank 0 gets the reason
            return reason_of(error)
        return ""

    def _send(self, version: int, deadline: Deadline) -> None:
        snapshot = self._snapshots.held(version)
        if snapshot.ready is not None:
            await_event(snapshot.ready, deadline)
        for route in self._routes:
            route.send(snapshot, self._gatherer, deadline)

    def _drop(self) -> None:
        self._routes = ()


@contextmanager
def _of_rank(rank: int, deadline: Deadline) -> Iterator[None]:
    """Name this rank in every error raised inside the context."""
    try:
        yield
    except (RuntimeError, SignatureError, WeightSyncError) as error:
        raise WeightSyncError(f"{deadline.awaited}: rank {rank} of the trainer: {error}") from error


def _raise_reason(report: bytes) -> None:
    if report:
        raise WeightSyncError(report.decode())


def _key(number: int, rank: int = 0) -> str:
    """The store's key of an order or, with `rank`, of a rank's report on the order."""
    return f"orders/{number}/{rank}" if rank else f"orders/{number}"


def _order(store: Store, number: int) -> Order:
    """Wait for the order of this number and return it."""
    while not _is_published(store, number):
        continue
    return msgspec.json.decode(store.get(_key(number)), type=Order)


def _is_published(store: Store, number: int) -> bool:
    try:
        store.wait([_key(number)], timedelta(seconds=_LISTEN_SECONDS))
    except torch.distributed.DistStoreError:  # nothing yet
        return False
    return True
