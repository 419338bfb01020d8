"""A sweeper's batch of points: checked, started, awaited, measured.

Owns a batch from its overrides to its objective values. Promises that equal overrides always denote the same run: a
finished one is only read, a live one is awaited, one that ended early resumes from its last checkpoint. All points of a
batch are checked before the first one is started. A point without a value has an error with the reason. A signal ends
the started jobs and the sweeper. Must not know the sweeper.

    run_batch = TrialBatches(paths, fixed, launch, objective, received)
    run_batch([("optim.lr=1e-4",), ("optim.lr=3e-4",)])     [0.91, SweepError("point 1 (optim.lr=0.0003): failed: …")]
"""

import signal
import sys
from collections.abc import Iterable, Sequence

from pipeline.errors import RollcallError, SchedulerError, SweepError, one_line
from pipeline.run.paths import SweepPaths
from pipeline.run.run_documents import LOCAL
from pipeline.topology.plan import Plan
from pipeline.utils import shared_files
from pipeline.utils.waiting import CLOCK, Clock
from slurm.monitor.runs_overview import Overview, RunSummary
from slurm.monitor.runs_table import follow_table
from slurm.registry import run_registry, sweep_manifest
from slurm.registry.sweep_manifest import Trial
from slurm.submission.cancel_runs import cancel
from slurm.submission.compose_config import Expansion, spell_point
from slurm.submission.launcher_signals import INTERRUPTED, describe, exit_code
from slurm.submission.submit_sweep import PointLauncher, note_submission
from slurm.submission.sweep_trials import PlannedTrial, prepare_sweep
from slurm.submission.sweeps.sweep_jobs import LocalTrialJob, QueuedTrialJob, RemoteTrialJob, TrialJob
from slurm.submission.sweeps.sweep_metric import SweepMetric

Result = float | list[float] | RollcallError
"""A point's result for the sweeper: its value, a value for each objective, or the error."""


class StudyInterrupted(KeyboardInterrupt):
    """A signal ended the sweep, and its jobs are over. A `KeyboardInterrupt`, so no sweeper counts it as a failure."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__()


class TrialBatches:
    """A sweep whose points come in batches. The caller locks its directory, and collects signals in `received`."""

    def __init__(
        self,
        paths: SweepPaths,
        fixed: Sequence[str],
        launch: PointLauncher,
        objective: SweepMetric,
        received: Sequence[signal.Signals],
        clock: Clock = CLOCK,
    ) -> None:
        self._paths, self._fixed, self._launch = paths, tuple(fixed), launch
        self._objective, self._received, self._clock = objective, received, clock
        self._overview = Overview(paths.root.parent, paths.root.name, launch.connect)

    def __call__(self, batch: Sequence[Sequence[str]]) -> list[Result]:
        """Run a batch. Returns a result for each point, in order; `StudyInterrupted` after a signal."""
        self._raise_if_interrupted({})
        points = [self._prepare(overrides) for overrides in batch]
        failures = self._run_points({point.point.name: point for point in points if isinstance(point, PlannedTrial)})
        return [self._result(point, failures) for point in points]

    def _prepare(self, overrides: Sequence[str]) -> PlannedTrial | RollcallError:
        """Check a point and record it in the manifest. Returns the point with its state, or the error."""
        try:
            point = spell_point(overrides, self._fixed)
            prepared = prepare_sweep(Expansion(self._fixed, (point,)), self._launch.check, self._launch.connect)
        except RollcallError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error
        shared_files.write_document(self._paths.manifest, prepared.manifest)
        return prepared.entries[0]

    def _run_points(self, entries: dict[str, PlannedTrial]) -> dict[str, RollcallError]:
        """Start or await every point until it is over. Returns the error of each point that did not finish, by name."""
        jobs, failures = dict[str, TrialJob](), dict[str, RollcallError]()
        for name, entry in entries.items():
            self._raise_if_interrupted(jobs)
            if entry.standing == "live":
                jobs[name] = self._live_job(entry)
                print(f"{entry.point}: already live", flush=True)
            elif entry.plan is not None:
                self._start(entry, entry.plan, jobs, failures)
        while jobs:
            for name, line in self._await(jobs).items():
                if failure := self._conclude(entries[name].point, line, jobs):
                    failures[name] = failure
        return failures

    def _start(
        self, entry: PlannedTrial, plan: Plan, jobs: dict[str, TrialJob], failures: dict[str, RollcallError]
    ) -> None:
        """Start the point's job. After one refusal by the scheduler, further points fail with the same error."""
        name, recorded = entry.point.name, sweep_manifest.load_manifest(self._paths)
        assert recorded is not None
        refusal = next((error for error in failures.values() if isinstance(error, SchedulerError)), None)
        try:
            if refusal is not None:
                raise refusal
            print(f"{entry.point}: {name}", flush=True)
            if entry.config.cluster.on_this_machine:
                jobs[name], job = LocalTrialJob(entry.config, plan), LOCAL
            else:
                job = self._launch.submit(entry.config, plan)
                print(f"  job {job}", flush=True)
                jobs[name] = self._queued_job(name, entry.config.cluster.scheduler, job, already_live=False)
        except RollcallError as error:
            failures[name] = error
            note_submission(self._paths, recorded, entry.point, refused=str(error))
            print(f"error: {entry.point}: {error}", file=sys.stderr, flush=True)
        else:
            note_submission(self._paths, recorded, entry.point, job=job)

    def _live_job(self, entry: PlannedTrial) -> TrialJob:
        """The job of a point that an earlier command started."""
        run = self._paths.point(entry.point.name)
        job = run_registry.submitted_job(run)
        if job is None or not job.queued:
            return RemoteTrialJob(run)
        return self._queued_job(entry.point.name, job.kind, job.job, already_live=True)

    def _queued_job(self, name: str, scheduler: str, job: str, *, already_live: bool) -> QueuedTrialJob:
        queue = self._launch.connect(scheduler)
        return QueuedTrialJob(self._paths.point(name), scheduler, job, queue, already_live=already_live)

    def _await(self, jobs: dict[str, TrialJob]) -> dict[str, RunSummary]:
        """Show the table until all jobs are over, or one that an earlier command started is. Returns the ended points.

        A signal ends all jobs, then raises `StudyInterrupted`.
        """

        def over(lines: Iterable[RunSummary]) -> dict[str, RunSummary]:
            return {line.name: line for line in lines if line.name in jobs and line.live is False}

        def enough(lines: Sequence[RunSummary]) -> bool:
            ended = over(lines)
            return bool(self._received) or len(ended) == len(jobs) or any(jobs[name].already_live for name in ended)

        lines = follow_table(_JobTable(self._overview, jobs), clock=self._clock, until=enough)
        self._raise_if_interrupted(jobs)
        return over(lines)

    def _conclude(self, point: Trial, line: RunSummary, jobs: dict[str, TrialJob]) -> RollcallError | None:
        """Print how a point's job ended, and remove it from `jobs`. Returns why the point did not finish, if so.

        A job that an earlier command started may have been cancelled: the point is then started once more.
        """
        job = jobs.pop(point.name)
        print(f"{point}:", flush=True)
        code = job.conclude()
        if code == 0:
            return None
        if isinstance(job, LocalTrialJob) and code in INTERRUPTED:
            self._stop(jobs)
            raise StudyInterrupted(code)
        failures: dict[str, RollcallError] = {}
        if job.already_live:
            current = self._prepare(point.overrides)
            if isinstance(current, RollcallError):
                return current
            if current.plan is not None:
                self._start(current, current.plan, jobs, failures)
            return failures.get(point.name)
        return SweepError(f"{point}: {line.state}" + (f": {line.failure}" if line.failure else ""))

    def _raise_if_interrupted(self, jobs: dict[str, TrialJob]) -> None:
        """End these jobs and raise `StudyInterrupted` if a signal was received."""
        if self._received:
            if jobs:
                effect = "the started jobs save a checkpoint, without a time limit, and stop"
                print(
                    f"{self._received[0].name}: {effect}; a second signal ends it at once", file=sys.stderr, flush=True
                )
            self._stop(jobs)
            raise StudyInterrupted(exit_code(self._received[0]))

    def _stop(self, jobs: dict[str, TrialJob]) -> None:
        """End the jobs of this process and those in a scheduler's queue; a second signal kills the local ones."""
        here = [job for job in jobs.values() if isinstance(job, LocalTrialJob)]
        why = describe(self._received[0]) if self._received else "another point of the sweep was interrupted"
        for job in here:
            job.cancel(why)
        for job in here:
            job.end(at_once=lambda: len(self._received) > 1)
        if queued := [job.run for job in jobs.values() if isinstance(job, QueuedTrialJob)]:
            cancel(queued, self._launch.connect, self._clock)

    def _result(self, prepared: PlannedTrial | RollcallError, failures: dict[str, RollcallError]) -> Result:
        if isinstance(prepared, RollcallError):
            return prepared
        point = prepared.point
        if point.name in failures:
            return failures[point.name]
        try:
            values = self._objective.of(self._paths.point(point.name))
        except (RollcallError, OSError) as error:
            reason = str(error) if isinstance(error, RollcallError) else one_line(error)
            return SweepError(f"{point}: {reason}")
        print(f"{point}: {self._objective} {', '.join(f'{value:.4g}' for value in values)}", flush=True)
        return values[0] if len(values) == 1 else list(values)


class _JobTable:
    """The overview of a sweep; each poll first releases this process's claims on ended runs."""

    def __init__(self, overview: Overview, jobs: dict[str, TrialJob]) -> None:
        self._overview, self._jobs = overview, jobs

    @property
    def source(self) -> str:
        return self._overview.source

    def look(self) -> list[RunSummary]:
        for job in self._jobs.values():
            job.reap()
        return self._overview.look()
