"""Keeps every inference server at the trainer's newest weights.

Owns the trainer's store, one thread for each server, and the rule of whom `settle` waits for: every server that was
current when the version was started, and at least one. Promises that a server which fails or misses the deadline is
evicted, not waited for until it is back; that servers which are late, restarted or evicted are brought up in the
background, to the newest weights, before anybody may ask them; that a version's memory is free before the next is
taken, unless a server is busy with it; and that every failure is reported. Must not know models, streams or placements.

    meeting = MeetingPoint(trainer.address, trainer.ports[1], world.password)
    with WeightSender(["127.0.0.3:8000"], meeting, config.inference, 240, board.post_server) as sender:
        sender.start(version, [("model.norm.weight", tensor), …])
        ...                                                       # the servers swap meanwhile
        report = sender.settle()

Where several ranks send, each its rows: `sender.open(publication)` once, and `sender.take(version)` for each version.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Thread
from types import TracebackType
from typing import Self

import torch

from pipeline.config import InferenceConfig, LoraConfig
from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync.publication import CPU, Publication, SenderSettings, WholeTensors
from pipeline.inference.weight_sync.rank_orders import Order, RankOrders
from pipeline.inference.weight_sync.rank_rows import check_sources
from pipeline.inference.weight_sync.server_sync import RESUME_SECONDS, MeetingPoint, ServerSync, adapter_settings
from pipeline.inference.weight_sync.transports.gloo import NamedTensors, WeightLayout, create_store
from pipeline.inference.weight_sync.weight_snapshot import WeightSnapshot
from pipeline.utils.waiting import Deadline

log = logging.getLogger(__name__)

FIRST_RETRY, LONGEST_RETRY = 0.25, 5.0
CLOSE_SECONDS = 5.0
VERIFY_SECONDS = 2.0
_PULSE_SECONDS = 0.1


@dataclass(frozen=True)
class SyncReport:
    """What became of one version.

    Attributes:
        version: what was started.
        seconds: how long the caller was held up, in `start` and in `settle` together.
        servers: seconds that each server took, by `host:port`.
        failures: why the others failed; they are evicted.
        phases: of those seconds, the parts of each server's update (`ServerSync.phases`).
    """

    version: int
    seconds: float
    servers: dict[str, float]
    failures: dict[str, str]
    phases: dict[str, dict[str, float]] = field(default_factory=dict)

    def slowest(self) -> dict[str, float]:
        """By part of an update, the seconds of the server that took longest for it."""
        parts = [(phase, seconds) for phases in self.phases.values() for phase, seconds in phases.items()]
        return {phase: max(seconds for each, seconds in parts if each == phase) for phase, _ in parts}


@dataclass
class _ServerSlot:
    """A server's link, the version that is on its way there, and the end of its last attempt."""

    link: ServerSync
    busy: int | None = None
    attempted_version: int = -1
    attempts: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    failures: int = 0
    retry: Deadline = field(default_factory=lambda: Deadline("a retry", 0.0))

    @property
    def live(self) -> bool:
        return self.link.state in ("current", "updating")

    def needs_update(self, payload: WeightSnapshot | None) -> bool:
        """Whether there is something to bring now."""
        return payload is not None and self.link.version != payload.version and self.retry.passed

    def note(self, version: int, seconds: float, failure: str) -> None:
        self.attempted_version, self.seconds, self.failure = version, seconds, failure
        self.phases = self.link.phases
        self.attempts += 1
        self.failures = self.failures + 1 if failure else 0
        pause = min(LONGEST_RETRY, FIRST_RETRY * 2 ** min(self.failures, 10)) if failure else 0.0
        self.retry = Deadline("a retry", pause)


class _SyncRound:
    """One version on its way: who had weights when it was started, and until when they may take."""

    def __init__(self, version: int, seats: Sequence[_ServerSlot], update_seconds: float) -> None:
        self.version, self.held_up = version, 0.0
        self._before = [(seat, seat.attempts) for seat in seats if seat.live]
        attempts = 2 if any(seat.link.state == "updating" for seat in seats) else 1
        seconds = attempts * (update_seconds + 2 * RESUME_SECONDS)
        self._deadline = Deadline(f"weights {version} on every server", seconds)

    @property
    def over(self) -> bool:
        """Whether every awaited server ended its attempt, or failed at the version before; or the time is up."""
        return self._deadline.passed or all(self._tried(seat, before) for seat, before in self._before)

    def failures(self) -> dict[str, str]:
        """Why the awaited servers do not have the weights."""
        late = "did not end within the deadline"
        return {
            seat.link.server: (seat.failure or "lost its weights") if self._tried(seat, before) else late
            for seat, before in self._before
            if seat.link.version != self.version
        }

    def _tried(self, seat: _ServerSlot, before: int) -> bool:
        return seat.attempted_version == self.version or (seat.attempts > before and bool(seat.failure))


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
    ) -> None:
        """Open the store at `meeting`; servers are met as they appear.

        Args:
            servers: `host:port` of each.
            meeting: an address and port of this machine, and the world's password.
            config: how to update and the deadline of an update.
            patience: seconds that `wait_until_synced` waits for a first server when there is none.
            on_change: called from the servers' threads, with (server, version) when a server becomes current and
                (server, None) when requests must stop. If it raises a `RollcallError` (such as lost streams), the
                server counts as failed and is updated again; any other error ends `wait_until_synced`.
            lora: the adapter that is sent, on a base that the servers have; of rank 0 or None: whole models.
            device: which sends: a GPU over nccl, or out of its memory to a server on the same GPU; a CPU over gloo.
            on_host: keep versions that wait in memory of the host, where a GPU sends them.
        """
        self.settings = SenderSettings(meeting, adapter_settings(lora or LoraConfig()), device.type, on_host)
        self._config, self._patience = config, patience
        self._store = create_store(meeting.address, meeting.port, meeting.password, config.update_seconds)
        self._orders = RankOrders(self._store)
        self._seats = [_ServerSlot(ServerSync(server, meeting, config, on_change, self._orders)) for server in servers]
        self._changed = Condition()
        self._payload: WeightSnapshot | None = None
        self._publication: Publication | None = None
        self._round: _SyncRound | None = None
        self._broken: BaseException | None = None
        self._closing = False
        self._threads = [Thread(target=self._server_loop, args=(seat,), name=seat.link.server) for seat in self._seats]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def publish(self, version: int, parameters: NamedTensors, pulse: Callable[[], None] = lambda: None) -> SyncReport:
        """`start` and `settle` in one call."""
        self.start(version, parameters)
        return self.wait_until_synced(pulse)

    def start(self, version: int, parameters: NamedTensors, layout: WeightLayout | None = None) -> None:
        """Hand over a version of tensors that are whole in this process; they may change as soon as this returns.

        Names are those of a Hugging Face checkpoint, the same every time, else `WeightSyncError`; a tied head is not
        sent. `parameters` are read once, one by one, from any device: an iterator that makes them needs memory for one,
        if `layout` says beforehand what it makes; without it, the first version's are all held while they are packed.
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
        """Send what this publication takes; called once, before the first version.

        `WeightSyncError` unless its ranks have each row of the weights once.
        """
        check_sources(publication.sources)
        self._publication, self._orders.sources = publication, tuple(publication.sources)

    def take(self, version: int) -> None:
        """Take a version of the weights and hand it over to the servers' threads; they may change as soon as this
        returns.

        May be called while an earlier version is on its way: a server that did not begin it skips it, one that is busy
        with it takes this one afterwards.
        """
        if self._publication is None:
            raise WeightSyncError("nothing is published: open comes first")
        started = time.monotonic()
        with self._changed:
            self._payload = None  # whose memory the next version may take
            in_use = {seat.busy for seat in self._seats if seat.busy is not None}
        payload = self._publication.take(version, in_use)
        with self._changed:
            self._payload = payload
            self._round = _SyncRound(version, self._seats, self._config.update_seconds)
            self._round.held_up = time.monotonic() - started
            self._changed.notify_all()

    def wait_until_synced(self, pulse: Callable[[], None] = lambda: None) -> SyncReport:
        """Wait until the servers that had weights at the last `start` have its version or are evicted.

        `pulse` is called while this waits and may raise to end the wait. Raises `WeightSyncError` when nothing was
        started, or when no server at all has the version within the patience.
        """
        if self._round is None:
            raise WeightSyncError("no version was started")
        started = time.monotonic()
        self._wait(self._round, pulse)
        self._round.held_up += time.monotonic() - started
        return self._report(self._round)

    def versions(self) -> dict[str, int | None]:
        """What each server serves now; None if it must not be asked."""
        return {seat.link.server: seat.link.version for seat in self._seats}

    def close(self) -> list[str]:
        """Leave every group, on both sides, within `CLOSE_SECONDS` a step; what did not work."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        deadline = Deadline("the servers' threads", CLOSE_SECONDS)
        for thread in self._threads:
            thread.join(deadline.left)
        problems = [seat.failure for seat in self._seats if seat.failure]
        problems += [f"{thread.name} is still busy" for thread in self._threads if thread.is_alive()]
        for problem in problems:
            log.warning("closing: %s", problem)
        self._payload = None  # it may have the size of the model
        if self._publication is not None:
            self._publication.close()
        try:
            order = self._orders.give(Order(kind="close"))
            # Else they would lose the store while they wait in it, and torch would write a stack for each.
            self._orders.await_reports(order, self._store, Deadline("the end of the other ranks", CLOSE_SECONDS))
        except WeightSyncError as error:
            problems.append(str(error))
        self._orders.sources = ()  # nobody follows orders any more
        return problems

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, going: _SyncRound, pulse: Callable[[], None]) -> None:
        """Until the round is over and at least one server has the weights."""
        first = Deadline(f"weights {going.version} on a server", self._patience)
        while True:
            with self._changed:
                if self._broken is not None:
                    raise WeightSyncError(f"a server's thread ended: {self._broken}") from self._broken
                served = any(seat.link.version == going.version for seat in self._seats)
                if served and going.over:
                    return
                if first.passed and not served:
                    raise WeightSyncError(str(first.error(self._missing())))
                self._changed.wait(_PULSE_SECONDS)
            pulse()

    def _missing(self) -> str:
        return "; ".join(seat.failure or f"{seat.link.server}: no attempt ended" for seat in self._seats)

    def _report(self, ended: _SyncRound) -> SyncReport:
        with self._changed:
            there = [seat for seat in self._seats if seat.link.version == ended.version]
            done = {seat.link.server: seat.seconds for seat in there}
            phases = {seat.link.server: dict(seat.phases) for seat in there}
            return SyncReport(ended.version, ended.held_up, done, ended.failures(), phases)

    def _server_loop(self, seat: _ServerSlot) -> None:
        """A server's thread: bring it to the newest weights whenever it is not there."""
        try:
            while not self._closing:
                self._look_after(seat)
            self._leave(seat)
        except BaseException as error:
            with self._changed:
                self._broken = error
                self._changed.notify_all()
            raise

    def _look_after(self, seat: _ServerSlot) -> None:
        """Bring what there is to bring. The thread refers to no version, which is memory, once this returns."""
        payload = self._next(seat)
        if payload is not None:
            self._push(seat, payload)
        else:
            seat.link.verify()

    def _next(self, seat: _ServerSlot) -> WeightSnapshot | None:
        """The weights to bring; None when it is time to look after the server, or to close."""
        with self._changed:
            pause = seat.retry.left or VERIFY_SECONDS
            wanted = self._changed.wait_for(lambda: self._closing or seat.needs_update(self._payload), pause)
            payload = self._payload if wanted and not self._closing else None
            seat.busy = None if payload is None else payload.version
            return payload

    def _push(self, seat: _ServerSlot, payload: WeightSnapshot) -> None:
        started, failure, reported = time.monotonic(), "", seat.live
        try:
            seat.link.sync(payload)
        except WeightSyncError as error:
            failure = str(error)
            if not reported and failure != seat.failure:
                log.info("a server is not there yet: %s", failure)
        with self._changed:
            seat.note(payload.version, time.monotonic() - started, failure)
            seat.busy = None
            self._changed.notify_all()

    def _leave(self, seat: _ServerSlot) -> None:
        seat.failure = ""
        try:
            seat.link.close(CLOSE_SECONDS)
        except WeightSyncError as error:
            seat.failure = str(error)
