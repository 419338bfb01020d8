"""The records of an ended attempt in the run directory, as input of the decision about the job.

Owns reading the records of the agents and of the trainer once all agents have exited. Promises that a file which is not
visible yet does not count as absent: an NFS client caches the absence of a name until it lists the folder. Must not
know the scheduler, nor decide anything.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.checkpoints import attempt_of, newest_checkpoint, recorded_root
from pipeline.errors import DeadlineError
from pipeline.run.completion import is_finished
from pipeline.run.events import Event, EventName, Events
from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import COMMITTED, EXHAUSTED, FIRST_FAILURE, AttemptPaths, RunPaths, newest_attempt
from pipeline.run.run_documents import Outcome
from pipeline.utils import shared_files
from pipeline.utils.shared_dir import FileSharedDir
from pipeline.utils.waiting import CLOCK, Clock, wait_for
from slurm.agent.agent_heartbeat import unexited_ranks
from slurm.rendezvous.membership import name_ranks

MAX_PAUSE = 5.0
"""Longest pause in seconds between two polls for a record that may be visible late."""

NOTICE = signal.SIGUSR2.name
"""The signal that the scheduler sends before the job's time limit (`--signal` of the batch file)."""


@dataclass(frozen=True)
class AttemptSummary:
    """The records of an ended attempt.

    Attributes:
        restart: the job's number of requeues before the attempt.
        finished: whether the run is finished.
        stop_reason: the stop request that came before any failure; empty if there was none.
        notice: whether that request was the signal before the time limit.
        failure: the attempt's first failure in one line; empty if none is recorded.
        lost: the ranks whose agent left no exit marker: it was killed, or its node crashed.
        code: the exit code of the agents' step.
        advanced: whether this attempt saved a checkpoint.
        trained: whether the run has a checkpoint, of any attempt.
        exhausted: whether job files failed, and no other one is left to execute.
        failures: consecutive failed attempts of this job before this one; see `slurm.batch.requeue.decide`.
    """

    restart: int
    finished: bool = False
    stop_reason: str = ""
    notice: bool = False
    failure: str = ""
    lost: tuple[int, ...] = ()
    code: int = 0
    advanced: bool = False
    trained: bool = False
    exhausted: bool = False
    failures: int = 0

    @property
    def is_inconclusive(self) -> bool:
        """Whether exit markers that are visible late could still change the decision about this failure."""
        return self.code != 0 and not self.finished and not self.trained and (bool(self.lost) or not self.failure)

    @property
    def trouble(self) -> str:
        """The failure in one line; empty for an attempt that ended in order after a stop request."""
        if self.failure:
            return self.failure
        if self.lost:
            return f"{name_ranks(self.lost)} ended without an exit marker (exit code {self.code})"
        return "" if self.stop_reason else f"the agents exited without a recorded reason (exit code {self.code})"


def summarize_attempt(
    run: RunPaths, paths: AttemptPaths, restart: int, ranks: int, code: int, late: float, clock: Clock = CLOCK
) -> AttemptSummary:
    """Read the records of an attempt of `ranks` agents whose step exited with `code`.

    Code 0 means that every agent returned by itself, so no rank is lost and the reason is on disk. This function waits
    for the reason up to `late` seconds, the visibility delay of the file system.
    """
    attempt = FileSharedDir(paths.root)
    events = Events(paths, attempt)
    refresh_listing(run)
    if code == 0:
        _await_reason(run, events, late, clock)
    attempt.names()
    published, first = events.read_all(), attempt.read(FIRST_FAILURE, FirstFailure)
    draining, failed = published.get("draining"), published.get("failed")
    failure = first.one_line() if first else failed.detail if failed else ""
    stopped = draining is not None and _preceded(published, bool(first))
    committer = newest_committer(run, paths)
    return AttemptSummary(
        restart=restart,
        finished=is_finished(run),
        stop_reason=f"stop requested ({draining.detail}, {draining.by})" if draining and stopped else "",
        notice=draining is not None and stopped and draining.detail == NOTICE,
        failure=failure,
        lost=unexited_ranks(attempt, ranks) if code else (),
        code=code,
        advanced=committer == paths.attempt,
        trained=bool(committer),
        exhausted=EXHAUSTED in attempt.names(),
        failures=failures_before(run, paths, restart, committer),
    )


def newest_committer(run: RunPaths, paths: AttemptPaths) -> str:
    """The attempt that saved the run's newest checkpoint; empty if there is none.

    Job files name their own checkpoint directories, which runs may share. For these the trainer's markers count: the
    latest attempt of the job of `paths`, else any of an earlier job. Times of markers are not compared, since they come
    from the clocks of several nodes.
    """
    if newest := newest_checkpoint(recorded_root(run)):
        return attempt_of(newest.manifest.attempt)
    committers = [folder.name for folder in run.attempts.glob("*") if COMMITTED in FileSharedDir(folder).names()]
    return newest_attempt(committers, paths.job) or "".join(committers[:1])


def failures_before(run: RunPaths, paths: AttemptPaths, restart: int, committer: str) -> int:
    """Consecutive failed attempts of the same job before `restart`.

    The last outcome on disk has the count. Attempts without an outcome were ended by the scheduler and do not count as
    failures. A checkpoint, whose attempt is `committer`, resets the count.
    """
    for earlier in range(restart - 1, -1, -1):
        attempt = run.attempt(paths.run_id, f"{paths.job}-{earlier}")
        if attempt.attempt == committer:
            return 0
        outcome = shared_files.read_document(attempt.outcome, Outcome)
        if outcome is not None:
            return outcome.failures
    return 0


def _preceded(published: Mapping[EventName, Event], failed: bool) -> bool:
    """Whether the stop request came before any failure of the attempt, by the order of its events.

    A recorded failure without an event came first: its process was killed between the record and the event.
    """
    before = list(published)[: list(published).index("draining")]
    return "failed" not in before and ("failed" in published or not failed)


def _await_reason(run: RunPaths, events: Events, late: float, clock: Clock) -> None:
    """Wait until the reason why every agent returned is visible: a finished run, or a stop request."""

    def shows() -> bool:
        refresh_listing(run)
        return is_finished(run) or events.get("draining") is not None

    try:
        wait_for("the agents' reason to exit", shows, late, longest_pause=MAX_PAUSE, clock=clock)
    except DeadlineError:
        return  # the decision reports the missing reason


def refresh_listing(run: RunPaths) -> None:
    """List the folders of the run and its attempts, which drops an NFS client's cached absences."""
    for folder in (run.root, run.attempts):
        FileSharedDir(folder).names()
