"""The trainer's side of one server: how it gets new weights.

Owns the order of an update and the states of a server. Promises that a server which is `current` serves exactly
`version`, that a paused server is resumed after success and after failure, and that no call outlasts the update's
deadline by more than `RESUME_SECONDS`. One thread at a time may use a `ServerSync`. Must not know other servers.

    absent ──join──► joining ──succeed──► current ──update──► updating
      ▲                 │                  │   ▲                │   │
      └──────fail───────┴───────fail───────┴───┼──────fail──────┘   │
                                               └──────succeed───────┘

The order of an update, and why:

    start     the server begins to receive, in a thread, and continues to generate
    send      all bytes, into the server's staging buffer; an adapter is prepared there
    pause     no token is sampled from here on; requests in flight are kept, finished or aborted as configured
    update    the model changes; from here on cached prefixes are wrong
    finish    from here on the server labels every token with the new version
    resume

A server that keeps its requests is paused only for full weights over TCP. On GPUs, and for adapters, its `update` is a
few copies between two steps of its engine.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch._C._distributed_c10d import Store

from pipeline.config import InferenceConfig, LoraConfig
from pipeline.errors import DeadlineError, InvalidTransitionError, RollcallError, WeightSyncError
from pipeline.inference.weight_sync.rank_orders import Order, OrderKind, RankOrders
from pipeline.inference.weight_sync.rank_rows import RowSource
from pipeline.inference.weight_sync.relay_link import RelayedUpdates
from pipeline.inference.weight_sync.relay_plan import RelayPlan
from pipeline.inference.weight_sync.server_admin_client import (
    ServerAdminClient,
    ServerUnreachable,
    call_processes,
    count_processes,
    process_results,
    raise_failure,
)
from pipeline.inference.weight_sync.transfer_route import SendingRank, TransferRoute, process_name
from pipeline.inference.weight_sync.transports.gloo import LeaveSignal, connect_store, is_published
from pipeline.inference.weight_sync.transports.gpu_group import await_event
from pipeline.inference.weight_sync.weight_snapshot import ShardGatherer, WeightSnapshot
from pipeline.utils.waiting import Deadline, wait_for

log = logging.getLogger(__name__)

SyncState = Literal["absent", "joining", "current", "updating", "closed"]
SyncEvent = Literal["join", "update", "succeed", "fail", "close"]

TRANSITIONS: dict[tuple[SyncState, SyncEvent], SyncState] = {
    ("absent", "join"): "joining",
    ("joining", "succeed"): "current",
    ("joining", "fail"): "absent",
    ("current", "update"): "updating",
    ("current", "fail"): "absent",
    ("updating", "succeed"): "current",
    ("updating", "fail"): "absent",
    ("absent", "close"): "closed",
    ("current", "close"): "closed",
}

PROBE_SECONDS = 2.0
RESUME_SECONDS = 2.0


def next_sync_state(state: SyncState, event: SyncEvent) -> SyncState:
    """The state after an event; `InvalidTransitionError` when the state does not allow it."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InvalidTransitionError("link", state, event) from None


def adapter_settings(lora: LoraConfig) -> dict[str, Any]:
    """The adapter's settings under the keys of peft's `adapter_config.json`; empty without an adapter."""
    if not lora.rank:
        return {}
    return {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.targets)}


@dataclass(frozen=True)
class MeetingPoint:
    """The address of the trainer's store, where groups meet, and the cluster's password.

    Every server requires the password, and it signs the values in the store.
    """

    address: str
    port: int
    password: str

    def connect(self, seconds: float) -> Store:
        """A connection to the store; `WeightSyncError` when there is none in time."""
        return connect_store(self.address, self.port, self.password, seconds)


class ServerSync:
    """One server and its groups with the trainer's ranks.

    Attributes:
        state: see the module.
        version: the policy version that the server serves; None while no request may be sent to it.
        phases: seconds of each part of the last update: `send`, `pause`, `update`, `resume`. A server that is not
            paused has neither `pause` nor `resume`. The next update replaces the mapping and leaves this one unchanged.
    """

    def __init__(
        self,
        server: str,
        meeting: MeetingPoint,
        config: InferenceConfig,
        on_change: Callable[[str, int | None], None],
        orders: RankOrders,
        plan: RelayPlan | None = None,
    ) -> None:
        """`plan` has the server that forwards the weights to this one; None: the trainer always sends them."""
        self.server, self.state, self.version = server, "absent", None
        self._meeting, self._config, self._on_change, self._orders = meeting, config, on_change, orders
        self._plan = plan or RelayPlan(0)
        self._relayed = RelayedUpdates(server, meeting.password, meeting.connect, self._plan)
        self.phases = {}

    server: str
    state: SyncState
    version: int | None
    phases: dict[str, float]
    _processes: int = 0
    _routes: Sequence[TransferRoute] = ()
    _store: Store | None = None
    _gatherer: ShardGatherer | None = None
    _paused: bool = False
    _announced: bool = False

    def sync(self, payload: WeightSnapshot) -> None:
        """Bring the server to these weights, from any state.

        Raises `WeightSyncError`, `ServerUnreachable` if nobody listens there; the server is then absent and gets no
        requests until a later `sync` succeeds.
        """
        joining = self.state == "absent"
        self._step("join" if joining else "update")
        self.phases = {}
        awaited = f"{self.server} to load weights {payload.version}"
        deadline = Deadline(awaited, self._config.update_seconds)
        try:
            with ServerAdminClient(self.server, self._meeting.password) as control:
                if joining:
                    self._processes = count_processes(control, Deadline(awaited, min(PROBE_SECONDS, deadline.left)))
                    self._drop()
                    self._plan.join(self.server)
                if not self._receive_relayed(control, payload, deadline):
                    self._receive_direct(control, payload, deadline)
                self._swap(control, payload, deadline)
            self._step("succeed")
            took = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in self.phases.items())
            log.info("weights %s on %s: %s", payload.version, self.server, took)
            self._announce(payload.version)
        except (WeightSyncError, DeadlineError) as error:
            self._fail()
            kind = ServerUnreachable if isinstance(error, ServerUnreachable) else WeightSyncError
            raise kind(f"weights {payload.version}: {error}") from error

    def verify(self) -> None:
        """Mark a current server as absent if it is gone, or was restarted and lost its weights.

        A server that accepts the connection and does not answer stays current: it may be busy, and clients retry their
        requests on other servers.
        """
        if self.state != "current":
            return
        try:
            with ServerAdminClient(self.server, self._meeting.password) as control:
                versions = self._versions_of(control, Deadline(f"{self.server} to answer", PROBE_SECONDS))
        except ServerUnreachable as error:
            log.warning("%s: it has to join again", error)
            self._fail()
            return
        except WeightSyncError:
            return
        if any(version != self.version for version in versions):
            log.warning("%s serves weights %s instead of %s: it has to join again", self.server, versions, self.version)
            self._fail()

    def close(self, seconds: float) -> None:
        """End the groups on both sides; `WeightSyncError` when the server did not end its part in time."""
        self._step("close")
        self._plan.leave(self.server)
        try:
            if self._signals:
                with ServerAdminClient(self.server, self._meeting.password) as control:
                    self._leave(control, Deadline(f"{self.server} to leave its group", seconds))
        finally:
            self._drop()

    def _leave(self, control: ServerAdminClient, deadline: Deadline) -> None:
        """Make the server end its part of the groups (see `LeaveSignal`)."""
        control.begin("/collective_rpc", deadline, method="leave_weights")
        for signals in self._signals:
            signals.announce_leaving()
        if process_results(control, "leave_weights", control.end(deadline)) != [[True]] * len(self._signals):
            raise WeightSyncError(f"{self.server} left its group before it received the trainer's signal to leave")

    @property
    def _signals(self) -> Sequence[LeaveSignal]:
        """The signals of the server's processes, for each source."""
        return self._relayed.signals or [route.group for route in self._routes]

    def _receive_relayed(self, control: ServerAdminClient, payload: WeightSnapshot, deadline: Deadline) -> bool:
        """Have the server receive a version from another server; False if the trainer must send it."""
        if self._relayed.source is None:
            return False
        if self._routes:
            self._drop()

        def init_info(group: str, seconds: float) -> dict[str, Any]:
            info = self._init_info(payload, group)
            whole = [RowSource(payload.source.layout).plain()]
            return info | {"sources": whole, "relayed": True, "meeting_seconds": seconds}

        with self._timed("send"):
            return self._relayed.receive(control, payload.version, self._processes, init_info, deadline)

    def _receive_direct(self, control: ServerAdminClient, payload: WeightSnapshot, deadline: Deadline) -> None:
        """Send a version to the server."""
        if not self._routes:
            self._drop()
            self._meet(control, payload, deadline)
        with self._timed("send"):
            self._transfer(control, payload, deadline)

    def _meet(self, control: ServerAdminClient, payload: WeightSnapshot, deadline: Deadline) -> None:
        """Create new groups of the server's processes with each rank; earlier groups do not matter."""
        name = f"{self.server}/{secrets.token_hex(8)}"  # used once: keys of earlier meetings stay in the store
        store = self._meeting.connect(deadline.left)
        control.begin("/init_weight_transfer_engine", deadline, init_info=self._init_info(payload, name))
        for process in range(self._processes):
            _await_published(control, process_name(name, process), store, deadline)
        self._store = store
        # Ordered before rank 0's own part, so that all ranks meet the server's processes at the same time.
        order = self._order("meet", deadline, group=name, processes=self._processes)
        own = SendingRank(0, len(self._orders.sources), payload.source, payload.device, self._meeting.address)
        self._routes = own.meet(store, name, self._processes, deadline)
        self._gatherer = ShardGatherer(payload.device)
        control.end(deadline)
        raise_failure(control, deadline)
        self._orders.await_reports(order, store, deadline)

    def _init_info(self, payload: WeightSnapshot, name: str) -> dict[str, Any]:
        """The facts about the trainer that the server's processes need (`transfer_engine.EngineInit`)."""
        return {
            "host": self._meeting.address,
            "port": self._meeting.port,
            "group": name,
            "processes": self._processes,
            "address": self.server.rpartition(":")[0],
            "seconds": self._config.update_seconds,
            "meeting_seconds": self._config.update_seconds,
            "layout": payload.source.layout.plain(),
            "sources": [source.plain() for source in self._orders.sources],
            "at_once": payload.at_once,
            "on_host": self._config.staging_device == "host",
            "adapter": dict(payload.adapter),
            "relays": self._plan.fanout > 0,
        }

    def _order(self, kind: OrderKind, deadline: Deadline, **what: Any) -> int:
        """Order the trainer's other ranks to do their part; returns the number of the order."""
        return self._orders.give(Order(kind=kind, server=self.server, seconds=deadline.left, **what))

    def _transfer(self, control: ServerAdminClient, payload: WeightSnapshot, deadline: Deadline) -> None:
        if self._gatherer is None or self._store is None:
            raise WeightSyncError(f"{self.server}: no group")
        call_processes(control, "begin_update", deadline)
        self._plan.note_begun(self.server, payload.version)
        if payload.ready is not None:
            await_event(payload.ready, deadline)
        self._send(payload, self._store, self._gatherer, deadline)
        for route in self._routes:
            route.group.await_prepared(payload.version, deadline)

    def _send(self, payload: WeightSnapshot, store: Store, gatherer: ShardGatherer, deadline: Deadline) -> None:
        """Send this rank's rows while the other ranks send theirs; reports another rank's failure before its own."""
        order = self._order("send", deadline, version=payload.version)
        try:
            for route in self._routes:
                route.send(payload, gatherer, deadline)
        except WeightSyncError:
            # A rank that fails drops its groups, and the server then drops all of them: the error here is the effect.
            self._orders.raise_reported(order, store, deadline)
            raise
        self._orders.await_reports(order, store, deadline)

    def _drop(self) -> None:
        """End the groups of this rank and of the other ranks."""
        if self._store is not None:
            try:
                self._order("drop", Deadline("the end of a group", RESUME_SECONDS))
            except WeightSyncError as error:  # with the store the other ranks lose their groups
                log.warning("%s", error)
        self._relayed.drop()
        self._routes, self._store, self._gatherer = (), None, None

    def _swap(self, control: ServerAdminClient, payload: WeightSnapshot, deadline: Deadline) -> None:
        """Change the model of a server that has received the bytes.

        The server is paused for a whole model over gloo, and wherever the configuration ends its requests or recomputes
        their KV cache.
        """
        mode, recompute = self._config.pause_mode, self._config.reset_kv_cache_on_update
        clear = recompute or mode != "keep"
        pause = clear or not (payload.adapter or payload.device.type == "cuda")
        if pause:
            self._paused = True
            with self._timed("pause"):
                control.post(f"/pause?mode={mode}&clear_cache={str(clear).lower()}", deadline)
        with self._timed("update"):
            self._change(control, payload.version, deadline, clear=clear)
        if pause:
            with self._timed("resume"):
                control.post("/resume", deadline)
            self._paused = False

    def _change(self, control: ServerAdminClient, version: int, deadline: Deadline, *, clear: bool) -> None:
        """Make the server load the received version, and verify that each of its processes serves it."""
        control.post("/update_weights", deadline, update_info={"version": version})
        versions = self._versions_of(control, deadline)
        if versions != [version] * self._processes:
            raise_failure(control, deadline)
            raise WeightSyncError(f"{self.server} serves weights {versions}")
        control.post("/finish_weight_update", deadline, weight_version=str(version))
        if clear:
            control.post("/reset_prefix_cache", deadline)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.phases[phase] = time.monotonic() - started

    def _versions_of(self, control: ServerAdminClient, deadline: Deadline) -> list[int | None]:
        """The version that each process of the server reports."""
        return [version for (version,) in call_processes(control, "served_weights", deadline)]

    def _resume(self) -> None:
        """Resume a server that failed while it was paused: it may hold requests of other clients."""
        self._paused = False
        with ServerAdminClient(self.server, self._meeting.password) as control:
            try:
                control.post("/resume", Deadline(f"{self.server} to resume", RESUME_SECONDS))
            except WeightSyncError as error:
                log.warning("could not resume a server: %s", error)

    def _fail(self) -> None:
        """Evict the server: announce that it serves no version, and only then resume it.

        After a late failure the server has the new weights under the old version, so its samples must not be used.
        """
        self._drop()
        self._plan.leave(self.server)
        self._step("fail")
        try:
            self._announce(None)
        except WeightSyncError as error:  # its clients still notice by the version of every token
            log.warning("%s", error)
        if self._paused:
            self._resume()

    def _announce(self, version: int | None) -> None:
        """Announce a change of the served version; `WeightSyncError` when `on_change` could not publish it.

        The first announcement may be None: the board may still have a version of a trainer that was killed.
        """
        if self._announced and version == self.version:
            return
        # A version counts once its announcement has succeeded; that there is none counts at once.
        self._announced = False
        if version is None:
            self.version = None
        try:
            self._on_change(self.server, version)
        except RollcallError as error:
            raise WeightSyncError(
                f"{self.server}: cannot announce that it serves weights {version}: {error}"
            ) from error
        self.version, self._announced = version, True

    def _step(self, event: SyncEvent) -> None:
        self.state = next_sync_state(self.state, event)


def _await_published(control: ServerAdminClient, name: str, store: Store, deadline: Deadline) -> None:
    wait_for(deadline.awaited, lambda: control.answered or is_published(store, name), deadline.left)
    if not is_published(store, name):
        control.end(deadline)  # raises if the server rejected the call
        raise_failure(control, deadline)
