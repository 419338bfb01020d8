"""Injection of the faults that a user planned (`pipeline.run.fault_plan`), by the agent of the role that they hit.

Owns when a fault of this rank is due, and what it does to processes or files. Promises that each fault happens once in
a run, and one with a period once each time: it is claimed on disk first. A fault waits until its role is ready; at the
moment `start`, until it is starting. A process is hit by one fault only: the next fault of its role waits for the
process that replaces it.

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
from pipeline.run.fault_conditions import begin_condition
from pipeline.run.fault_moments import FaultRecords
from pipeline.run.fault_plan import NAMES, NODE, ROLES, Fault, parse_faults
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.utils.subprocesses import Child
from pipeline.utils.waiting import Clock, Deadline
from slurm.agent import os_processes
from slurm.agent.role_process import SupervisedRole

EXIT_CODES = {"exit": 1, "early": 0}
_REDIS = ("redis-server", "valkey-server")
_INT_SECONDS, _INT_PAUSE = 1.0, 0.002


class FaultInjector:
    """The faults of one rank in one attempt."""

    def __init__(
        self, paths: AttemptPaths, faults: Sequence[Fault], roles: Sequence[SupervisedRole], clock: Clock
    ) -> None:
        self._paths, self._records, self._clock, self._began = paths, FaultRecords(paths), clock, clock.now()
        owners = [(fault, _owner_of(fault, roles)) for fault in faults]
        self._pending = [
            (fault, role) for fault, role in owners if role and (fault.period or not self._records.has_begun(fault))
        ]
        self._due = {fault: self._began + fault.period for fault, _ in self._pending if fault.period}
        self._struck: list[Child] = []

    @classmethod
    def of_roles(cls, paths: AttemptPaths, roles: Sequence[SupervisedRole], clock: Clock) -> "FaultInjector | None":
        """The injector of the run's faults on these roles; None in a run without faults, or without roles."""
        faults = parse_faults(roles[0].context.config.faults) if roles else ()
        return cls(paths, faults, roles, clock) if faults else None

    def inject(self) -> Iterator[tuple[SupervisedRole, Fault]]:
        """Inject each fault that is due, and return it with its role."""
        for fault, role in tuple(self._pending):
            if not self._is_due(fault, role):
                continue
            if (strike := self._claim(fault, role)) is not None:
                self._strike(strike, role)
                self._records.finish(strike, time.time())
                yield role, strike

    def _claim(self, fault: Fault, role: SupervisedRole) -> Fault | None:
        """Claim the fault, or its next time; None if another agent of the run has injected it."""
        if fault.period:
            self._due[fault] = self._clock.now() + fault.period
            return self._records.begin_next(fault, time.time())
        self._pending.remove((fault, role))
        return fault if self._records.begin(fault, time.time()) else None

    def _is_due(self, fault: Fault, role: SupervisedRole) -> bool:
        awaited = "starting" if fault.moment == "start" else "ready"
        if role.state != awaited or role.child is None or role.child.poll() is not None or not role.pid:
            return False
        if role.child in self._struck:
            return False
        if fault.moment == "start":
            return True
        if fault.period:
            return self._clock.now() >= self._due[fault]
        if fault.seconds is not None:
            return self._clock.now() - self._began >= fault.seconds
        return self._records.has_reached(fault)

    def _strike(self, fault: Fault, role: SupervisedRole) -> None:
        match fault.kind:
            case "kill":
                _send_to_all(signal.SIGKILL, role.pid)
            case "stop":
                _send_to_all(signal.SIGSTOP, role.pid)
            case "torn":
                tear_newest_checkpoint(RunPaths(self._paths.run))
                return
            case "full" | "slow" | "partition":
                begin_condition(self._paths, fault)
                return
            case _:
                exit_with(role, EXIT_CODES[fault.kind])
        if role.child is not None:
            self._struck.append(role.child)


def _owner_of(fault: Fault, roles: Sequence[SupervisedRole]) -> SupervisedRole | None:
    """The role, of those of a rank, after whose state the fault is timed; None on other ranks, and for late names."""
    if fault.target == NODE:
        return next((role for role in roles if role.context.placement.rank == fault.index), None)
    if fault.target == NAMES:
        return None
    owner = (fault.target, fault.index) if fault.target in ROLES else ("trainer", 0)
    placements = ((role, role.context.placement) for role in roles)
    return next((role for role, placement in placements if (placement.role, placement.index) == owner), None)


def tear_newest_checkpoint(run: RunPaths) -> Path | None:
    """Cut the largest file of the newest complete checkpoint in half; None without a checkpoint on a file system."""
    checkpoint = newest_checkpoint(recorded_root(run))
    if checkpoint is None or not Path(checkpoint.location).is_dir():
        return None
    file = max(Path(checkpoint.location).rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else -1)
    os.truncate(file, file.stat().st_size // 2)
    return file


def exit_with(role: SupervisedRole, code: int) -> None:
    """Have a role exit with a code: Python processes at the next tick of their heartbeat.

    Redis exits with 0 after INT, and with 1 if it gets another INT before that.
    """
    if os_processes.name_of(role.pid) not in _REDIS:
        role.monitor.board.request_exit(code)
        return
    os.kill(role.pid, signal.SIGINT)
    deadline = Deadline("Redis to exit", _INT_SECONDS)
    # An INT that is still pending would absorb the next one, so several are sent.
    while code and not deadline.passed and os_processes.states_of(role.pid) - {"Z"}:
        time.sleep(_INT_PAUSE)
        os.kill(role.pid, signal.SIGINT)


def _send_to_all(number: signal.Signals, leader: int) -> None:
    """Signal a process and its descendants, these first: they must not see their parent go and exit in order."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(leader)
        for member in [*reversed(process.children(recursive=True)), process]:
            with suppress(psutil.NoSuchProcess):
                member.send_signal(number)
