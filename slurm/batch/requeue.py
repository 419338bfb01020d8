"""The decision about a job after an attempt, and the requeue.

Owns the decision and its execution. The batch script runs this module after its agents, and no other part of Rollcall
requeues a job. Promises that a finished run is never queued again, that an attempt is followed by at most one requeue,
and that a run which repeatedly fails without a new checkpoint stops. Must not know the work of a role: it reads the
records of agents and trainer in the run directory, and the job's state at the scheduler.

    python -P -m slurm.batch.requeue RUN_DIRECTORY EXIT_CODE_OF_THE_AGENTS
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
from pipeline.observability.postmortem_archive import postmortem_of
from pipeline.observability.run_history import read_history
from pipeline.run.paths import AttachedPaths, AttemptPaths, RunPaths
from pipeline.run.run_documents import Outcome
from pipeline.topology.plan import make_plan
from pipeline.utils import shared_files
from pipeline.utils.waiting import CLOCK, Clock, wait_for
from slurm.batch.attempt_summary import AttemptSummary, summarize_attempt
from slurm.batch.container_failure import with_container_failure
from slurm.registry import attached_jobs, run_registry
from slurm.scheduler.scheduler_protocol import CALL_SECONDS, OUT_OF_TIME, OWNED, JobQueue, QueuedJob
from slurm.scheduler.scheduler_registry import batch_attempt

T = TypeVar("T")

ANSWER_SECONDS = 1800.0
"""Seconds of retries while the scheduler does not answer or refuses, or the disk fails, such as during maintenance. The
job's time limit bounds them anyway."""
OUTCOME_SECONDS = 15.0
"""Seconds of retries to write the outcome. The requeue follows it, and must precede the scheduler's KILL."""
PAUSE, LONGEST_PAUSE = 1.0, 10.0


def decide(facts: AttemptSummary, job: QueuedJob | None, cluster: ClusterConfig, now: float) -> Outcome:
    """Decide whether the job is requeued. Pure; `now` is seconds since the epoch.

    `job` is the scheduler's current state; None if the scheduler has dropped the job. Ownership comes first: if the
    scheduler is ending the job, or has queued it again, the attempt's records do not matter.

    An attempt counts as a failure if it saved no checkpoint and failed, or reached the job's time limit, which would
    not suffice the next time either. A preemption is no failure and counts for `max_restarts` only. Up to
    `max_failures` consecutive failures are retried if a rank was lost (possibly a bad node), if the attempt got a stop
    request, or if the run has a checkpoint. Any other failure before the first checkpoint counts as deterministic and
    stops the job.
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
        return outcome(False, "no job file is left that another attempt could execute")
    if facts.restart >= cluster.max_restarts:
        return outcome(False, f"the job was requeued cluster.max_restarts={cluster.max_restarts} times already")
    if not trouble and not failed:
        return outcome(True, "it resumes from its newest checkpoint")
    if facts.advanced:
        return outcome(True, "the attempt had saved a checkpoint, from which the next one resumes")
    if failures >= cluster.max_failures:
        why = "failed or ran out of time without a new checkpoint"
        return outcome(False, f"{failures} attempts in a row {why} (cluster.max_failures)")
    if facts.lost or facts.stop_reason or facts.trained:
        return outcome(True, f"try {failures} without a new checkpoint; {cluster.max_failures} such tries end the job")
    return outcome(False, "it failed before the first checkpoint, so another attempt would fail the same way")


def is_out_of_time(facts: AttemptSummary, job: QueuedJob | None) -> bool:
    """Whether the job's time limit ended the attempt, by its notice or by the limit itself."""
    if job is None:
        return False
    return job.reason == OUT_OF_TIME or (facts.notice and not job.preempt_pending)


def ownership_problem(job: QueuedJob | None, restart: int) -> str:
    """Why this process must not requeue the job; empty if it may.

    It may also requeue a job that the scheduler is ending at its time limit or for preemption: the user did not end it,
    and the scheduler accepts a requeue meanwhile.
    """
    if job is None:
        return "the scheduler has dropped the job"
    if job.restarts != restart:
        return f"the scheduler has queued the job again (restart {job.restarts})"
    if job.state in OWNED or job.reason == OUT_OF_TIME or job.preempted:
        return ""
    return f"the scheduler is ending the job ({job.state})"


def conclude_attempt(
    run: RunPaths, queue: JobQueue, job: str, restart: int, code: int, clock: Clock = CLOCK
) -> Outcome:
    """Decide about the job after its attempt, record the outcome and execute it. Returns the final outcome.

    The outcome is on disk before the requeue, which may end this process. A finished run needs no query to the
    scheduler. Raises `RollcallError` if the run directory cannot be read.
    """

    def recorded(outcome: Outcome) -> Outcome:
        _write_outcome(paths, outcome, clock)
        return outcome

    def look() -> tuple[ClusterConfig, AttemptPaths, AttemptSummary]:
        return _look(run, job, restart, code, clock)

    cluster, paths, facts = _ask_until("the run directory to be readable", look, clock)
    if facts.finished:
        return recorded(decide(facts, None, cluster, time.time()))
    try:
        (seen,) = _ask_until("the scheduler to describe the job", lambda: (queue.job(job),), clock)
        # This node may see the other nodes' files late (NFS). No wait while the scheduler ends the job: its kill could
        # come before the requeue.
        if facts.is_inconclusive and seen is not None and seen.state in OWNED:
            facts = _wait_until_consistent(look, cluster.lateness, clock)
        outcome = recorded(decide(facts, seen, cluster, time.time()))
        if outcome.decision == "requeued":
            now = requeue_job(queue, job, restart, clock)
            if now != REQUEUED:  # the job was cancelled or queued again meanwhile: correct the record
                return recorded(Outcome(decision="left", reason=now, failures=outcome.failures, time=time.time()))
    except DeadlineError as error:
        return recorded(Outcome(decision="stopped", reason=f"the job could not be requeued: {error}", time=time.time()))
    return outcome


def _wait_until_consistent(
    look: Callable[[], tuple[ClusterConfig, AttemptPaths, AttemptSummary]], late: float, clock: Clock
) -> AttemptSummary:
    """The attempt's records once they are conclusive, or after `late` seconds, when all of them are visible."""
    facts: AttemptSummary | None = None

    def clear() -> bool:
        nonlocal facts
        *_, facts = look()
        return not facts.is_inconclusive

    with suppress(DeadlineError):
        _ask_until("the agents' exit markers", lambda: clear() or None, clock, late)
    return facts or look()[2]


def _look(
    run: RunPaths, job: str, restart: int, code: int, clock: Clock
) -> tuple[ClusterConfig, AttemptPaths, AttemptSummary]:
    """The cluster settings of the run, the attempt's paths, and its records."""
    config = read_frozen_config(run)
    if config is None:
        raise RollcallError(f"{run.config} cannot be read")
    paths = run.attempt(run_registry.identity(run).run_id, f"{job}-{restart}")
    ranks = make_plan(config).ranks
    facts = summarize_attempt(run, paths, restart, ranks, code, config.cluster.lateness, clock)
    return config.cluster, paths, with_container_failure(facts, run, paths, config, ranks)


def _write_outcome(paths: AttemptPaths, outcome: Outcome, clock: Clock) -> None:
    """Write the outcome. If the disk refuses it, the outcome stands and only the job's log has it."""

    def written() -> bool:
        shared_files.write_document(paths.outcome, outcome)
        return True

    try:
        _ask_until("the outcome to be written", written, clock, OUTCOME_SECONDS)
    except DeadlineError as error:
        print(f"rollcall: {paths.outcome} could not be written: {error}", flush=True)


REQUEUED = "requeued"


def requeue_job(queue: JobQueue, job: str, restart: int, clock: Clock = CLOCK) -> str:
    """Requeue the job if this process may. Returns `REQUEUED`, or why not; `DeadlineError` without an answer."""
    return _ask_until("the scheduler to requeue the job", lambda: _requeue(queue, job, restart), clock)


def _requeue(queue: JobQueue, job: str, restart: int) -> str | None:
    """Requeue the job if this process may. Returns `REQUEUED` once it is queued again, why not, or None to retry.

    The state is read before the request, so that a request whose answer was lost is not repeated, and a job that was
    cancelled meanwhile stays cancelled.
    """
    seen = queue.job(job)
    if not ownership_problem(seen, restart):
        queue.requeue(job)
        seen = queue.job(job)
    # The restart count is the evidence: the answer to the request may be lost after the scheduler executed it.
    queued_again = seen is not None and seen.restarts > restart
    return REQUEUED if queued_again else ownership_problem(seen, restart) or None


def _ask_until(awaited: str, ask: Callable[[], T | None], clock: Clock, seconds: float = ANSWER_SECONDS) -> T:
    """The result of `ask`, which is retried while scheduler or disk fail; `DeadlineError` with the last error."""
    last_error = ""

    def probe() -> T | None:
        nonlocal last_error
        try:
            return ask()
        except (SchedulerError, CheckpointError, OSError) as error:
            last_error = str(error)
            return None

    return wait_for(
        awaited, probe, seconds, missing=lambda: last_error, pause=PAUSE, longest_pause=LONGEST_PAUSE, clock=clock
    )


def main(arguments: Sequence[str]) -> int:
    """Conclude the attempt. Returns the job's exit code: 0 only for a finished run, so no other end is COMPLETED."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # meant for the agents, which have exited
        signal.signal(number, signal.SIG_IGN)
    run, code = attached_jobs.paths_at(Path(arguments[0])), int(arguments[1])
    if isinstance(run, AttachedPaths):  # it joins an attempt whenever it runs: there is nothing to resume or decide
        return 1 if code else 0
    scheduler, job, restart = batch_attempt()
    try:
        (owner,) = _ask_until("the run's job to be readable", lambda: (run_registry.owns(run, job),), CLOCK)
        if not owner:
            print(f"rollcall: {run.root} belongs to another job now, so job {job} ends here", flush=True)
            return 1
        outcome = conclude_attempt(run, scheduler.queue(CALL_SECONDS), job, restart, code)
    except RollcallError as error:
        print(f"rollcall: job {job} ends here without a decision: {error}", flush=True)
        return error.exit_code
    print(f"rollcall: attempt {job}-{restart}: {outcome.decision}: {outcome.reason}", flush=True)
    if outcome.decision != "finished":
        _write_postmortem(run, job, restart)
    if outcome.decision in ("finished", "stopped"):
        _report(run)
    return 0 if outcome.decision == "finished" else 1


def _write_postmortem(run: RunPaths, job: str, restart: int) -> None:
    """Write the archive of a failed attempt, after the requeue: the scheduler may end this process meanwhile, and
    `launchers/postmortem.py` writes it later then."""
    paths = run.attempt(run_registry.identity(run).run_id, f"{job}-{restart}")
    if paths.first_failure.exists() and (archive := postmortem_of(paths)) is not None:
        print(f"rollcall: post-mortem: {archive}", flush=True)


def _report(run: RunPaths) -> None:
    try:
        from pipeline.observability.report_page import (
            write_report,  # charts are slow to import, and most outcomes need none
        )

        write_report(read_history(run.root))
    except Exception as error:  # noqa: BLE001 (the outcome stands, whatever the report raises)
        print(f"rollcall: no report: {one_line(error)}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
