"""What becomes of the job once an attempt is over: the one owner of the requeue.

Owns the decision and the act. The batch script runs this after its srun; nothing else of Rollcall asks the scheduler to
run a job again. Promises that a run which finished is never queued again, that an attempt is followed by at most one
requeue, and that a run which fails over and over without a commit stops. Must not know what a role does: it reads what
agents and trainer left in the run directory, and what the scheduler says of the job.

    python -P -m slurm.requeue RUN_DIRECTORY EXIT_CODE_OF_SRUN
"""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pipeline import files
from pipeline.checkpoints import newest_committed
from pipeline.config import ClusterConfig
from pipeline.errors import DeadlineError, RollcallError, SchedulerError
from pipeline.events import Events
from pipeline.failure import FirstFailure
from pipeline.paths import AttemptPaths, RunPaths
from pipeline.plan import make_plan
from pipeline.records import Outcome
from pipeline.report.history import read_config, read_history
from pipeline.report.page import write_report
from pipeline.waiting import CLOCK, Clock, wait_for
from slurm import runs
from slurm.alive import lost_ranks
from slurm.commands import SlurmCommands
from slurm.environment import batch_attempt
from slurm.roster import name_ranks
from slurm.scheduler import RUNNING, QueuedJob, Scheduler

T = TypeVar("T")

ANSWER_SECONDS = 180.0
"""For how long a scheduler that is silent or refuses is asked again: its controller may be starting anew."""
PAUSE, LONGEST_PAUSE = 1.0, 10.0

OURS = frozenset({RUNNING, "CONFIGURING", "RESIZING", "SIGNALING"})
"""States of a job that nobody is ending: what asks is running in it."""
OUT_OF_TIME = "TimeLimit"
"""The scheduler's reason when it ends a job at its time limit."""


@dataclass(frozen=True)
class Facts:
    """What an attempt left behind.

    Attributes:
        restart: how often the job had been requeued when the attempt began.
        finished: whether the run is at its end.
        told: why the attempt was told to end, before anything failed; empty if nobody told it.
        failure: its first failure in one line; empty if it left none.
        lost: the ranks whose agent did not say that it left: it was killed, or died with its node.
        code: what srun ended with.
        advanced: whether it committed steps of its own.
        trained: whether the run has a commit, of whatever attempt.
        barren: attempts of this job, in a row before this one, that failed without a commit.
    """

    restart: int
    finished: bool = False
    told: str = ""
    failure: str = ""
    lost: tuple[int, ...] = ()
    code: int = 0
    advanced: bool = False
    trained: bool = False
    barren: int = 0

    @property
    def trouble(self) -> str:
        """What went wrong, in one line; empty for an attempt that was told to end and did so in order."""
        if self.failure:
            return self.failure
        if self.lost:
            return f"{name_ranks(self.lost)} ended without a word (srun: exit code {self.code})"
        return "" if self.told else f"the agents left without a reason (srun: exit code {self.code})"


def decide(facts: Facts, job: QueuedJob | None, cluster: ClusterConfig, now: float) -> Outcome:
    """What becomes of `job`, as the scheduler sees it now (None: not any more). Pure; `now` is seconds since the epoch.

    Whose the job is comes first: when the scheduler ends it, or has queued it again, what happened in the attempt has
    no say. A failure is barren unless its attempt committed new steps. To be told to end is none, so preemptions alone
    use up `max_restarts` and nothing else. A rank that is lost may be its node's fault, and an attempt that was told to
    end may have failed for that, so these get `max_barren` tries, as does any failure of a run that has a commit.
    Whatever else fails before the first commit would fail again.
    """
    barren = 0 if facts.advanced else facts.barren
    if facts.finished:
        return Outcome(decision="finished", reason="the run is finished", time=now)
    if elsewhere := who_has(job, facts.restart):
        return Outcome(decision="left", reason=elsewhere, barren=barren, time=now)
    trouble = facts.trouble
    if trouble and not facts.advanced:
        barren += 1

    def outcome(again: bool, why: str) -> Outcome:
        reason = f"{trouble or facts.told}: {why}"
        return Outcome(decision="requeued" if again else "stopped", reason=reason, barren=barren, time=now)

    if facts.restart >= cluster.max_restarts:
        return outcome(False, f"the job was requeued cluster.max_restarts={cluster.max_restarts} times already")
    if not trouble:
        return outcome(True, "it goes on from its newest commit")
    if facts.advanced:
        return outcome(True, "the attempt had committed new steps, the next goes on from them")
    if barren >= cluster.max_barren:
        return outcome(False, f"{barren} attempts in a row failed without a new commit (cluster.max_barren)")
    if facts.lost or facts.told or facts.trained:
        return outcome(True, f"try {barren} without a new commit, {cluster.max_barren} end the job")
    return outcome(False, "it failed before the first commit, so another attempt would fail alike")


def who_has(job: QueuedJob | None, restart: int) -> str:
    """Why the job is not ours to requeue; empty if it is.

    It is, too, when the scheduler ends it for good at its time limit or to make room for another: that end is not the
    user's, and the scheduler queues the job again when it is asked meanwhile.
    """
    if job is None:
        return "the scheduler does not know the job any more"
    if job.restarts != restart:
        return f"the scheduler has queued the job again (restart {job.restarts})"
    if job.state in OURS or job.reason == OUT_OF_TIME or job.preempted:
        return ""
    return f"the scheduler is ending the job ({job.state})"


def gather(run: RunPaths, paths: AttemptPaths, restart: int, ranks: int, code: int) -> Facts:
    """The facts of an attempt of `ranks` agents whose srun ended with `code`, from the run directory."""
    failure, draining = files.read_document(paths.first_failure, FirstFailure), Events(paths).seen("draining")
    told = draining is not None and (failure is None or draining.time <= failure.time)
    newest = newest_committed(str(run.checkpoints))
    committer = newest.manifest.attempt if newest else ""
    return Facts(
        restart=restart,
        finished=run.finished.exists(),
        told=f"told to end ({draining.detail}, {draining.by})" if draining and told else "",
        failure=failure.one_line() if failure else "",
        lost=lost_ranks(paths, ranks),
        code=code,
        advanced=committer == paths.attempt,
        trained=newest is not None,
        barren=barren_before(run, paths, restart, committer),
    )


def barren_before(run: RunPaths, paths: AttemptPaths, restart: int, committer: str) -> int:
    """Barren attempts in a row before `restart` of the same job; `committer` is the attempt of the newest commit.

    The last outcome on disk knows the count. Attempts without an outcome were cut off by the scheduler, which is no
    failure of theirs; and a commit begins the count anew.
    """
    job = paths.attempt.rpartition("-")[0]
    for earlier in range(restart - 1, -1, -1):
        attempt = run.attempt(paths.run_id, f"{job}-{earlier}")
        if attempt.attempt == committer:
            return 0
        outcome = files.read_document(attempt.outcome, Outcome)
        if outcome is not None:
            return outcome.barren
    return 0


def conclude(run: RunPaths, scheduler: Scheduler, job: str, restart: int, code: int, clock: Clock = CLOCK) -> Outcome:
    """Decide what becomes of the job after its attempt, write it down and do it; the outcome as it turned out.

    The outcome is on disk before the scheduler is told, since that may end this process.
    """
    config = read_config(run)
    if config is None:
        raise RollcallError(f"{run.config} cannot be read")
    paths = run.attempt(runs.identity(run).run_id, f"{job}-{restart}")
    facts = gather(run, paths, restart, make_plan(config).ranks, code)

    def kept(outcome: Outcome) -> Outcome:
        files.write_document(paths.outcome, outcome)
        return outcome

    try:
        (seen,) = _insist("the scheduler to describe the job", lambda: (scheduler.job(job),), clock)
        outcome = kept(decide(facts, seen, config.cluster, time.time()))
        if outcome.decision == "requeued":
            now = _insist("the scheduler to requeue the job", lambda: _requeue(scheduler, job, restart), clock)
            if now != REQUEUED:
                return kept(Outcome(decision="left", reason=now, barren=outcome.barren, time=time.time()))
    except DeadlineError as error:
        return kept(Outcome(decision="stopped", reason=f"the job could not be requeued: {error}", time=time.time()))
    return outcome


REQUEUED = "requeued"


def _requeue(scheduler: Scheduler, job: str, restart: int) -> str | None:
    """Requeue the job if it is ours; `REQUEUED` once it is queued again, who has it if it is not, else None.

    It looks before it asks, so that a request whose answer was lost is not made twice, and a job that was cancelled
    meanwhile stays cancelled.
    """
    seen = scheduler.job(job)
    if not who_has(seen, restart):
        scheduler.requeue(job)
        seen = scheduler.job(job)
    queued_again = seen is not None and seen.restarts > restart
    return REQUEUED if queued_again else who_has(seen, restart) or None


def _insist(awaited: str, ask: Callable[[], T | None], clock: Clock) -> T:
    """What the scheduler answers; asks again while it fails; `DeadlineError` with what it said last."""
    said = ""

    def probe() -> T | None:
        nonlocal said
        try:
            return ask()
        except SchedulerError as error:
            said = str(error)
            return None

    return wait_for(
        awaited, probe, ANSWER_SECONDS, missing=lambda: said, pause=PAUSE, longest_pause=LONGEST_PAUSE, clock=clock
    )


def main(arguments: Sequence[str]) -> int:
    """The exit code of the job: 0 only if the run is finished, so that no other end looks COMPLETED."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # meant for the agents, which are gone
        signal.signal(number, signal.SIG_IGN)
    run, code = RunPaths(Path(arguments[0])), int(arguments[1])
    job, restart = batch_attempt()
    try:
        if not runs.owns(run, job):
            print(f"rollcall: {run.root} belongs to another job by now, so job {job} ends here", flush=True)
            return 1
        outcome = conclude(run, SlurmCommands(), job, restart, code)
    except (RollcallError, OSError) as error:
        print(f"rollcall: job {job} ends here, since nothing could be decided: {error}", flush=True)
        return error.exit_code if isinstance(error, RollcallError) else 1
    print(f"rollcall: attempt {job}-{restart}: {outcome.decision}: {outcome.reason}", flush=True)
    if outcome.decision in ("finished", "stopped"):
        _report(run)
    return 0 if outcome.decision == "finished" else 1


def _report(run: RunPaths) -> None:
    try:
        write_report(read_history(run.root))
    except Exception as error:  # noqa: BLE001 (the job's end stands, whatever the report does)
        print(f"rollcall: no report: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
