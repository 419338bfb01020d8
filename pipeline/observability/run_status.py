"""The state of a run, as the report and the terminal show it.

The state follows from the records of the newest attempt, the last submitted job, its outcome, and missing heartbeats.
Pure: values in, words out.
"""

from collections.abc import Sequence
from typing import Literal, get_args

from pipeline.observability.run_history import Attempt
from pipeline.run.metrics_log import MetricRecord
from pipeline.run.run_documents import SubmittedJob
from pipeline.transport.eval_records import ASKED

BeforeStart = Literal["waiting", "queued", "left"]
Running = Literal["meeting", "starting", "training", "evaluating", "finishing", "stopping"]
Ended = Literal["not submitted", "interrupted", "failed", "finished"]
State = BeforeStart | Running | Ended
"""`queued`: a scheduler has the job, and no attempt of it runs. `left`: the scheduler was ending or requeueing the job
when its attempt ended, and the files do not show which. `not submitted`: the run directory exists, but no job."""

ENDED: tuple[State, ...] = get_args(Ended)
"""The final states, which a run leaves only by another command."""

SILENT_SECONDS = 60.0
"""Maximum age of an agent's heartbeat, which it writes every few seconds. After this time its node is lost, or its
filesystem hangs."""


def current_state(newest: Attempt | None, job: SubmittedJob | None) -> Attempt | None:
    """The newest attempt, or None if a later submitted job has no attempt yet."""
    if newest is None or job is None:
        return newest
    return newest if newest.name.rpartition("-")[0] == job.job else None


def state_of(
    attempt: Attempt | None,
    job: SubmittedJob | None,
    rows: Sequence[MetricRecord],
    *,
    finished: bool,
    alive: bool | None,
) -> State:
    """The state of a run. Evidence of an end has priority over evidence of progress.

    Args:
        attempt: the result of `current_state`.
        job: the last submitted job. A scheduler may run its job again, so the end of an attempt is the end of the job
            only according to its outcome or the scheduler.
        rows: the run's metric rows.
        finished: whether the run has finished.
        alive: whether the job runs or may run again; None if it was not queried, or only a scheduler could answer.
    """
    if finished:
        return "finished"
    if job is not None and job.queued:
        return _in_queue(attempt, rows, alive)
    if attempt is None:
        return _unattempted(job, alive)
    if attempt.has_failed:
        return "failed"
    drained = "draining" in attempt.events and "training_finished" not in attempt.events
    if alive is False or (attempt.is_down and (drained or alive is None)):
        return "interrupted"
    return _under_way(attempt, rows)


def silent_ranks(attempt: Attempt, now: float) -> dict[int, float]:
    """The ranks whose heartbeat is overdue, with the time of their last one (seconds since the epoch)."""
    if attempt.outcome:
        return {}
    return {rank: last for rank, last in attempt.alive.items() if now - last > SILENT_SECONDS}


def reason_of(attempt: Attempt | None) -> str:
    """The reason why an attempt failed or its job stopped, in one line; empty if neither happened."""
    if attempt is None:
        return ""
    if attempt.failure:
        return attempt.failure.one_line()
    return attempt.outcome.reason if attempt.outcome and attempt.outcome.decision == "stopped" else ""


def training_rows(attempt: Attempt | None, rows: Sequence[MetricRecord]) -> list[MetricRecord]:
    """The metric rows of the steps that this attempt trained."""
    return [row for row in rows if row["kind"] == "train" and attempt and row.get("attempt") == attempt.name]


def _unattempted(job: SubmittedJob | None, alive: bool | None) -> State:
    if job is None:
        return "waiting" if alive else "not submitted"
    return "interrupted" if alive is False else "waiting"


def _in_queue(attempt: Attempt | None, rows: Sequence[MetricRecord], alive: bool | None) -> State:
    decision = attempt.outcome.decision if attempt and attempt.outcome else ""
    if decision in ("finished", "stopped"):
        return "finished" if decision == "finished" else "failed"
    if alive is False:
        return "failed" if attempt and attempt.has_failed else "interrupted"
    if attempt is None or decision == "requeued":
        return "queued"
    if decision == "left":
        return "queued" if alive else "left"
    return "stopping" if attempt.has_failed else _under_way(attempt, rows)


def _evaluates(attempt: Attempt) -> bool:
    """Whether it evaluates: its trainer waits for an evaluation, or it has no trainer and all roles are ready."""
    if any(status.state == "ready" and ASKED in status.numbers for status in attempt.statuses.values()):
        return True
    placements = attempt.world.placements if attempt.world else ()
    roles = {placement.role for placement in placements}
    ready = [attempt.states.get(placement.name) for placement in placements]
    return "trainer" not in roles and bool(ready) and all(last is not None and last.state == "ready" for last in ready)


def _under_way(attempt: Attempt, rows: Sequence[MetricRecord]) -> State:
    if "training_finished" in attempt.events:
        return "finishing"
    if "draining" in attempt.events:
        return "stopping"
    if training_rows(attempt, rows):
        return "training"
    if _evaluates(attempt):
        return "evaluating"
    return "starting" if attempt.transitions or attempt.world else "meeting"
