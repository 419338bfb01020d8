"""The trainer's side of a server that gets its weights from another server.

Owns the calls by which two servers meet and one feeds the other, and the choice of another source after a failure.
Promises that no wait outlasts its deadline, and that a failure of the source is a `RelayError`, after which another
source may feed the server. Must not know the order of an update (`server_sync`).

    trainer ──adopt_server──► source          joins a group with the server, in a thread
    trainer ──init…────────► server           announces itself, joins the group
    trainer ──begin_update─► server           receives, in a thread
    trainer ──feed_server──► source           forwards the version, in a thread
    server ──prepared, or lost──► the trainer's store
"""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch._C._distributed_c10d import Store

from pipeline.errors import DeadlineError, WeightSyncError
from pipeline.inference.weight_sync.relay_plan import RelayPlan
from pipeline.inference.weight_sync.server_admin_client import ServerAdminClient, call_processes
from pipeline.inference.weight_sync.transfer_route import group_name, process_name
from pipeline.inference.weight_sync.transports.gloo import SOURCE_LOST, ProcessSignals
from pipeline.utils.waiting import Deadline, wait_for

log = logging.getLogger(__name__)
MAX_RELAYED = 4
"""Most attempts of one update before the trainer sends it itself. Each has half of the seconds that are left."""
_LONGEST_PAUSE = 0.1
_PROBE_SECONDS = 2.0
InitInfo = Callable[[str, float], Mapping[str, Any]]
"""Returns the description of a group for a server's processes, by its name and the seconds for the meeting."""


class RelayError(WeightSyncError):
    """A server got no weights from its source.

    Attributes:
        is_source_lost: whether the source itself has lost its source, and may feed the server again.
    """

    def __init__(self, message: str, *, is_source_lost: bool = False) -> None:
        super().__init__(message)
        self.is_source_lost = is_source_lost


@dataclass(frozen=True)
class RelayLink:
    """The groups of a server's processes with those of its source.

    Attributes:
        source: `host:port` of the server that forwards the weights.
        group: the prefix of the groups' names, used once.
        signals: those of the server's processes.
    """

    source: str
    password: str
    group: str
    signals: Sequence[ProcessSignals]

    @classmethod
    def meet(
        cls,
        control: ServerAdminClient,
        source: str,
        password: str,
        processes: int,
        store: Store,
        init_info: InitInfo,
        deadline: Deadline,
    ) -> "RelayLink":
        """Make both servers join new groups, in half of the seconds that are left: the server must answer before the
        deadline that the other one did not come, or the failure would look like its own."""
        group = f"{control.server}/{secrets.token_hex(8)}"
        names = [group_name(process_name(group, process), 0) for process in range(processes)]
        link = cls(source, password, group, [ProcessSignals(store, name) for name in names])
        link._call_source("adopt_server", deadline)
        control.post("/init_weight_transfer_engine", deadline, init_info=init_info(group, deadline.left / 2))
        for (reason,) in call_processes(control, "weights_failure", deadline):
            if reason:
                raise RelayError(f"{control.server} did not meet {source}: {reason}")
        return link

    def transfer(self, version: int, update: Deadline, deadline: Deadline) -> None:
        """Make the source forward a version, and wait until every process of the server has prepared it.

        The source may try until the deadline of the whole `update`. With that of the attempt it could stop a moment
        before the trainer does, and a server that is only late would look like one that has lost its source.
        """
        self._call_source("feed_server", deadline, version=str(version), seconds=str(update.left))
        for signals in self.signals:
            is_decided = partial(_is_decided, signals, version)
            wait_for(deadline.awaited, is_decided, deadline.left, longest_pause=_LONGEST_PAUSE)
            # A version that arrived and cannot be served is lost too, and that is no fault of the source.
            if not signals.is_reported(version) and (loss := signals.find_loss()):
                raise RelayError(f"no weights from {self.source}: {loss}", is_source_lost=SOURCE_LOST in loss)
            signals.await_prepared(version, deadline)

    def _call_source(self, method: str, deadline: Deadline, **arguments: str) -> None:
        try:
            with ServerAdminClient(self.source, self.password) as control:
                answers = call_processes(control, method, deadline, group=self.group, **arguments)
        except WeightSyncError as error:
            raise RelayError(f"the source of the weights does not answer: {error}") from error
        if answers != [[True]] * len(self.signals):
            # It has met its own source again, or has other processes.
            raise RelayError(f"{self.source} does not forward weights now: {answers}", is_source_lost=True)


class RelayedUpdates:
    """The source of one server, as the plan has it now."""

    def __init__(self, server: str, password: str, connect: Callable[[float], Store], plan: RelayPlan) -> None:
        """`connect` opens a connection to the trainer's store within these seconds."""
        self._server, self._password, self._connect, self._plan = server, password, connect, plan
        self._link: RelayLink | None = None

    @property
    def source(self) -> str | None:
        """The server that should feed this one now; None: the trainer."""
        return self._plan.source_of(self._server)

    @property
    def signals(self) -> Sequence[ProcessSignals]:
        """Those of the server's processes; none without a link."""
        return self._link.signals if self._link else ()

    def drop(self) -> None:
        """Forget the link: the server must meet its next source."""
        self._link = None

    def receive(
        self, control: ServerAdminClient, version: int, processes: int, init_info: InitInfo, deadline: Deadline
    ) -> bool:
        """Have the server receive a version from its source, or from the next one if the source is gone; False if the
        trainer must send it. `WeightSyncError` if the server itself fails."""
        for earlier in range(MAX_RELAYED):
            if (source := self.source) is None:
                break
            attempt = Deadline(f"{deadline.awaited} from {source}", deadline.left / 2)
            if not self._plan.await_begun(source, self._server, version, attempt.left / 2):
                if self.source == source:
                    break  # it is busy with another version
                continue
            try:
                self._receive_from(control, source, version, processes, init_info, deadline, attempt)
                return True
            except (RelayError, DeadlineError) as error:
                log.warning("%s: %s", self._server, error)
                self._plan.note_lost(self._server)
                self.drop()
                if isinstance(error, RelayError) and error.is_source_lost:
                    continue
                is_left = self._leave_source(source, version, isinstance(error, DeadlineError), deadline)
                if earlier and not is_left:
                    break  # the trainer needs the rest of the seconds
        self.drop()
        return False

    def _leave_source(self, source: str, version: int, is_late: bool, deadline: Deadline) -> bool:
        """Have another server replace a source that is gone. One that answers may feed others, and is not blamed for a
        child that does not reach it or is slow. False if the child stays: `is_late` alone is no fault of the two while
        the source itself does not serve the version yet, since its own source may be slow."""
        probe = Deadline(deadline.awaited, min(_PROBE_SECONDS, deadline.left / 2))
        try:
            with ServerAdminClient(source, self._password) as control:
                served = call_processes(control, "served_weights", probe)
        except WeightSyncError as error:
            log.warning("%s is replaced as a source of weights: %s", source, error)
            self._plan.demote(source, self._server)
            return True
        if is_late and served != [[version]] * len(served):
            return False
        self._plan.refuse(source, self._server)
        return True

    def _receive_from(
        self,
        control: ServerAdminClient,
        source: str,
        version: int,
        processes: int,
        init_info: InitInfo,
        update: Deadline,
        attempt: Deadline,
    ) -> None:
        if self._link is None or self._link.source != source:
            store = self._connect(attempt.left)
            self._link = RelayLink.meet(control, source, self._password, processes, store, init_info, attempt)
        call_processes(control, "begin_update", attempt)
        self._plan.note_begun(self._server, version)
        self._link.transfer(version, update, attempt)


def _is_decided(signals: ProcessSignals, version: int) -> bool:
    return signals.is_reported(version) or bool(signals.find_loss())
