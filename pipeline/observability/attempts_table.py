"""The attempts of a run as a table: start, duration, trained steps, and end. Pure."""

from collections.abc import Sequence
from html import escape

from pipeline.observability.number_format import clock, moment
from pipeline.observability.run_history import Attempt, History
from pipeline.run.metrics_log import MetricRecord

HEADS = ("attempt", "began", "ran", "steps", "ended", "why")
Line = tuple[str, ...]


def attempt_lines(history: History) -> list[Line]:
    """One line per attempt, the oldest first, with the columns of `HEADS`. A dash stands for an unknown value.

    The steps are those in the metrics. A step that a later attempt trained again counts for the first one.
    """
    return [_line(attempt, history.rows) for attempt in history.attempts]


def attempt_table(history: History) -> str:
    """The table as HTML. Empty for a single attempt without an outcome, since the rest of the page describes it."""
    if not any(attempt.outcome for attempt in history.attempts) and len(history.attempts) < 2:
        return ""
    head = "".join(f"<th>{name}</th>" for name in HEADS)
    lines = attempt_lines(history)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<table class="attempts"><tr>{head}</tr>{rows}</table>'


def _line(attempt: Attempt, rows: Sequence[MetricRecord]) -> Line:
    span = attempt.span
    end, why = attempt.end
    return (
        attempt.name,
        moment(span[0], "%Y-%m-%d %H:%M:%S") if span else "—",
        clock(span[1] - span[0]) if span else "—",
        _steps([row for row in rows if row["kind"] == "train" and row.get("attempt") == attempt.name]),
        end or "—",
        why,
    )


def _steps(rows: Sequence[MetricRecord]) -> str:
    """The trained steps of each phase, such as `sft 1–20, rl 1–5`."""
    by_job: dict[str, list[int]] = {}
    for row in rows:
        by_job.setdefault(row["job"], []).append(row["step"])
    return ", ".join(f"{job} {min(steps)}–{max(steps)}" for job, steps in by_job.items()) or "—"
