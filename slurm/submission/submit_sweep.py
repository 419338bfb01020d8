"""Submission of a sweep: many runs from one command line, each with its own job.

Owns the order of a sweep's submission: check every point, then submit the open ones. Promises that nothing is submitted
unless every point is valid; that a repeated command submits only unfinished points; and that the manifest always
records the progress of the submission. Must not know how one run is submitted, which `PointLauncher` does.

    sweep(["experiment=demo", "loss=grpo,gspo", "cluster=slurm"], launch)
"""

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pipeline.config import RunConfig
from pipeline.errors import ConfigError, RollcallError
from pipeline.observability.number_format import plural
from pipeline.run.paths import RunPaths, SweepPaths
from pipeline.run.run_documents import LOCAL
from pipeline.topology.plan import Plan
from pipeline.utils import shared_files
from pipeline.utils.terminal import console
from pipeline.utils.user_commands import user_command
from slurm.monitor.runs_overview import Overview
from slurm.monitor.runs_table import follow_table, print_table
from slurm.registry import run_registry
from slurm.registry.sweep_manifest import SweepManifest, Trial
from slurm.scheduler.scheduler_protocol import Connect
from slurm.scheduler.scheduler_registry import batch_scheduler
from slurm.submission.compose_config import expand_sweep
from slurm.submission.launcher_signals import INTERRUPTED, recorded_signals
from slurm.submission.sweep_trials import Check, PreparedSweep, claimed_sweep, prepare_sweep
from slurm.submission.tail_job import run_title


@dataclass(frozen=True)
class PointLauncher:
    """The functions that check, show and submit one run of a sweep.

    Attributes:
        check: see `slurm.submission.sweep_trials.Check`.
        show: prints the plan; for the first point also the file that will be submitted.
        run: executes a local run to its end and returns its exit code.
        submit: queues a job and returns its id.
        connect: see `slurm.scheduler.scheduler_protocol.Connect`.
    """

    check: Check
    show: Callable[[RunConfig, Plan, bool], None]
    run: Callable[[RunConfig, Plan], int]
    submit: Callable[[RunConfig, Plan], str]
    connect: Connect


def sweep(overrides: Sequence[str], launch: PointLauncher, *, dry_run: bool = False, detach: bool = False) -> int:
    """Submit the points that these overrides describe. Returns 0, or 1 if a point failed or was refused.

    A local sweep runs its points one after the other. A sweep on a cluster is followed until all its jobs are over,
    unless `detach`; Ctrl-C then ends only the display. `ConfigError` for the first invalid point.
    """
    prepared = prepare_sweep(expand_sweep(overrides), launch.check, launch.connect)
    if detach and prepared.local:
        hint = "a local sweep runs in the foreground; start it with nohup, or in tmux"
        raise ConfigError("option", "--detach", "cluster=slurm", hint)
    _print_end(prepared)
    if dry_run:
        return _show(prepared, launch)
    for entry, plan in prepared.open[:1]:
        launch.show(entry.config, plan, False)
    with claimed_sweep(prepared):
        if prepared.local:
            return run_all(prepared, launch)
        complete = submit_all(prepared, launch)
    if detach or not complete:
        _print_commands(prepared)
        return 0 if complete else 1
    return watched(prepared, launch)


def run_all(prepared: PreparedSweep, launch: PointLauncher) -> int:
    """Run the open points one after the other; a failed one does not stop the others, an interruption does."""
    recorded, failed = prepared.manifest, 0
    for entry, plan in prepared.open:
        recorded = note_submission(prepared.paths, recorded, entry.point, job=LOCAL)
        print(f"{entry.point}: {entry.point.name}", flush=True)
        try:
            code = launch.run(entry.config, plan)
        except RollcallError as error:
            recorded = note_submission(prepared.paths, recorded, entry.point, refused=str(error))
            print(f"error: {error}", file=sys.stderr)
            code = error.exit_code
        if code in INTERRUPTED:
            print("the sweep ends here; the same command resumes it", file=sys.stderr)
            return code
        failed += code != 0
    overview = Overview(prepared.paths.root.parent, prepared.paths.root.name)
    print_table(overview.look(), overview.source, console())
    return 1 if failed else 0


def submit_all(prepared: PreparedSweep, launch: PointLauncher) -> bool:
    """Submit the open points in order. Returns False after the first refusal, which the manifest records.

    A signal ends the submission between two points, never between a job and its record.
    """
    recorded, done, jobs = prepared.manifest, 0, _live_jobs(prepared)
    with recorded_signals() as interrupted:
        for entry, plan in prepared.open:
            if interrupted:
                break
            try:
                job = launch.submit(queued_behind(entry.config, jobs), plan)
            except RollcallError as error:
                note_submission(prepared.paths, recorded, entry.point, refused=str(error))
                print(f"error: {entry.point}: {error}", file=sys.stderr)
                break
            recorded = note_submission(prepared.paths, recorded, entry.point, job=job)
            jobs.append(job)
            done += 1
            print(f"  {entry.point.name}: job {job}", flush=True)
    complete = done == len(prepared.open)
    if not complete:
        print(f"submitted {done} of {len(prepared.open)}; the same command submits the rest", file=sys.stderr)
    return complete


def queued_behind(config: RunConfig, jobs: Sequence[str]) -> RunConfig:
    """The point's config with a dependency, so that at most `cluster.max_jobs` jobs of the sweep run at a time.

    The scheduler holds the job back, so the bound needs neither this process nor the terminal. Each job depends on one
    other: with a bound of 2, the jobs 1, 2, 3, 4 form two chains, 1 before 3 and 2 before 4.
    """
    bound = config.cluster.max_jobs
    if not bound or len(jobs) < bound:
        return config
    cluster = batch_scheduler(config.cluster.scheduler).behind(config.cluster, jobs[-bound])
    return config.model_copy(update={"cluster": cluster})


def watched(prepared: PreparedSweep, launch: PointLauncher) -> int:
    """Show all points of the command until none is live. Returns 1 unless all finished; 0 after Ctrl-C."""
    names = {entry.point.name for entry in prepared.entries}
    overview = Overview(prepared.paths.root.parent, prepared.paths.root.name, launch.connect)
    try:
        lines = follow_table(overview)
    except KeyboardInterrupt:
        print("left; the jobs continue")
        _print_commands(prepared)
        return 0
    return 0 if all(line.state == "finished" for line in lines if line.name in names) else 1


def note_submission(
    paths: SweepPaths, recorded: SweepManifest, point: Trial, *, job: str = "", refused: str = ""
) -> SweepManifest:
    """Record the result of a point's submission on disk. Returns the new manifest."""
    if job:
        point = msgspec.structs.replace(point, job=job, submitted=time.time())
    recorded = recorded.noted(msgspec.structs.replace(point, refused=refused))
    shared_files.write_document(paths.manifest, recorded)
    return recorded


def _live_jobs(prepared: PreparedSweep) -> list[str]:
    """The ids of the sweep's jobs in the queue, in the order of their points."""
    live = [entry for entry in prepared.entries if entry.standing == "live"]
    jobs = [run_registry.submitted_job(RunPaths(entry.config.directory)) for entry in live]
    return [job.job for job in jobs if job is not None]


def _show(prepared: PreparedSweep, launch: PointLauncher) -> int:
    """Print the plan of every open point, equal plans once, and the first point's whole batch file."""
    shown: list[Plan] = []
    for entry, plan in prepared.open:
        if plan in shown:
            print(f"{entry.point}: {entry.point.name}, as planned above", flush=True)
            continue
        print(f"{entry.point}:", flush=True)
        launch.show(entry.config, plan, not shown)
        shown.append(plan)
    return 0


def _print_end(prepared: PreparedSweep) -> None:
    standings = [entry.standing for entry in prepared.entries]
    counts = [f"{standings.count(word)} {word}" for word in ("finished", "live") if word in standings]
    todo = f"{standings.count('open')} to {'run' if prepared.local else 'submit'}"
    print(f"sweep {prepared.paths.root}: {', '.join([plural(len(standings), 'point'), *counts, todo])}", flush=True)


def _print_commands(prepared: PreparedSweep) -> None:
    name = shlex.quote(run_title(prepared.paths.root))
    print(f"  table       {user_command('runs')} sweep={name}")
    print(f"  cancel      {user_command('cancel')} sweep={name}", flush=True)
