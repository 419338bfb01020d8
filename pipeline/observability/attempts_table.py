"""The attempts of a run as a table: when each ran, what it trained, and how it ended.

Owns the words of the table; pure. Must not know files or charts.
"""

import time
from collections.abc import Sequence
from html import escape

from pipeline.observability.number_format import clock
from pipeline.observability.run_history import Attempt, History
from pipeline.run.metrics_log import MetricRecord

HEADS = ("attempt", "began", "ran", "steps", "ended", "why")
Line = tuple[str, ...]


def attempt_lines(history: History) -> list[Line]:
    """One line for each attempt, the oldest first, in the order of `HEADS`; a dash where nothing is known.

    The steps are those that were logged: one that was trained again after a resume counts for the attempt that did so
    first.
    """
    return [_line(attempt, history.rows) for attempt in history.attempts]


def attempt_table(history: History) -> str:
    """The table as HTML; empty for a run with one attempt that no outcome ended: the rest of the page tells of it."""
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
        time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(span[0])) if span else "—",
        clock(span[1] - span[0]) if span else "—",
        _steps([row for row in rows if row["kind"] == "train" and row.get("attempt") == attempt.name]),
        end or "—",
        why,
    )


def _steps(rows: Sequence[MetricRecord]) -> str:
    """`sft 1–20, rl 1–5`."""
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(row["job"], []).append(row["step"])
    return ", ".join(f"{job} {min(steps)}–{max(steps)}" for job, steps in found.items()) or "—"
