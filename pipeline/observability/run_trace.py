"""The trace of a run: its spans, and the Chrome trace event format, which Perfetto reads.

Each attempt is a process, and each of its roles a track with the role's states. Further tracks have the trainer's steps
with their waits, the weight updates, and the evaluations. Faults, failures, events and notices are instants. Steps that
a restore dropped are included. Everything is computed from the records of the run directory.

Promises that two spans of a track are disjoint or nested. Times in the Chrome format are microseconds since the first
record.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pipeline.observability.run_history import Attempt, History
from pipeline.run.fault_plan import FAULT
from pipeline.run.metrics_log import MetricRecord, read_rows

TraceEvent = dict[str, Any]
Span = tuple[float, float, str, dict[str, Any]]
"""Start and end in seconds since the epoch, the name and the arguments."""
_MAX_MICROS = 2.0**63
"""A damaged record may have any time, and readers of traces have 64 bits for it."""
_ENDED = ("stopped", "failed")
Instant = tuple[float, str, str]
"""Seconds since the epoch, the name and the detail."""
_PARTS = (("wait for groups", "seconds/data"), ("train", "seconds/train"), ("hand over", "sync/handover_seconds"))
"""The parts of a step in their order, and the metric of each one's length."""


class AttemptTrace(NamedTuple):
    """What happened in an attempt. The spans of each track are in order of their starts."""

    attempt: Attempt
    tracks: dict[str, list[Span]]
    instants: list[Instant]


def attempt_traces(history: History) -> list[AttemptTrace]:
    """The traces of all attempts, the oldest first."""
    rows = _all_rows(history)
    return [
        AttemptTrace(
            attempt,
            _tracks(attempt, [row for row in rows if row.get("attempt") == attempt.name]),
            list(_instants(attempt)),
        )
        for attempt in history.attempts
    ]


def trace_events(history: History) -> list[TraceEvent]:
    """All events of the trace in the Chrome format; empty for a run without an attempt."""
    traces = attempt_traces(history)
    begins = [trace.attempt.span[0] for trace in traces if trace.attempt.span]
    begins += [spans[0][0] for trace in traces for spans in trace.tracks.values() if spans]
    origin = min(begins, default=0.0)
    return [event for number, trace in enumerate(traces, start=1) for event in _chrome_events(number, trace, origin)]


def _all_rows(history: History) -> list[MetricRecord]:
    rows = list(history.rows)
    for attempt in history.attempts:
        for file in sorted(attempt.paths.dropped(0).parent.glob("*.jsonl")):
            rows += [row | {"dropped": True} for row in read_rows(file)]
    return sorted(rows, key=lambda row: float(row["time"]))


def _tracks(attempt: Attempt, rows: list[MetricRecord]) -> dict[str, list[Span]]:
    tracks: dict[str, list[Span]] = {role: list(_states(attempt, role)) for role in attempt.states}
    tracks["steps"] = list(_steps(rows))
    tracks["weight updates"] = _disjoint(_ending(rows, "train", "sync/seconds", "weight update"))
    tracks["evaluations"] = _disjoint(_ending(rows, "eval", "eval/seconds", "evaluation"))
    return {name: spans for name, spans in tracks.items() if spans}


def _chrome_events(pid: int, trace: AttemptTrace, origin: float) -> Iterator[TraceEvent]:
    yield _metadata(pid, 0, "process_name", f"attempt {trace.attempt.name}")
    for tid, (name, spans) in enumerate(trace.tracks.items(), start=1):
        yield _metadata(pid, tid, "thread_name", name)
        for begin, end, label, arguments in spans:
            start = _micros(begin, origin)
            length = max(0, _micros(end, origin) - start)
            yield {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": length, "name": label, "args": arguments}
    yield _metadata(pid, 0, "thread_name", "events")
    for time, label, detail in trace.instants:
        at = max(0, _micros(time, origin))
        yield {"ph": "i", "s": "p", "pid": pid, "tid": 0, "ts": at, "name": label, "args": {"detail": detail}}


def _states(attempt: Attempt, role: str) -> Iterator[Span]:
    """The states of a role, each until the next one."""
    own = [transition for transition in attempt.transitions if transition.role == role and transition.state != FAULT]
    ends = [transition.time for transition in own[1:]] + [attempt.transitions[-1].time]
    for transition, end in zip(own, ends, strict=True):
        if transition.state not in _ENDED:
            yield transition.time, end, transition.state, {"rank": transition.rank, "detail": transition.detail}


def _steps(rows: Iterable[MetricRecord]) -> Iterator[Span]:
    """The steps and, inside each, its parts. A step begins no earlier than the previous one ended."""
    last = 0.0
    for row in rows:
        if row["kind"] != "train" or row.get("seconds/step") is None:
            continue
        begin, end = max(last, row["time"] - row["seconds/step"]), row["time"]
        dropped = " (dropped)" if row.get("dropped") else ""
        names = ("loss", "reward/mean", "staleness/max", "tokens_per_second")
        yield begin, end, f"{row['job']} step {row['step']}{dropped}", {key: row[key] for key in names if key in row}
        at = begin
        for label, metric in _PARTS:
            until = min(end, at + (row.get(metric) or 0.0))
            if until > at:
                yield at, until, label, {}
            at = until
        last = end


def _ending(rows: Iterable[MetricRecord], kind: str, metric: str, label: str) -> Iterator[Span]:
    """A span for each row of the kind, which ended with it and was as long as the metric."""
    for row in rows:
        if row["kind"] == kind and row.get(metric):
            named = f" {row['set']}" if "set" in row else ""
            yield row["time"] - row[metric], row["time"], f"{label}{named} {row['step']}", {}


def _disjoint(spans: Iterable[Span]) -> list[Span]:
    """The spans in order, each cut to begin no earlier than the previous one ends."""
    result: list[Span] = []
    for begin, end, label, arguments in sorted(spans, key=lambda span: span[1]):
        result.append((max(begin, result[-1][1]) if result else begin, end, label, arguments))
    return result


def _instants(attempt: Attempt) -> Iterator[Instant]:
    for transition in attempt.transitions:
        if transition.state in (FAULT, "failed"):
            yield transition.time, f"{transition.state}: {transition.role}", transition.detail
    for event in attempt.events.values():
        yield event.time, event.name, event.why
    for notice in attempt.notices:
        yield notice.time, f"notice of {notice.by}", notice.text
    if attempt.outcome:
        yield attempt.outcome.time, attempt.outcome.decision, attempt.outcome.reason


def _micros(time: float, origin: float) -> int:
    return round(max(-_MAX_MICROS, min((time - origin) * 1e6, _MAX_MICROS)))


def _metadata(pid: int, tid: int, kind: str, name: str) -> TraceEvent:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": kind, "args": {"name": name}}
