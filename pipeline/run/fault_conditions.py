"""The conditions that `faults=` injects into the processes of an attempt: a full or slow disk, names that appear late,
a node that is cut off from the network.

Each process of the attempt calls `apply_file_faults` once, before it waits for files of other nodes. A condition begins
when an agent creates `attempts/<attempt>/conditions/<fault>`; so it never reaches the next attempt. Late names need no
beginning: they are a property of the file system, in every attempt.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.run.fault_plan import DISK_TARGETS, NAMES, NODE, Fault
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.utils.disk_faults import FileOperation, Rule, full_disk, inject, slow_disk
from pipeline.utils.late_names import MARK, LateNames, hide
from pipeline.utils.packet_loss import lose_new_connections


def apply_file_faults(paths: AttemptPaths, faults: Iterable[Fault], rank: int) -> None:
    """Make this process, of the node `rank`, meet the faults of the run's files. Without such a fault, nothing changes.

    A fault of the disk is met once it has begun. `ConfigError`: the file system cannot have late names.
    """
    for fault in faults:
        if fault.target in DISK_TARGETS:
            inject(_without_records(paths, _disk_rule(paths, fault)))
        elif fault.target == NAMES:
            _make_names_late(paths, fault, rank)


def lose_connects(paths: AttemptPaths, faults: Iterable[Fault], rank: int, nodes: Mapping[str, int]) -> None:
    """Let the packets of new connections of this process be lost, while these would cross a partition.

    `nodes` has the rank of each address of the attempt. Connections that exist when a partition begins are cut by the
    agents (`slurm.agent.node_partition`).
    """
    for fault in faults:
        if fault.target == NODE:
            lose_new_connections(_is_lost(paths, fault, rank, nodes))


def begin_condition(paths: AttemptPaths, fault: Fault) -> None:
    """Begin a condition in all processes of the attempt."""
    path = _condition(paths, fault)
    path.parent.mkdir(exist_ok=True)
    path.touch()


def condition_holds(paths: AttemptPaths, fault: Fault) -> bool:
    """Whether the condition has begun and not ended yet: it ends `fault.amount` seconds later, if that is set."""
    return _holds_for(_condition(paths, fault), fault.amount or math.inf)


def crosses(rank: int, other: int | None, cut_off: int) -> bool:
    """Whether packets between two ranks would leave or reach the rank that is cut off; an unknown rank is no node."""
    return other is not None and rank != other and cut_off in (rank, other)


def _condition(paths: AttemptPaths, fault: Fault) -> Path:
    return paths.conditions / fault.mark


def _disk_rule(paths: AttemptPaths, fault: Fault) -> Rule:
    if fault.kind == "slow":
        return slow_disk(paths.run, fault.amount or 0.0, lambda: _holds_for(_condition(paths, fault), math.inf))
    return full_disk(paths.run, lambda: condition_holds(paths, fault))


def _holds_for(condition: Path, seconds: float) -> bool:
    """Whether the condition began less than `seconds` ago."""
    try:
        return time.time() - os.stat(condition).st_mtime < seconds
    except OSError:
        return False


def _without_records(paths: AttemptPaths, rule: Rule) -> Rule:
    """The rule, except for the records of the faults themselves: those must be written whatever the disk does."""
    records = (paths.conditions, RunPaths(paths.run).faults)

    def apply(operation: FileOperation) -> None:
        if not any(operation.path.is_relative_to(folder) for folder in records):
            rule(operation)

    return apply


def _make_names_late(paths: AttemptPaths, fault: Fault, rank: int) -> None:
    try:
        os.setxattr(paths.root, MARK, b"")
    except OSError as error:
        expected = f"a file system with extended attributes (user.*) at {paths.run}, which has none: {error.strerror}"
        raise ConfigError("faults", fault.text, expected, "remove it") from None
    late = LateNames((paths.rendezvous, paths.events, paths.marks, paths.statuses), rank, fault.amount or 0.0)
    inject(late.rule)
    hide(late.is_hidden)


def _is_lost(paths: AttemptPaths, fault: Fault, rank: int, nodes: Mapping[str, int]) -> Callable[[str], bool]:
    return lambda address: crosses(rank, nodes.get(address), fault.index) and condition_holds(paths, fault)
