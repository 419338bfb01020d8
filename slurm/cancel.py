"""Cancelling runs: told to end, waited for, and where they can be resumed from.

Owns how a run's job is ended from outside: Slurm's through the scheduler, a local one through its launcher. Promises to
signal no process that does not hold the run's own lock, and to wait only so long.

    python launchers/cancel.py run=<name or directory>      python launchers/cancel.py sweep=<name or directory>
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.checkpoints import newest_committed
from pipeline.errors import ConfigError, RollcallError
from pipeline.paths import RunPaths
from pipeline.report.history import find_run, read_config
from pipeline.waiting import CLOCK, Clock, wait_for
from slurm import manifest, runs
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
    config = read_config(run)
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
    found = [holder(run, lock) for lock in (run.lock, run.job_lock)]
    return [process for process in found if process is not None]


def holder(run: RunPaths, lock: Path) -> psutil.Process | None:
    """The process that holds this lock; None when nobody does.

    The lock's text names it, and it must have the lock's file open: a number that another process got since is nobody.
    Raises `ConfigError` when it is on another machine or cannot be told.
    """
    if not lock.exists() or not runs.is_held(lock):
        return None
    text = lock.read_text().strip()
    signed = re.fullmatch(r"pid (\d+) on (\S+)", text)
    if signed is None or signed[2] != os.uname().nodename:
        place = signed[2] if signed else f"an unknown machine ({text})"
        raise ConfigError("run", str(run.root), "a run of this machine", f"it runs on {place}: cancel it there")
    process = _opener(int(signed[1]), lock)
    if process is None and runs.is_held(lock):
        mend = f"{lock} is held, but not by {text}, or not by a process of yours: end its job by hand"
        raise ConfigError("run", str(run.root), "a run whose launcher can be told", mend)
    return process


def _opener(pid: int, path: Path) -> psutil.Process | None:
    """This process, if it has the file open."""
    try:
        process = psutil.Process(pid)
        opened = {file.path for file in process.open_files()}
    except psutil.Error:
        return None
    return process if str(path.resolve()) in opened else None
