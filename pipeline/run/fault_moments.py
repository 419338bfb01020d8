"""The records of injected faults: those whose moment the trainer has reached, and those that have happened.

    attempts/<attempt>/moments/<fault>   written by the trainer at the moment of a fault that has not happened yet
    faults/<fault>.json                  created by the agent that injects the fault, before it does: so each fault
                                         happens once in a run; `done` once it has happened. A fault with a period
                                         has a record for each time

The trainer waits at a moment until its faults have happened, so they meet exactly this moment.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import msgspec

from pipeline.errors import DeadlineError
from pipeline.run.fault_plan import Fault
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.utils.shared_dir import FileSharedDir, SharedDir
from pipeline.utils.waiting import wait_for

log = logging.getLogger(__name__)

MOMENTS = "moments"
WAIT_SECONDS = 240.0
"""How long the trainer waits for the faults of a moment, for which a role that is restarting must be ready again."""
TRAINER = "trainer"


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

    def begin_next(self, fault: Fault, now: float) -> Fault:
        """Claim the next time of a fault that has a period, also over attempts; returns it."""
        for repetition in count(fault.repetition):
            strike = replace(fault, repetition=repetition)
            if not self.has_begun(strike) and self.begin(strike, now):
                return strike
        raise AssertionError("unreachable")

    def finish(self, fault: Fault, now: float) -> None:
        """Record that the fault has happened."""
        self._faults.replace(self._file(fault), self._record(fault, now, done=True))

    def reach(self, fault: Fault) -> None:
        """Record that the trainer of this attempt has reached the moment of the fault."""
        self._attempt.create(f"{MOMENTS}/{fault.mark}", fault.text)

    def has_reached(self, fault: Fault) -> bool:
        """Whether the trainer of this attempt has reached the moment of the fault."""
        return fault.mark in self._attempt.names(MOMENTS)

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

    def reach(self, moment: str, number: int | None = None) -> None:
        """Wait until the faults of this moment, that of step `number`, have happened: the trainer's own ones last."""
        faults = [fault for fault in self._faults if fault.is_of(moment, number)]
        self._wait_for([fault for fault in faults if fault.target != TRAINER])
        self._wait_for([fault for fault in faults if fault.target == TRAINER])

    def _wait_for(self, faults: Sequence[Fault]) -> None:
        """Wait for those that have not begun."""
        records = self._records
        due = [fault for fault in faults if records and not records.has_begun(fault)]
        if records is None or not due:
            return
        for fault in due:
            records.reach(fault)
        try:
            wait_for("faults to happen", lambda: self._keepalive() or all(map(records.is_done, due)), WAIT_SECONDS)
        except DeadlineError as late:
            log.warning("%s: %s", late, ", ".join(fault.text for fault in due if not records.is_done(fault)))
