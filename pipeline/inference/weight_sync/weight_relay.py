"""One process of a server forwards what it receives to processes of other servers, chunk by chunk as it arrives.

Owns the groups with these children, and the threads that send. To a child, a relay is a trainer of one rank that has
every row. Promises that a relay neither waits for a child nor keeps a version for one: the next version may overwrite
the buffer while chunks of it are sent. So a child accepts a version only with its seal, which is sent after the last
chunk if the buffer has held this version ever since its first, and the relay has accepted the version itself: it may
have got a chunk that its own source overwrote. Otherwise, and when the relay loses its own source, the child gets
`ABANDONED`. A child that is fed no more, since another server feeds it, loses its group after `IDLE_VERSIONS`. Must not
know vLLM or HTTP, nor which server feeds which (`relay_plan`).

    relay = WeightRelay(layout, buffer, address, connect, seconds)
    rows = RowReceiver(…, arrived=relay.note)
    relay.adopt(process_name(group, 0))                 # joins the group with the child, in a thread
    relay.begin()                                       # before the next version arrives
    relay.feed(process_name(group, 0), version, 30.0)   # sends it, in a thread; False: it was never adopted
    relay.close()                                       # when its source is lost or changes
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Condition, Thread

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from pipeline.errors import WeightSyncError, one_line
from pipeline.inference.weight_sync.rank_rows import RowSource
from pipeline.inference.weight_sync.transfer_route import SEAL_BYTES, SendingRank, TransferRoute
from pipeline.inference.weight_sync.transports.gloo import TransferGroup, WeightLayout
from pipeline.utils.waiting import Deadline

log = logging.getLogger(__name__)
_ABANDON_SECONDS = 2.0
IDLE_VERSIONS = 2
"""The versions without a call of `feed` after which a child's group ends. A child may miss one while it is busy."""
FEED = "feed"
"""The name of the threads that send to children."""


class WeightRelay:
    """The children of one process of a server, and the bytes of a version that its staging buffer has."""

    def __init__(
        self, layout: WeightLayout, buffer: Tensor, address: str, connect: Callable[[], Store], seconds: float
    ) -> None:
        """`buffer` is the staging buffer of all tensors of `layout`; groups listen on `address` and meet in the store
        that `connect` opens, within `seconds`."""
        self._rank = SendingRank(0, 1, RowSource(layout), torch.device("cpu"), address)
        self._buffer, self._connect, self._seconds = buffer, connect, seconds
        self._changed, self._closed = Condition(), False
        self._version: int | None = None
        self._end = self._changes = 0
        self._accepted = False
        self._children: dict[str, Future[TransferRoute]] = {}
        # The versions that have begun here, and this number at the last feed of each child.
        self._begun, self._fed = 0, dict[str, int]()

    def adopt(self, process: str) -> None:
        """Join a group with a child, in a thread. The child's earlier group ends."""
        server, route = process.partition("/")[0], Future[TransferRoute]()
        with self._changed:
            for earlier in [name for name in self._children if name.partition("/")[0] == server]:
                self._drop(earlier)
            self._children[process], self._fed[process] = route, self._begun
        Thread(target=self._meet, args=(process, route), name="child", daemon=True).start()

    def feed(self, process: str, version: int, seconds: float) -> bool:
        """Send a version to a child as it arrives, in a thread; False if the child is unknown."""
        with self._changed:
            route = self._children.get(process)
            if route is None or self._closed:
                return False
            self._fed[process] = self._begun
        Thread(target=self._feed, args=(process, route, version, seconds), name=FEED, daemon=True).start()
        return True

    def begin(self) -> None:
        """Note that the buffer may change from now on, and end the groups of children that moved to another source."""
        with self._changed:
            self._end, self._accepted = 0, False
            self._begun += 1
            for process in [name for name, fed in self._fed.items() if self._begun - fed > IDLE_VERSIONS]:
                self._drop(process)

    def note(self, version: int, end: int, accepted: bool) -> None:
        """Note that the buffer has these bytes of a version, from its beginning up to `end`, and whether the version
        was accepted: it is whole, and sealed by a source that is a server."""
        with self._changed:
            self._changes += version != self._version
            self._version, self._end, self._accepted = version, end, accepted
            self._changed.notify_all()

    def close(self) -> None:
        """Forward nothing more: children get `ABANDONED`, and their groups end."""
        with self._changed:
            self._closed = True
            self._children.clear()
            self._fed.clear()
            self._changed.notify_all()

    def _meet(self, process: str, route: "Future[TransferRoute]") -> None:
        deadline = Deadline(f"the group with {process}", self._seconds)
        try:
            met = self._rank.meet_process(self._connect(), process, deadline)
            if not met.parts.shard.is_whole:
                raise WeightSyncError(f"{process} needs a part of the weights, and a relay forwards all of them")
            route.set_result(met)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread; `_feed` raises it
            route.set_exception(WeightSyncError(one_line(error)))

    def _feed(self, process: str, route: "Future[TransferRoute]", version: int, seconds: float) -> None:
        deadline = Deadline(f"weights {version} for {process}", seconds)
        try:
            self._send(route.result(deadline.left), version, deadline)
        except (WeightSyncError, TimeoutError) as error:
            log.warning("%s gets no weights %s from here: %s", process, version, one_line(error))
            with self._changed:
                self._drop(process)

    def _drop(self, process: str) -> None:
        """Forget a child; its group ends once no thread sends to it."""
        self._children.pop(process, None)
        self._fed.pop(process, None)

    def _send(self, route: TransferRoute, version: int, deadline: Deadline) -> None:
        assert isinstance(route.group, TransferGroup)
        changes = None
        for chunk in route.parts.chunks(at_once=False):
            changes = self._await(version, chunk.end, changes, deadline)
            if changes is None:
                break
            route.group.send(version, self._buffer[chunk.start : chunk.end], deadline)
        # Only now it is known that no later version has overwritten a chunk before it was sent, here or above.
        if changes is None or self._await(version, None, changes, deadline) is None:
            with suppress(WeightSyncError):
                route.group.abandon(Deadline("a child to learn that its version is lost", _ABANDON_SECONDS))
            raise WeightSyncError("this server does not have the version any more")
        route.group.send(version, torch.zeros(SEAL_BYTES, dtype=torch.uint8), deadline)

    def _await(self, version: int, end: int | None, changes: int | None, deadline: Deadline) -> int | None:
        """Wait until the buffer has the bytes up to `end` of a version, or without `end` until the version is accepted;
        None if that never happens. The value counts the versions so far, and must be `changes` again."""

        def is_over() -> bool:
            changed = changes not in (None, self._changes)
            return self._closed or changed or (self._version is not None and self._version > version)

        def has_bytes() -> bool:
            return self._version == version and (self._accepted if end is None else self._end >= end)

        with self._changed:
            self._changed.wait_for(lambda: is_over() or has_bytes(), max(deadline.left, 0.0))
            return self._changes if has_bytes() and not is_over() else None
