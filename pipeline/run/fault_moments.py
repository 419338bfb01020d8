"""The records of injected faults: the moments that the trainer has reached, and the faults that have happened.

    attempts/<attempt>/moments/<moment>   written by the trainer at the moment of a fault that has not happened yet
    faults/<fault>.json                   created by the agent that injects the fault, before it does: so each fault
                                          happens once in a run; `done` once it has happened

The trainer waits at a moment until its faults have happened, so they meet exactly this moment.
"""

import logging
from collections.abc import Callable, Sequence

import msgspec

from pipeline.errors import DeadlineError
from pipeline.run.fault_plan import Fault
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.utils.shared_dir import FileSharedDir, SharedDir
from pipeline.utils.waiting import wait_for

log = logging.getLogger(__name__)

MOMENTS = "moments"
WAIT_SECONDS = 60.0
"""How long the trainer waits for the faults of a moment."""


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that happens, or with `done` has happened, in an attempt, at a time (Unix seconds)."""

    fault: str
    attempt: str
    time: float
    done: bool = False


class FaultRecords:
    """The records of the faults of a run, as one attempt reads and writes them."""

    def __init__(self, paths: AttemptPaths) -> None:
        self._attempt, self._name = FileSharedDir(paths.root), paths.attempt
        self._faults: SharedDir = FileSharedDir(RunPaths(paths.run).faults)

    def has_begun(self, fault: Fault) -> bool:
        """Whether the fault happens or has happened, in any attempt."""
        return self._file(fault) in self._faults.names()

    def is_done(self, fault: Fault) -> bool:
        """Whether the fault has happened."""
        record = self._faults.read(self._file(fault), FaultRecord)
        return record is not None and record.done

    def begin(self, fault: Fault, now: float) -> bool:
        """Claim the fault; False if it was claimed before."""
        return self._faults.create(self._file(fault), self._record(fault, now))

    def finish(self, fault: Fault, now: float) -> None:
        """Record that the fault has happened."""
        self._faults.replace(self._file(fault), self._record(fault, now, done=True))

    def reach(self, moment: str) -> None:
        """Record that the trainer of this attempt has reached a moment."""
        self._attempt.create(f"{MOMENTS}/{moment}", moment)

    def has_reached(self, moment: str) -> bool:
        """Whether the trainer of this attempt has reached a moment."""
        return moment in self._attempt.names(MOMENTS)

    def _file(self, fault: Fault) -> str:
        return f"{fault.mark}.json"

    def _record(self, fault: Fault, now: float, done: bool = False) -> FaultRecord:
        return FaultRecord(fault=fault.text, attempt=self._name, time=now, done=done)


class FaultMoments:
    """The trainer's side: call `reach` at each moment; without faults it does nothing."""

    def __init__(self, paths: AttemptPaths, faults: Sequence[Fault], keepalive: Callable[[], bool]) -> None:
        """`keepalive` is called while the trainer waits, and returns whether the attempt is ending."""
        self._faults, self._keepalive = faults, keepalive
        self._records = FaultRecords(paths) if faults else None

    def reach(self, moment: str) -> None:
        """Wait until the faults of this moment that have not begun yet have happened."""
        due = [fault for fault in self._faults if fault.moment == moment]
        if self._records is None or not due:
            return
        records, due = self._records, [fault for fault in due if not self._records.has_begun(fault)]
        if not due:
            return
        records.reach(moment)
        try:
            wait_for(
                f"the faults at {moment}", lambda: self._keepalive() or all(map(records.is_done, due)), WAIT_SECONDS
            )
        except DeadlineError as late:
            log.warning("%s: %s", late, ", ".join(fault.text for fault in due if not records.is_done(fault)))
