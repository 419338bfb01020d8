"""Cancelling runs: told to end, waited for, and where they can be resumed from.

Owns how a run's job is ended from outside: Slurm's through the scheduler, a local one through its launcher. Promises to
signal no process that does not hold the run's own lock, and to wait only so long.

    python launchers/cancel.py run=<name or directory>      python launchers/cancel.py sweep=<name or directory>
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from pipeline.checkpoints import newest_committed
from pipeline.errors import RollcallError
from pipeline.frozen import kept_config
from pipeline.paths import RunPaths
from pipeline.report.history import find_run
from pipeline.waiting import CLOCK, Clock, wait_for
from slurm import locks, manifest, runs
from slurm.commands import find_slurm
from slurm.scheduler import Scheduler
from slurm.supervisor import longest_descent

_SLACK_SECONDS = 30.0
"""How much longer than its agents a job may take to be over."""


@dataclass(frozen=True)
class Ending:
    """A job that was told to end: what was done to which, and whether it is over."""

    run: RunPaths
    told: str
    over: Callable[[], bool]


def main(arguments: Sequence[str]) -> int:
    """Cancel what the arguments name; 0 when it is over or there was nothing to cancel, 2 for a wrong argument."""
    try:
        return cancel(_named(arguments), find_slurm)
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("left; what was told to end goes on ending")
        return 0


def _named(arguments: Sequence[str]) -> list[RunPaths]:
    """The runs that a command line names: one, or all of a sweep."""
    if len(arguments) == 1 and arguments[0].startswith("sweep="):
        paths = manifest.find(arguments[0].removeprefix("sweep="))
        kept = manifest.read(paths)
        return [paths.point(point.name) for point in kept.points] if kept else []
    return [RunPaths(find_run(arguments))]


def _patience(run: RunPaths) -> float:
    """Seconds that the run's job may take to come down."""
    config = kept_config(run)
    return _SLACK_SECONDS + (longest_descent(config.cluster) if config else 0.0)


def cancel(named: Sequence[RunPaths], scheduler: Callable[[], Scheduler], clock: Clock = CLOCK) -> int:
    """Tell the jobs of these runs to end and wait until they are over; raises `DeadlineError` when one is not.

    `scheduler` is called once a run has a job of one.
    """
    endings = [ending for run in named if (ending := tell_to_end(run, scheduler)) is not None]
    for ending in endings:
        print(f"{ending.run.root.name}: {ending.told}", flush=True)
    if not endings:
        names = ", ".join(run.root.name for run in named)
        print(f"nothing to cancel: no job of {names} is live")
    for ending in endings:
        wait_for(f"{ending.run.root.name} to end", ending.over, _patience(ending.run), clock=clock)
        checkpoint = newest_committed(str(ending.run.checkpoints))
        again = f"it can be resumed from {checkpoint}" if checkpoint else "it had no checkpoint yet"
        print(f"{ending.run.root.name}: over; {again}", flush=True)
    return 0


def tell_to_end(run: RunPaths, scheduler: Callable[[], Scheduler]) -> Ending | None:
    """Tell the run's job to end, or take it out of the queue; None when none is live.

    Raises `SchedulerError` when the scheduler gives no answer, and `ConfigError` for a local run of another machine.
    """
    job = runs.submitted_job(run)
    if job is None or job.kind == "local":
        return _end_local(run)
    asked = scheduler()
    queued = runs.live_job(run, asked)
    if queued is None:
        return None
    asked.cancel(job.job)
    told = f"job {job.job} ({queued.state}) was told to end and will not be queued again"
    return Ending(run, told, lambda: runs.live_job(run, asked) is None)


def _end_local(run: RunPaths) -> Ending | None:
    """TERM to the launcher, or, when that is gone already, to the controller of its job."""
    holders = _holders(run)
    if not holders:
        return None
    holders[0].terminate()
    told = f"process {holders[0].pid} ({run.root}) was told to end"
    return Ending(run, told, lambda: not _holders(run))


def _holders(run: RunPaths) -> list[psutil.Process]:
    """The processes that hold the run's locks: its launcher, then its job's controller."""
    found = [locks.holder(lock) for lock in (run.lock, run.job_lock)]
    return [process for process in found if process is not None]
