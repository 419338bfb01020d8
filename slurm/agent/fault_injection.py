"""Injection of the faults that a user planned (`pipeline.run.fault_plan`), by the agent of the role that they hit.

Owns when a fault of this rank is due, and what it does to processes or files. Promises that each fault happens once in
a run: it is claimed on disk first. A fault waits until its role is ready; at the moment `start`, until it is starting.

    injector = FaultInjector(paths, faults, roles, clock)
    for role, fault in injector.inject(): …      # in each round of the supervisor
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from pipeline.checkpoints import newest_checkpoint, recorded_root
from pipeline.run.fault_moments import FaultRecords
from pipeline.run.fault_plan import CHECKPOINT, Fault
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.utils.waiting import Clock
from slurm.agent.role_process import SupervisedRole

EXIT_CODES = {"exit": 1, "early": 0}


class FaultInjector:
    """The faults of one rank in one attempt."""

    def __init__(
        self, paths: AttemptPaths, faults: Sequence[Fault], roles: Sequence[SupervisedRole], clock: Clock
    ) -> None:
        self._paths, self._records, self._clock, self._began = paths, FaultRecords(paths), clock, clock.now()
        placed = {(role.context.placement.role, role.context.placement.index): role for role in roles}
        owners = [
            (fault, placed.get(("trainer", 0) if fault.target == CHECKPOINT else (fault.target, fault.index)))  # type: ignore[arg-type]
            for fault in faults
        ]
        self._pending = [(fault, role) for fault, role in owners if role and not self._records.has_begun(fault)]

    def inject(self) -> Iterator[tuple[SupervisedRole, Fault]]:
        """Inject each fault that is due, and return it with its role."""
        for fault, role in tuple(self._pending):
            if not self._is_due(fault, role):
                continue
            self._pending.remove((fault, role))
            if self._records.begin(fault, time.time()):
                self._strike(fault, role)
                self._records.finish(fault, time.time())
                yield role, fault

    def _is_due(self, fault: Fault, role: SupervisedRole) -> bool:
        awaited = "starting" if fault.moment == "start" else "ready"
        if role.state != awaited or role.child is None or role.child.poll() is not None:
            return False
        if fault.moment == "start":
            return True
        if fault.seconds is not None:
            return self._clock.now() - self._began >= fault.seconds
        return self._records.has_reached(fault.moment)

    def _strike(self, fault: Fault, role: SupervisedRole) -> None:
        match fault.kind:
            case "kill":
                _send_to_all(signal.SIGKILL, role.pid)
            case "stop":
                _send_to_all(signal.SIGSTOP, role.pid)
            case "torn":
                tear_newest_checkpoint(RunPaths(self._paths.run))
            case _:
                role.monitor.board.request_exit(EXIT_CODES[fault.kind])


def tear_newest_checkpoint(run: RunPaths) -> Path | None:
    """Cut the largest file of the newest complete checkpoint in half; None without a checkpoint on a file system."""
    checkpoint = newest_checkpoint(recorded_root(run))
    if checkpoint is None or not Path(checkpoint.location).is_dir():
        return None
    file = max(Path(checkpoint.location).rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else -1)
    os.truncate(file, file.stat().st_size // 2)
    return file


def _send_to_all(number: signal.Signals, leader: int) -> None:
    """Signal a process and its descendants, these first: they must not see their parent go and exit in order."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(leader)
        for member in [*reversed(process.children(recursive=True)), process]:
            with suppress(psutil.NoSuchProcess):
                member.send_signal(number)
