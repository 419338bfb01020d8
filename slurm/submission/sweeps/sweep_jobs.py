"""The job of a point that a sweeper waits for: on this machine, in Slurm's queue, or another launcher's.

Owns what can be done with each. Promises that a run which was claimed here is let go of as soon as its job is over, and
that how a job ended is told in the words of `slurm.submission.tail_job`. Must not know sweepers.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from pipeline.config import RunConfig
from pipeline.run.paths import RunPaths
from pipeline.topology.plan import Plan
from slurm.batch.executors import RunJob
from slurm.registry import run_registry
from slurm.scheduler.scheduler_protocol import Scheduler
from slurm.submission.local_job import LocalJob, refuse_lacking_gpus
from slurm.submission.tail_job import conclude_job, conclude_run, last_attempt


class TrialJob(Protocol):
    """A job that was started for a point, or found live.

    Attributes:
        run: of the point.
        found: whether it was live already: then it may have been told to end before this command came.
    """

    run: RunPaths
    found: bool

    def reap(self) -> None:
        """Let go of the run if its job is over; called at every look."""

    def conclude(self) -> int:
        """After its end: say how it ended; the exit code, as of a single run."""


class LocalTrialJob:
    """Virtual nodes that this process started. It holds the run's claim until they are over."""

    found = False

    def __init__(self, config: RunConfig, plan: Plan) -> None:
        refuse_lacking_gpus(plan)
        with ExitStack() as claim:
            self.run = claim.enter_context(run_registry.claimed_run(config))
            self._job = LocalJob(self.run, config, plan)
            self._claim = claim.pop_all()

    def reap(self) -> None:
        if self._job.done():
            self._claim.close()

    def cancel(self, why: str) -> None:
        """Have it make a checkpoint and come down, unless it is over; `why` is recorded as the reason."""
        if not self._job.done():
            self._job.cancel(why)

    def end(self, at_once: Callable[[], bool]) -> None:
        """Wait until it came down; from `at_once()` on it is killed."""
        try:
            self._job.end(at_once)
        finally:
            self._claim.close()

    def conclude(self) -> int:
        return conclude_run(self.run, self._job.attempt, [])


class RemoteTrialJob:
    """Virtual nodes of another launcher on this machine, which are waited for and left alone."""

    found = True

    def __init__(self, run: RunPaths) -> None:
        self.run = run

    def reap(self) -> None:
        return

    def conclude(self) -> int:
        job = run_registry.submitted_job(self.run)
        attempt = last_attempt(self.run, job.job) if job is not None else None
        return conclude_run(self.run, attempt, []) if attempt is not None else 1


class SlurmTrialJob:
    """A job in Slurm's queue, or running there. `slurm.submission.cancel_runs` ends it."""

    def __init__(self, run: RunPaths, job: str, scheduler: Scheduler, *, found: bool) -> None:
        self.run, self.found = run, found
        self._handle = RunJob(run.submitit / "slurm", job, run=run, scheduler=scheduler)

    def reap(self) -> None:
        return

    def conclude(self) -> int:
        self._handle.done(force_check=True)
        return conclude_job(self._handle)
