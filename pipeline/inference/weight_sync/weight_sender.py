"""Keeps every inference server at the trainer's newest weights.

Owns the trainer's store, one thread per server, and the servers that `wait_until_synced` waits for: every
server that was current when the version was taken, and at least one; for the first version, `quorum` servers. Promises
that servers may join and leave at any time, without a wait of the trainer; that a server which fails or misses the
deadline is evicted, and not waited for; that late, restarted and evicted servers get the newest weights in the
background, and requests only after that; that a version's memory is free before the next version is taken, unless a
server is busy with it; and that every failure is reported. Must not know models, streams or the placement of roles.

    meeting = MeetingPoint(trainer.address, trainer.ports[1], world.password)
    with WeightSender(["127.0.0.3:8000"], meeting, config.inference, 240, board.post_server) as sender:
        sender.start(version, [("model.norm.weight", tensor), …])
        ...                                                       # the servers swap meanwhile
        report = sender.wait_until_synced()

With several sending ranks: `sender.open(publication)` once, then `sender.take(version)` for each version.
"""

import logging
import time
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from types import TracebackType
from typing import Self

import torch

from pipeline.config import InferenceConfig, LoraConfig
from pipeline.errors import RollcallError, WeightSyncError
from pipeline.inference.weight_sync.publication import CPU, Publication, SenderSettings, WholeTensors
from pipeline.inference.weight_sync.rank_orders import Order, RankOrders
from pipeline.inference.weight_sync.rank_rows import check_sources
from pipeline.inference.weight_sync.relay_plan import RelayPlan
from pipeline.inference.weight_sync.server_admin_client import ServerUnreachable
from pipeline.inference.weight_sync.server_sync import MeetingPoint, ServerSync, adapter_settings
from pipeline.inference.weight_sync.sync_round import ServerSlot, SyncReport, SyncRound
from pipeline.inference.weight_sync.transports.gloo import NamedTensors, WeightLayout, create_store
from pipeline.inference.weight_sync.weight_snapshot import WeightSnapshot
from pipeline.utils.waiting import Deadline

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
VERIFY_SECONDS = 2.0
_PULSE_SECONDS = 0.1


class WeightSender:
    """Sends weights to all servers; used from one thread, closed once."""

    def __init__(
        self,
        servers: Sequence[str],
        meeting: MeetingPoint,
        config: InferenceConfig,
        patience: float,
        on_change: Callable[[str, int | None], None],
        lora: LoraConfig | None = None,
        device: torch.device = CPU,
        on_host: bool = False,
        on_leave: Callable[[str], None] = lambda _: None,
        quorum: int = 1,
    ) -> None:
        """Open the store at `meeting`; servers are met as they appear.

        Args:
            servers: `host:port` of each.
            meeting: an address and port of this machine, and the world's password.
            config: how to update and the deadline of an update.
            patience: seconds that `wait_until_synced` waits for a first server while no server is current.
            on_change: called from the servers' threads, with (server, version) when a server becomes current and
                (server, None) when requests must stop. If it raises a `RollcallError` (such as lost streams), the
                server counts as failed and is updated again; any other error ends `wait_until_synced`.
            lora: the adapter that is sent, on a base that the servers have; of rank 0 or None: whole models.
            device: the sending device: a GPU uses nccl, or CUDA IPC to a server on the same GPU; a CPU uses gloo.
            on_host: with a sending GPU, keep pending versions in pinned host memory.
            on_leave: called with a server that leaves, before its groups end; may raise a `RollcallError` too.
            quorum: the number of servers that must have the first version.
        """
        self.settings = SenderSettings(meeting, adapter_settings(lora or LoraConfig()), device.type, on_host)
        self._config, self._patience, self._needed = config, patience, quorum
        self._meeting, self._on_change, self._on_leave = meeting, on_change, on_leave
        self._store = create_store(meeting.address, meeting.port, meeting.password, config.update_seconds)
        self._orders = RankOrders(self._store)
        self._plan = RelayPlan(config.relay_fanout if device.type == "cpu" else 0)
        self._slots: list[ServerSlot] = []
        self._threads: list[Thread] = []
        self._changed = Condition()
        self._payload: WeightSnapshot | None = None
        self._publication: Publication | None = None
        self._round: SyncRound | None = None
        self._broken: BaseException | None = None
        self._closing = False
        for server in servers:
            self.add(server)

    def add(self, server: str) -> bool:
        """Send weights to a further server, in the background; False while the sender still has or leaves this one."""
        with self._changed:
            if self._closing or any(slot.link.server == server for slot in self._slots):
                return False
            link = ServerSync(server, self._meeting, self._config, self._on_change, self._orders, self._plan)
            slot = ServerSlot(link)
            thread = Thread(target=self._server_loop, args=(slot,), name=server, daemon=True)
            self._slots.append(slot)
            self._threads.append(thread)
            thread.start()
        return True

    def remove(self, server: str) -> None:
        """Stop sending to a server, once an update of it has ended; `on_leave` is then called. Does not wait.

        A server that this sender never had is one of a trainer before it, so `on_leave` is called here.
        """
        with self._changed:
            slots = [slot for slot in self._slots if slot.link.server == server]
            for slot in slots:
                slot.leaving = True
            self._changed.notify_all()
        if not slots:
            self._on_leave(server)

    def publish(self, version: int, parameters: NamedTensors, pulse: Callable[[], None] = lambda: None) -> SyncReport:
        """Call `start` and `wait_until_synced`."""
        self.start(version, parameters)
        return self.wait_until_synced(pulse)

    def start(self, version: int, parameters: NamedTensors, layout: WeightLayout | None = None) -> None:
        """Copy a version of tensors that are whole in this process; they may change as soon as this returns.

        Names are those of a Hugging Face checkpoint, the same every time, else `WeightSyncError`; a tied head is not
        sent. `parameters` are read once, one by one, from any device. A generator needs memory for one tensor at a time
        if `layout` describes its tensors; without `layout`, all tensors of the first version are held at once.
        """
        if self._publication is None:
            if layout is None:
                parameters = list(parameters)
                layout = WeightLayout.of(parameters)
            self.open(WholeTensors(self.settings.snapshots(layout)))
        assert isinstance(self._publication, WholeTensors), "start is not for a sender that was opened"
        self._publication.parameters = parameters
        self.take(version)

    def open(self, publication: Publication) -> None:
        """Set the publication that takes the versions; called once, before the first version.

        `WeightSyncError` unless its ranks together have each row of the weights exactly once.
        """
        check_sources(publication.sources)
        self._publication, self._orders.sources = publication, tuple(publication.sources)

    def take(self, version: int) -> None:
        """Copy a version of the weights for the servers' threads; the weights may change as soon as this returns.

        May be called while an earlier version is being sent: a server that did not begin it skips it, and a server that
        is busy with it gets the new version afterwards.
        """
        if self._publication is None:
            raise WeightSyncError("nothing is published: open comes first")
        started = time.monotonic()
        with self._changed:
            # No thread may begin the old version now: the next one may take its memory, except where a thread is busy.
            self._payload = None
            in_use = {slot.busy for slot in self._slots if slot.busy is not None}
        payload = self._publication.take(version, in_use)
        with self._changed:
            self._payload = payload
            self._round = SyncRound(version, self._slots, self._config.update_seconds)
            self._round.blocking_seconds = time.monotonic() - started
            self._changed.notify_all()

    def wait_until_synced(self, pulse: Callable[[], None] = lambda: None) -> SyncReport:
        """Wait until the servers that were current at the last `take` have its version or are evicted.

        `pulse` is called during the wait and may raise to end it. Raises `WeightSyncError` when no version was taken,
        when no server has the version within `patience`, or fewer than the quorum have the first one within twice that.
        """
        if self._round is None:
            raise WeightSyncError("no version was started")
        started = time.monotonic()
        self._wait(self._round, pulse)
        self._round.blocking_seconds += time.monotonic() - started
        return self._report(self._round)

    def versions(self) -> dict[str, int | None]:
        """The version that each server serves now; None while no request may be sent to it."""
        with self._changed:
            return {slot.link.server: slot.link.version for slot in self._slots}

    def close(self) -> list[str]:
        """Leave every group, on both sides, within `CLOSE_SECONDS` per step; returns the failures."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            slots, threads = [*self._slots], [*self._threads]
        deadline = Deadline("the servers' threads", CLOSE_SECONDS)
        for thread in threads:
            thread.join(deadline.left)
        problems = [slot.failure for slot in slots if slot.failure]
        problems += [f"{thread.name} is still busy" for thread in threads if thread.is_alive()]
        for problem in problems:
            log.warning("closing: %s", problem)
        self._payload = None  # it may have the size of the model
        if self._publication is not None:
            self._publication.close()
        try:
            order = self._orders.give(Order(kind="close"))
            # The store is in this process. A rank that still waits in it would lose it, and torch would log a stack
            # trace for each.
            self._orders.await_reports(order, self._store, Deadline("the end of the other ranks", CLOSE_SECONDS))
        except WeightSyncError as error:
            problems.append(str(error))
        self._orders.sources = ()  # no rank follows orders any more
        return problems

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, sync_round: SyncRound, pulse: Callable[[], None]) -> None:
        """Wait until the round is over and enough servers have the weights: the quorum for the first version, else one.

        The quorum has twice the patience, in which a server that fails at its start can be restarted and join.
        """
        version = sync_round.version
        first = Deadline(f"weights {version} on a server", self._patience)
        quorum = Deadline(f"weights {version} on {self._needed} servers (inference.min_servers)", 2 * self._patience)
        while True:
            with self._changed:
                if self._broken is not None:
                    raise WeightSyncError(f"a server's thread ended: {self._broken}") from self._broken
                served = sum(slot.link.version == version for slot in self._slots)
                if served >= self._needed and sync_round.over:
                    self._needed = 1
                    return
                late = first if not served else quorum if served < self._needed else None
                if late is not None and late.passed:
                    raise WeightSyncError(str(late.error(self._missing(version))))
                self._changed.wait(_PULSE_SECONDS)
            pulse()

    def _missing(self, version: int) -> str:
        """Why servers do not have a version."""
        missing = [slot for slot in self._slots if slot.link.version != version]
        return "; ".join(slot.failure or f"{slot.link.server}: no attempt ended" for slot in missing)

    def _report(self, sync_round: SyncRound) -> SyncReport:
        with self._changed:
            synced = [slot for slot in self._slots if slot.link.version == sync_round.version]
            done = {slot.link.server: slot.seconds for slot in synced}
            phases = {slot.link.server: dict(slot.phases) for slot in synced}
            return SyncReport(sync_round.version, sync_round.blocking_seconds, done, sync_round.failures(), phases)

    def _server_loop(self, slot: ServerSlot) -> None:
        """Run a server's thread: update the server whenever its weights are not the newest, until one of the two
        leaves."""
        try:
            while not (self._closing or slot.leaving):
                self._update_or_probe(slot)
            if slot.leaving:
                self._withdraw(slot)
            self._leave(slot)
            if slot.leaving:
                self._forget(slot)
        except BaseException as error:
            with self._changed:
                self._broken = error
                self._changed.notify_all()
            raise

    def _update_or_probe(self, slot: ServerSlot) -> None:
        """Send the newest weights if the server needs them, else probe the server.

        A separate function, so that the thread holds no reference to a version between two calls: a version is memory.
        """
        payload = self._next(slot)
        if payload is not None:
            self._push(slot, payload)
        else:
            slot.link.verify()

    def _next(self, slot: ServerSlot) -> WeightSnapshot | None:
        """Wait for weights to send; None when it is time to probe the server, or to close."""
        with self._changed:
            pause = slot.retry.left or VERIFY_SECONDS

            def is_over() -> bool:
                return self._closing or slot.leaving

            is_due = self._changed.wait_for(lambda: is_over() or slot.needs_update(self._payload), pause)
            payload = self._payload if is_due and not is_over() else None
            slot.busy = None if payload is None else payload.version
            return payload

    def _push(self, slot: ServerSlot, payload: WeightSnapshot) -> None:
        started, failure, reported, unreachable = time.monotonic(), "", slot.live, False
        try:
            slot.link.sync(payload)
        except WeightSyncError as error:
            failure, unreachable = str(error), isinstance(error, ServerUnreachable)
            if not reported and failure != slot.failure:
                log.info("a server is not there yet: %s", failure)
        with self._changed:
            slot.note(payload.version, time.monotonic() - started, failure, unreachable=unreachable)
            slot.busy = None
            self._changed.notify_all()

    def _leave(self, slot: ServerSlot) -> None:
        slot.failure = ""
        try:
            slot.link.close(CLOSE_SECONDS)
        except WeightSyncError as error:
            slot.failure = str(error)

    def _withdraw(self, slot: ServerSlot) -> None:
        """Announce that a server leaves. If that fails, its clients notice when it stops."""
        try:
            self._on_leave(slot.link.server)
        except RollcallError as error:
            log.warning("%s leaves, which could not be announced: %s", slot.link.server, error)

    def _forget(self, slot: ServerSlot) -> None:
        """Release everything that was kept for a server that has left, in this process and on the other ranks."""
        with self._changed:
            self._slots.remove(slot)
            self._threads = [thread for thread in self._threads if thread.name != slot.link.server]
            self._changed.notify_all()
        log.info("%s has left%s", slot.link.server, f": {slot.failure}" if slot.failure else "")
        try:
            self._orders.give(Order(kind="leave", server=slot.link.server))
        except WeightSyncError as error:  # the store is lost, and every rank ends its threads
            log.warning("%s: %s", slot.link.server, error)
