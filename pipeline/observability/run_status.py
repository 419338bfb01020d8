"""Where a run is in its life.

Owns the states that people are shown, and how they follow from what an attempt left behind, which job was submitted
last, what became of it, and which ranks are silent. Pure: values in, words out; the report and the terminal say the
same of the same files.
"""

from collections.abc import Sequence
from typing import Literal, get_args

from pipeline.observability.run_history import Attempt
from pipeline.run.metrics_log import MetricRecord
from pipeline.run.run_documents import SubmittedJob
from pipeline.transport.sample_records import ASKED

BeforeStart = Literal["waiting", "queued", "left"]
Running = Literal["meeting", "starting", "training", "evaluating", "finishing", "stopping"]
Ended = Literal["not submitted", "interrupted", "failed", "finished"]
State = BeforeStart | Running | Ended
"""`queued`: a scheduler has the job and no attempt of it runs. `left`: the scheduler was ending or requeueing the job
when its attempt ended, and files do not tell which. `not submitted`: the run was made, but no job of it."""

ENDED: tuple[State, ...] = get_args(Ended)
"""What a run does not leave by itself."""

SILENT_SECONDS = 60.0
"""An agent shows every few seconds that it lives; after this long its node is lost, or its filesystem hangs."""


def current_state(newest: Attempt | None, job: SubmittedJob | None) -> Attempt | None:
    """The newest attempt, unless a job was submitted since that has had none yet."""
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
    """The state; the strongest sign decides, and an end counts over everything on the way.

    Args:
        attempt: the `current_state` one.
        job: that was submitted last. A scheduler may run its job again: the end of an attempt is the end of the job
            only if its outcome says so, or the scheduler.
        rows: of the run's metrics.
        finished: whether the run is.
        alive: whether the job runs or may run again; None when that was not asked, or only a scheduler could tell.
    """
    if finished:
        return "finished"
    if job is not None and job.kind == "slurm":
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
    """Since when (seconds since the epoch) each rank is silent that should show that it lives."""
    if attempt.outcome:
        return {}
    return {rank: last for rank, last in attempt.alive.items() if now - last > SILENT_SECONDS}


def reason_of(attempt: Attempt | None) -> str:
    """Why an attempt failed or its job stopped, in one line; empty if it did neither."""
    if attempt is None:
        return ""
    if attempt.failure:
        return attempt.failure.one_line()
    return attempt.outcome.reason if attempt.outcome and attempt.outcome.decision == "stopped" else ""


def training_rows(attempt: Attempt | None, rows: Sequence[MetricRecord]) -> list[MetricRecord]:
    """The steps that this attempt did."""
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
    """Whether it has servers and no trainer, and all its roles are ready; or its trainer waits for the first
    evaluation."""
    if any(status.state == "ready" and ASKED in status.numbers for status in attempt.statuses.values()):
        return True
    roles = {place.role for place in attempt.world.placements} if attempt.world else set()
    ready = [attempt.states.get(place.name) for place in attempt.world.placements] if attempt.world else []
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
