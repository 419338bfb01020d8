"""The job of a point that a sweeper waits for: of this process, of another launcher, or in a scheduler's queue.

Owns the operations on each kind of job. Promises that a run that this process claimed is released as soon as its job is
over, and that the end of a job is printed as `slurm.submission.tail_job` prints it. Must not know sweepers.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from pipeline.config import RunConfig
from pipeline.run.paths import RunPaths
from pipeline.topology.plan import Plan
from slurm.batch.executors import RunJob
from slurm.registry import run_registry
from slurm.scheduler.scheduler_protocol import JobQueue
from slurm.submission.local_job import LocalJob, refuse_lacking_gpus
from slurm.submission.tail_job import conclude_job, conclude_run


class TrialJob(Protocol):
    """The live job of a point.

    Attributes:
        run: the point's run.
        already_live: whether an earlier command started the job; it may have been cancelled since.
    """

    run: RunPaths
    already_live: bool

    def reap(self) -> None:
        """Release the run's claim if its job is over; called at every poll."""

    def conclude(self) -> int:
        """Print how the job ended, once it is over. Returns the exit code, as for a single run."""


class LocalTrialJob:
    """Virtual nodes that this process started. It holds the run's claim until they have ended."""

    already_live = False

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
        """Make the job save a checkpoint and end, unless it is over; `why` is recorded as the reason."""
        if not self._job.done():
            self._job.cancel(why)

    def end(self, at_once: Callable[[], bool]) -> None:
        """Wait until the job has ended; kill it once `at_once()` is true."""
        try:
            self._job.end(at_once)
        finally:
            self._claim.close()

    def conclude(self) -> int:
        return conclude_run(self.run, self._job.attempt, [])


class RemoteTrialJob:
    """Virtual nodes of another launcher on this machine, which this process only waits for."""

    already_live = True

    def __init__(self, run: RunPaths) -> None:
        self.run = run

    def reap(self) -> None:
        return

    def conclude(self) -> int:
        job = run_registry.submitted_job(self.run)
        attempt = run_registry.last_attempt(self.run, job.job) if job is not None else None
        return conclude_run(self.run, attempt, []) if attempt is not None else 1


class QueuedTrialJob:
    """A queued or running job of the scheduler with that name. `slurm.submission.cancel_runs` ends it."""

    def __init__(self, run: RunPaths, scheduler: str, job: str, queue: JobQueue, *, already_live: bool) -> None:
        self.run, self.already_live = run, already_live
        self._handle = RunJob(run.submitit / scheduler, job, run=run, queue=queue)

    def reap(self) -> None:
        return

    def conclude(self) -> int:
        self._handle.done(force_check=True)
        return conclude_job(self._handle)
