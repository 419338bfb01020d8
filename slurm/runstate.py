"""Where a run is in its life.

Owns the states that people are shown, and how they follow from what an attempt left behind, what its job became, and
which ranks are silent. Pure: values in, words out.
"""

from typing import Literal, get_args

from pipeline.report.history import Attempt

Before = Literal["waiting", "queued", "left"]
Running = Literal["meeting", "starting", "training", "finishing", "stopping"]
Ended = Literal["interrupted", "failed", "finished"]
State = Before | Running | Ended
"""`queued`: a scheduler has the job and no attempt of it runs. `left`: the scheduler was ending or requeueing the job
when its attempt ended, and files do not tell which."""

ENDED: tuple[State, ...] = get_args(Ended)
"""What a run does not leave by itself."""

SILENT_SECONDS = 60.0
"""An agent shows every few seconds that it lives; after this long its node is lost, or its filesystem hangs."""


def state_of(
    attempt: Attempt | None, *, trains: bool, finished: bool, alive: bool | None = True, scheduled: bool = False
) -> State:
    """The state; the strongest sign decides, and an end counts over everything on the way.

    Args:
        attempt: the newest of the job; None before its first.
        trains: whether it has done a step.
        finished: whether the run is.
        alive: whether the job runs or may run again; None when only a scheduler could tell.
        scheduled: whether the job is a scheduler's, which may run it again: then the end of an attempt is the end of
            the job only if its outcome says so, or the scheduler.
    """
    if finished:
        return "finished"
    if scheduled:
        return _in_queue(attempt, trains, alive)
    if attempt is None:
        return "waiting"
    if attempt.has_failed:
        return "failed"
    if not alive or ("draining" in attempt.events and attempt.is_down and "training_finished" not in attempt.events):
        return "interrupted"
    return _under_way(attempt, trains)


def silent_ranks(attempt: Attempt, now: float) -> dict[int, float]:
    """Since when (seconds since the epoch) each rank is silent that should show that it lives."""
    if attempt.outcome:
        return {}
    return {rank: last for rank, last in attempt.alive.items() if now - last > SILENT_SECONDS}


def _in_queue(attempt: Attempt | None, trains: bool, alive: bool | None) -> State:
    decision = attempt.outcome.decision if attempt and attempt.outcome else ""
    if decision == "finished":
        return "finished"
    if decision == "stopped" or alive is False:
        return "failed" if attempt and attempt.has_failed else "interrupted"
    if attempt is None or decision == "requeued":
        return "queued"
    if decision == "left":
        return "queued" if alive else "left"
    return "stopping" if attempt.has_failed else _under_way(attempt, trains)


def _under_way(attempt: Attempt, trains: bool) -> State:
    if "training_finished" in attempt.events:
        return "finishing"
    if "draining" in attempt.events:
        return "stopping"
    if trains:
        return "training"
    return "starting" if attempt.transitions or attempt.world else "meeting"
