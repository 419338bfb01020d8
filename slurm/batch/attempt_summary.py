"""What an attempt left behind, as the run directory tells it to whoever decides what comes next.

Owns reading the traces of the agents and of the trainer once srun is over. Promises that a file which this machine does
not see yet is not taken for absent: an NFS client remembers for a while that a name was absent, until it lists the
folder. Must not know the scheduler, nor decide anything.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.checkpoints import newest_checkpoint, recorded_root
from pipeline.errors import DeadlineError
from pipeline.run.completion import is_finished
from pipeline.run.events import Event, EventName, Events
from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import COMMITTED, EXHAUSTED, FIRST_FAILURE, AttemptPaths, RunPaths
from pipeline.run.run_documents import Outcome
from pipeline.utils import shared_files
from pipeline.utils.shared_dir import FileSharedDir
from pipeline.utils.waiting import CLOCK, Clock, wait_for
from slurm.agent.agent_heartbeat import unexited_ranks
from slurm.rendezvous.membership import name_ranks

MAX_PAUSE = 5.0
"""Seconds between two looks for what may be late."""

NOTICE = signal.SIGUSR2.name
"""What `--signal` of the batch file has the scheduler send before the job's time limit."""


@dataclass(frozen=True)
class AttemptSummary:
    """What an attempt left behind.

    Attributes:
        restart: how often the job had been requeued when the attempt began.
        finished: whether the run is at its end.
        told: why the attempt was told to end, before anything failed; empty if nobody told it.
        notice: whether it was told by the signal that comes before the time limit.
        failure: its first failure in one line; empty if it left none.
        lost: the ranks whose agent did not say that it left: it was killed, or died with its node.
        code: what srun ended with.
        advanced: whether it committed steps of its own.
        trained: whether the run has a commit, of whatever attempt.
        exhausted: whether jobs of files failed, and nothing else is left to do.
        failures: attempts of this job in a row, before this one, that count as such: see `slurm.batch.requeue.decide`.
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
        """Whether marks that are seen late could still turn a failure that would come again into a lost rank."""
        return self.code != 0 and not self.finished and not self.trained and (bool(self.lost) or not self.failure)

    @property
    def trouble(self) -> str:
        """What went wrong, in one line; empty for an attempt that was told to end and did so in order."""
        if self.failure:
            return self.failure
        if self.lost:
            return f"{name_ranks(self.lost)} ended without a word (srun: exit code {self.code})"
        return "" if self.stop_reason else f"the agents left without a reason (srun: exit code {self.code})"


def summarize_attempt(
    run: RunPaths, paths: AttemptPaths, restart: int, ranks: int, code: int, late: float, clock: Clock = CLOCK
) -> AttemptSummary:
    """The facts of an attempt of `ranks` agents whose srun ended with `code`, from the run directory.

    Code 0 means that every agent returned by itself, so none is lost, and the reason is on disk: it is waited for, for
    the `late` seconds by which it may appear late.
    """
    attempt = FileSharedDir(paths.root)
    events = Events(paths, attempt)
    refresh_listing(run)
    if code == 0:
        _await_reason(run, events, late, clock)
    attempt.names()
    heard, first = events.read_all(), attempt.read(FIRST_FAILURE, FirstFailure)
    draining, failed = heard.get("draining"), heard.get("failed")
    failure = first.one_line() if first else failed.detail if failed else ""
    told = draining is not None and _preceded(heard, bool(first))
    committer = newest_committer(run)
    return AttemptSummary(
        restart=restart,
        finished=is_finished(run),
        stop_reason=f"told to end ({draining.detail}, {draining.by})" if draining and told else "",
        notice=draining is not None and told and draining.detail == NOTICE,
        failure=failure,
        lost=unexited_ranks(attempt, ranks) if code else (),
        code=code,
        advanced=committer == paths.attempt,
        trained=bool(committer),
        exhausted=EXHAUSTED in attempt.names(),
        failures=failures_before(run, paths, restart, committer),
    )


def newest_committer(run: RunPaths) -> str:
    """The attempt that made the newest commit of the run; empty if there is none.

    Jobs of files commit where each says, maybe to what other runs share; of these the trainer's marks tell.
    """
    if newest := newest_checkpoint(recorded_root(run)):
        return newest.manifest.attempt
    marks = [folder / COMMITTED for folder in run.attempts.glob("*") if COMMITTED in FileSharedDir(folder).names()]
    return max(marks, key=lambda mark: mark.stat().st_mtime_ns).parent.name if marks else ""


def failures_before(run: RunPaths, paths: AttemptPaths, restart: int, committer: str) -> int:
    """Failed attempts in a row before `restart` of the same job; `committer` is the attempt of the newest commit.

    The last outcome on disk knows the count. Attempts without an outcome were cut off by the scheduler, which is no
    failure of theirs; and a commit begins the count anew.
    """
    job = paths.attempt.rpartition("-")[0]
    for earlier in range(restart - 1, -1, -1):
        attempt = run.attempt(paths.run_id, f"{job}-{earlier}")
        if attempt.attempt == committer:
            return 0
        outcome = shared_files.read_document(attempt.outcome, Outcome)
        if outcome is not None:
            return outcome.failures
    return 0


def _preceded(told: Mapping[EventName, Event], failed: bool) -> bool:
    """Whether the attempt was told to end before anything failed in it, as the order of the events says.

    A failure whose event is not there came first: who wrote it down was ended before it could tell it.
    """
    before = list(told)[: list(told).index("draining")]
    return "failed" not in before and ("failed" in told or not failed)


def _await_reason(run: RunPaths, events: Events, late: float, clock: Clock) -> None:
    """Wait until it shows why every agent returned by itself: the run is finished, or the attempt was told to end."""

    def shows() -> bool:
        refresh_listing(run)
        return is_finished(run) or events.get("draining") is not None

    try:
        wait_for("the agents' reason to leave", shows, late, longest_pause=MAX_PAUSE, clock=clock)
    except DeadlineError:
        return  # that there is none is for the decision to say


def refresh_listing(run: RunPaths) -> None:
    """List the folders from the run down to its attempts: what was absent before may be there by now."""
    for folder in (run.root, run.attempts):
        FileSharedDir(folder).names()
