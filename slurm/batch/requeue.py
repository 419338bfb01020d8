"""What becomes of the job once an attempt is over: the one owner of the requeue.

Owns the decision and the act. The batch script runs this after its srun; nothing else of Rollcall asks the scheduler to
run a job again. Promises that a run which finished is never queued again, that an attempt is followed by at most one
requeue, and that a run which fails over and over without a commit stops. Must not know what a role does: it reads what
agents and trainer left in the run directory, and what the scheduler says of the job.

    python -P -m slurm.batch.requeue RUN_DIRECTORY EXIT_CODE_OF_SRUN
"""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pipeline.config.cluster_keys import ClusterConfig
from pipeline.config.frozen_config import read_frozen_config
from pipeline.errors import CheckpointError, DeadlineError, RollcallError, SchedulerError, one_line
from pipeline.observability.run_history import read_history
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.run.run_documents import Outcome
from pipeline.topology.plan import make_plan
from pipeline.utils import shared_files
from pipeline.utils.waiting import CLOCK, Clock, wait_for
from slurm.batch.attempt_summary import AttemptSummary, summarize_attempt
from slurm.registry import run_registry
from slurm.scheduler.scheduler_protocol import RUNNING, QueuedJob, Scheduler
from slurm.scheduler.slurm.slurm_commands import SlurmCommands
from slurm.scheduler.slurm.slurm_environment import batch_attempt

T = TypeVar("T")

ANSWER_SECONDS = 1800.0
"""For how long a scheduler that is silent or refuses, or a disk that fails, is asked again: its controller or server
may be under maintenance. The job's own time limit bounds it anyway."""
OUTCOME_SECONDS = 15.0
"""How long to retry writing the outcome: the requeue comes after it, and must come before any KILL."""
PAUSE, LONGEST_PAUSE = 1.0, 10.0

OWNED = frozenset({RUNNING, "CONFIGURING", "RESIZING", "SIGNALING"})
"""States of a job that nobody is ending; whoever asks runs in it."""
OUT_OF_TIME = "TimeLimit"
"""The scheduler's reason when it ends a job at its time limit."""


def decide(facts: AttemptSummary, job: QueuedJob | None, cluster: ClusterConfig, now: float) -> Outcome:
    """What becomes of `job`, as the scheduler sees it now (None: not any more). Pure; `now` is seconds since the epoch.

    Whose the job is comes first: when the scheduler ends it, or has queued it again, what happened in the attempt has
    no say. An attempt counts as a failure if it committed no new steps and failed, or ran out of the job's own time,
    which would not suffice the next time either. A preemption is neither: it counts for `max_restarts` and nothing
    else. A rank that is lost may be its node's fault, and an attempt that was told to end may have failed for that, so
    these get `max_failures` tries, as does any failure of a run that has a commit. Whatever else fails before the first
    commit would fail again.
    """
    failures = 0 if facts.advanced else facts.failures
    if facts.finished:
        return Outcome(decision="finished", reason="the run is finished", time=now)
    if elsewhere := ownership_problem(job, facts.restart):
        return Outcome(decision="left", reason=elsewhere, failures=failures, time=now)
    trouble = facts.trouble
    failed = not facts.advanced and (bool(trouble) or is_out_of_time(facts, job))
    failures += failed

    def outcome(again: bool, why: str) -> Outcome:
        reason = f"{trouble or facts.stop_reason}: {why}"
        return Outcome(decision="requeued" if again else "stopped", reason=reason, failures=failures, time=now)

    if facts.exhausted:
        return outcome(False, "no job is left that another attempt could do")
    if facts.restart >= cluster.max_restarts:
        return outcome(False, f"the job was requeued cluster.max_restarts={cluster.max_restarts} times already")
    if not trouble and not failed:
        return outcome(True, "it goes on from its newest commit")
    if facts.advanced:
        return outcome(True, "the attempt had committed new steps, the next goes on from them")
    if failures >= cluster.max_failures:
        why = "failed or ran out of time without a new commit"
        return outcome(False, f"{failures} attempts in a row {why} (cluster.max_failures)")
    if facts.lost or facts.stop_reason or facts.trained:
        return outcome(True, f"try {failures} without a new commit, {cluster.max_failures} end the job")
    return outcome(False, "it failed before the first commit, so another attempt would fail the same way")


def is_out_of_time(facts: AttemptSummary, job: QueuedJob | None) -> bool:
    """Whether the attempt ended for the job's own time limit, by its notice or by the limit itself."""
    if job is None:
        return False
    return job.reason == OUT_OF_TIME or (facts.notice and not job.preempt_pending)


def ownership_problem(job: QueuedJob | None, restart: int) -> str:
    """Why the job is not ours to requeue; empty if it is.

    It is, too, when the scheduler ends it for good at its time limit or to make room for another: that end is not the
    user's, and the scheduler queues the job again when it is asked meanwhile.
    """
    if job is None:
        return "the scheduler does not know the job any more"
    if job.restarts != restart:
        return f"the scheduler has queued the job again (restart {job.restarts})"
    if job.state in OWNED or job.reason == OUT_OF_TIME or job.preempted:
        return ""
    return f"the scheduler is ending the job ({job.state})"


def conclude_attempt(
    run: RunPaths, scheduler: Scheduler, job: str, restart: int, code: int, clock: Clock = CLOCK
) -> Outcome:
    """Decide what becomes of the job after its attempt, write it down and do it; the outcome as it turned out.

    The outcome is on disk before the scheduler is told, since that may end this process. A finished run needs no word
    of the scheduler. Raises `RollcallError` if the run directory cannot be read.
    """

    def kept(outcome: Outcome) -> Outcome:
        _write_outcome(paths, outcome, clock)
        return outcome

    def look() -> tuple[ClusterConfig, AttemptPaths, AttemptSummary]:
        return _look(run, job, restart, code, clock)

    cluster, paths, facts = _ask_until("the run directory to be readable", look, clock)
    if facts.finished:
        return kept(decide(facts, None, cluster, time.time()))
    try:
        (seen,) = _ask_until("the scheduler to describe the job", lambda: (scheduler.job(job),), clock)
        if facts.is_inconclusive and seen is not None and seen.state in OWNED:
            facts = _wait_until_consistent(look, cluster.lateness, clock)
        outcome = kept(decide(facts, seen, cluster, time.time()))
        if outcome.decision == "requeued":
            now = requeue_job(scheduler, job, restart, clock)
            if now != REQUEUED:
                return kept(Outcome(decision="left", reason=now, failures=outcome.failures, time=time.time()))
    except DeadlineError as error:
        return kept(Outcome(decision="stopped", reason=f"the job could not be requeued: {error}", time=time.time()))
    return outcome


def _wait_until_consistent(
    look: Callable[[], tuple[ClusterConfig, AttemptPaths, AttemptSummary]], late: float, clock: Clock
) -> AttemptSummary:
    """The facts once they leave no doubt, or are as late as they can be."""
    facts: AttemptSummary | None = None

    def clear() -> bool:
        nonlocal facts
        *_, facts = look()
        return not facts.is_inconclusive

    with suppress(DeadlineError):
        _ask_until("the agents' last words", lambda: clear() or None, clock, late)
    return facts or look()[2]


def _look(
    run: RunPaths, job: str, restart: int, code: int, clock: Clock
) -> tuple[ClusterConfig, AttemptPaths, AttemptSummary]:
    """By which limits the attempt is judged, its files, and what they say of it."""
    config = read_frozen_config(run)
    if config is None:
        raise RollcallError(f"{run.config} cannot be read")
    paths = run.attempt(run_registry.identity(run).run_id, f"{job}-{restart}")
    facts = summarize_attempt(run, paths, restart, make_plan(config).ranks, code, config.cluster.lateness, clock)
    return config.cluster, paths, facts


def _write_outcome(paths: AttemptPaths, outcome: Outcome, clock: Clock) -> None:
    """Write the outcome down. A disk that takes no file does not change it: then the job's log alone has it."""

    def written() -> bool:
        shared_files.write_document(paths.outcome, outcome)
        return True

    try:
        _ask_until("the outcome to be written", written, clock, OUTCOME_SECONDS)
    except DeadlineError as error:
        print(f"rollcall: {paths.outcome} is not there: {error}", flush=True)


REQUEUED = "requeued"


def requeue_job(scheduler: Scheduler, job: str, restart: int, clock: Clock = CLOCK) -> str:
    """Requeue the job if it is ours: `REQUEUED`, or who has it. `DeadlineError` if the scheduler does neither."""
    return _ask_until("the scheduler to requeue the job", lambda: _requeue(scheduler, job, restart), clock)


def _requeue(scheduler: Scheduler, job: str, restart: int) -> str | None:
    """Requeue the job if it is ours; `REQUEUED` once it is queued again, who has it if it is not, else None.

    It looks before it asks, so that a request whose answer was lost is not made twice, and a job that was cancelled
    meanwhile stays cancelled.
    """
    seen = scheduler.job(job)
    if not ownership_problem(seen, restart):
        scheduler.requeue(job)
        seen = scheduler.job(job)
    queued_again = seen is not None and seen.restarts > restart
    return REQUEUED if queued_again else ownership_problem(seen, restart) or None


def _ask_until(awaited: str, ask: Callable[[], T | None], clock: Clock, seconds: float = ANSWER_SECONDS) -> T:
    """What the scheduler or the disk answers; asks again while it fails; `DeadlineError` with what it said last."""
    said = ""

    def probe() -> T | None:
        nonlocal said
        try:
            return ask()
        except (SchedulerError, CheckpointError, OSError) as error:
            said = str(error)
            return None

    return wait_for(
        awaited, probe, seconds, missing=lambda: said, pause=PAUSE, longest_pause=LONGEST_PAUSE, clock=clock
    )


def main(arguments: Sequence[str]) -> int:
    """The exit code of the job: 0 only if the run is finished, so that no other end looks COMPLETED."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # meant for the agents, which are gone
        signal.signal(number, signal.SIG_IGN)
    run, code = RunPaths(Path(arguments[0])), int(arguments[1])
    job, restart = batch_attempt()
    try:
        (owner,) = _ask_until("the run's job to be readable", lambda: (run_registry.owns(run, job),), CLOCK)
        if not owner:
            print(f"rollcall: {run.root} belongs to another job by now, so job {job} ends here", flush=True)
            return 1
        outcome = conclude_attempt(run, SlurmCommands(), job, restart, code)
    except RollcallError as error:
        print(f"rollcall: job {job} ends here, since nothing could be decided: {error}", flush=True)
        return error.exit_code
    print(f"rollcall: attempt {job}-{restart}: {outcome.decision}: {outcome.reason}", flush=True)
    if outcome.decision in ("finished", "stopped"):
        _report(run)
    return 0 if outcome.decision == "finished" else 1


def _report(run: RunPaths) -> None:
    try:
        from pipeline.observability.report_page import (
            write_report,  # charts are slow to import, and most ends of a job draw none
        )

        write_report(read_history(run.root))
    except Exception as error:  # noqa: BLE001 (the job's end stands, whatever the report does)
        print(f"rollcall: no report: {one_line(error)}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
