"""Ending the jobs that are attached to a run.

Owns the choice of the jobs; `slurm.submission.cancel_runs` ends them as it ends runs.

    python launchers/detach.py run=<name or directory> [job=<number>]
"""

import sys
from collections.abc import Sequence

from pipeline.errors import ConfigError, RollcallError
from pipeline.observability.run_history import find_run
from pipeline.run.completion import is_finished
from pipeline.run.paths import AttachedPaths, RunPaths
from slurm.registry import attached_jobs
from slurm.scheduler.scheduler_registry import connect_scheduler
from slurm.submission.cancel_runs import end_jobs


def main(arguments: Sequence[str]) -> int:
    """End the attached jobs that the arguments name. Returns 0 once they are over, 2 for a wrong argument."""
    try:
        run, jobs = _named_jobs(arguments)
        live = [job for job in jobs if not is_finished(job)]
        # A job that was killed has not recorded its end: only the scheduler knows that it is over.
        requests, code = end_jobs(live, connect_scheduler)
        if not (requests or code):
            print(f"nothing to detach: no attached job of {run.root.name} is live")
        return code
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _named_jobs(arguments: Sequence[str]) -> tuple[RunPaths, list[AttachedPaths]]:
    named = [text for text in arguments if text.startswith("job=")]
    run = RunPaths(find_run([text for text in arguments if text not in named]))
    jobs = attached_jobs.attached_jobs(run)
    if not named:
        return run, jobs
    number = named[-1].removeprefix("job=")
    chosen = [job for job in jobs if str(job.number) == number]
    if not chosen:
        known = ", ".join(str(job.number) for job in jobs) or "none"
        raise ConfigError("job", number, f"an attached job of {run.root.name}", f"there are: {known}")
    return run, chosen
