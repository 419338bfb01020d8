"""Reads the records from which `pipeline.run.lost_seconds` computes: timelines, events, node records, and metrics.

A restore moves the rows of the steps that it drops from `metrics.jsonl` to `attempts/<attempt>/dropped/`, so that every
step that was ever trained is on record. Missing or damaged files never raise.
"""

import re
from pathlib import Path

import msgspec

from pipeline.run.events import Events
from pipeline.run.lost_seconds import AttemptTimes, Goodput, StepTime, goodput
from pipeline.run.metrics_log import MetricRecord, read_rows
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.run.run_documents import RunIdentity
from pipeline.run.transitions import read_transitions
from pipeline.utils import shared_files


class AgentStart(msgspec.Struct, frozen=True, kw_only=True):
    """The times in a node record: when the agent's process began, and when the record was published (Unix seconds)."""

    process_began: float = 0.0
    published: float = 0.0


def read_goodput(root: Path, until: float = 0.0, ranks: int | None = None) -> Goodput | None:
    """The goodput of the run in `root` up to `until`, or to its last record; None before its first attempt.

    `ranks` bounds the files that are read of each attempt: faults and servers of later ranks are then left out.
    """
    run = RunPaths(root)
    attempts = [times for paths in _attempts(run) if (times := read_attempt_times(paths, ranks)) is not None]
    return goodput(sorted(attempts, key=lambda attempt: attempt.began), read_steps(run), until)


def read_steps(run: RunPaths) -> list[StepTime]:
    """All steps that the attempts trained, in no order."""
    dropped = [row for file in run.attempts.glob("*/dropped/*.jsonl") for row in read_rows(file)]
    return [_step_time(row) for row in read_rows(run.metrics) if row["kind"] == "train"] + [
        _step_time(row, dropped=True) for row in dropped if row["kind"] == "train"
    ]


def read_attempt_times(paths: AttemptPaths, ranks: int | None = None) -> AttemptTimes | None:
    """The times of one attempt, from the timelines of its first `ranks` ranks; None if it has left no record of one."""
    transitions, agent = read_transitions(paths, ranks), _first_agent(paths)
    began = agent.process_began or (transitions[0].time if transitions else 0.0)
    if not began:
        return None
    events = Events(paths).read_all()
    stops = [(event.time, f"{name}: {event.why}") for name, event in events.items() if name != "training_finished"]
    return AttemptTimes(paths.attempt, began, agent.published or None, transitions, tuple(stops))


def _attempts(run: RunPaths) -> list[AttemptPaths]:
    identity = shared_files.read_document(run.run, RunIdentity)
    run_id = identity.run_id if identity else "unknown"
    return [run.attempt(run_id, folder.name) for folder in run.attempts.glob("*") if folder.is_dir()]


def _first_agent(paths: AttemptPaths) -> AgentStart:
    """The times in the node record of the lowest rank that has one. One file suffices for any number of ranks."""
    files = (paths.rendezvous / "nodes").glob("*.json")
    ranks = sorted(int(file.stem) for file in files if re.fullmatch(r"\d+", file.stem))
    start = shared_files.read_document(paths.rendezvous / "nodes" / f"{ranks[0]}.json", AgentStart) if ranks else None
    return start or AgentStart()


def _step_time(row: MetricRecord, *, dropped: bool = False) -> StepTime:
    return StepTime(
        time=row["time"],
        job=row["job"],
        attempt=str(row.get("attempt", "")),
        dropped=dropped,
        seconds=row.get("seconds/step") or 0.0,
        data=row.get("seconds/data") or 0.0,
        begin=row.get("start/begin_seconds"),
        restore=row.get("start/restore_seconds"),
    )
