"""The state of the disk that `faults=` injects into the processes of an attempt: full, or slow.

Each process of the attempt calls `apply_disk_faults` once, before it uses the run directory. The condition begins when
the agent of the trainer creates `attempts/<attempt>/conditions/<fault>`; so it never reaches the next attempt.
"""

import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pipeline.run.fault_plan import DISK_TARGETS, Fault
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.utils.disk_faults import FileOperation, Rule, full_disk, inject, slow_disk


def apply_disk_faults(paths: AttemptPaths, faults: Iterable[Fault]) -> None:
    """Make this process meet the disk faults of the run, once each has begun. Without such a fault, nothing changes."""
    for fault in faults:
        if fault.target in DISK_TARGETS:
            inject(_without_records(paths, _rule(paths, fault)))


def begin_condition(paths: AttemptPaths, fault: Fault) -> None:
    """Begin a fault of the disk in all processes of the attempt."""
    path = _condition(paths, fault)
    path.parent.mkdir(exist_ok=True)
    path.touch()


def _condition(paths: AttemptPaths, fault: Fault) -> Path:
    return paths.conditions / fault.mark


def _rule(paths: AttemptPaths, fault: Fault) -> Rule:
    if fault.kind == "slow":
        return slow_disk(paths.run, fault.amount or 0.0, _has_begun(_condition(paths, fault), math.inf))
    return full_disk(paths.run, _has_begun(_condition(paths, fault), fault.amount or math.inf))


def _has_begun(condition: Path, seconds: float) -> Callable[[], bool]:
    """Whether the condition holds now: it has begun, less than `seconds` ago."""

    def holds() -> bool:
        try:
            return time.time() - os.stat(condition).st_mtime < seconds
        except OSError:
            return False

    return holds


def _without_records(paths: AttemptPaths, rule: Rule) -> Rule:
    """The rule, except for the records of the faults themselves: those must be written whatever the disk does."""
    records = (paths.conditions, RunPaths(paths.run).faults)

    def apply(operation: FileOperation) -> None:
        if not any(operation.path.is_relative_to(folder) for folder in records):
            rule(operation)

    return apply
