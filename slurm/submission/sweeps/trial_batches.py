"""The points that a sweeper asks for at a time: looked at, started, awaited, measured.

Owns a batch from its overrides to its numbers. Promises that a point is the same run whenever it is asked for: one that
finished is only read, one that is live is waited for, one that ended early goes on from its last checkpoint. All points
of a batch are looked at before the first is started; a point without a number has a reason; a signal ends what was
started, and the sweeper with it. Must not know which sweeper asks.

    study = Study(paths, fixed, launch, objective, told)
    study([("optim.lr=1e-4",), ("optim.lr=3e-4",)])     [0.91, SweepError("point 1 (optim.lr=0.0003): failed: …")]
"""

import signal
import sys
from collections.abc import Iterable, Sequence

from pipeline.errors import RollcallError, SchedulerError, SweepError, one_line
from pipeline.run.paths import SweepPaths
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
from slurm.submission.sweeps.sweep_jobs import LocalTrialJob, RemoteTrialJob, SlurmTrialJob, TrialJob
from slurm.submission.sweeps.sweep_metric import SweepMetric

Result = float | list[float] | RollcallError
"""What a sweeper is told of a point: its number, a number for each objective, or why it has none."""


class StudyInterrupted(KeyboardInterrupt):
    """The sweep was told to end, and what it had started is over. No sweeper takes it for the failure of a point."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__()


class TrialBatches:
    """A sweep whose points come in batches. The caller holds its directory, and collects signals in `told`."""

    def __init__(
        self,
        paths: SweepPaths,
        fixed: Sequence[str],
        launch: PointLauncher,
        objective: SweepMetric,
        told: Sequence[signal.Signals],
        clock: Clock = CLOCK,
    ) -> None:
        self._paths, self._fixed, self._launch = paths, tuple(fixed), launch
        self._objective, self._told, self._clock = objective, told, clock
        self._overview = Overview(paths.root.parent, paths.root.name, launch.scheduler)

    def __call__(self, asked: Sequence[Sequence[str]]) -> list[Result]:
        """A result for each point, in their order, once all are over; `StudyInterrupted` after a signal."""
        self._leave_if_told({})
        looked = [self._look(overrides) for overrides in asked]
        failures = self._carry_out({one.point.name: one for one in looked if isinstance(one, PlannedTrial)})
        return [self._result(one, failures) for one in looked]

    def _look(self, overrides: Sequence[str]) -> PlannedTrial | RollcallError:
        """The point as it stands, on record from now on; or what is wrong with it."""
        try:
            point = spell_point(overrides, self._fixed)
            prepared = prepare_sweep(Expansion(self._fixed, (point,)), self._launch.check, self._launch.scheduler)
        except RollcallError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error
        shared_files.write_document(self._paths.manifest, prepared.manifest)
        return prepared.entries[0]

    def _carry_out(self, entries: dict[str, PlannedTrial]) -> dict[str, RollcallError]:
        """Have each of them over; why those that did not finish did not."""
        jobs, failures = dict[str, TrialJob](), dict[str, RollcallError]()
        for name, entry in entries.items():
            self._leave_if_told(jobs)
            if entry.standing == "live":
                jobs[name] = self._found(entry)
                print(f"{entry.point}: it is live already", flush=True)
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
        """Start the point's job. What a scheduler refused for one, it is not asked for the next."""
        name, kept = entry.point.name, sweep_manifest.load_manifest(self._paths)
        assert kept is not None
        refusal = next((error for error in failures.values() if isinstance(error, SchedulerError)), None)
        try:
            if refusal is not None:
                raise refusal
            print(f"{entry.point}: {name}", flush=True)
            if entry.config.cluster.kind == "local":
                jobs[name], job = LocalTrialJob(entry.config, plan), "local"
            else:
                job = self._launch.submit(entry.config, plan)
                print(f"  job {job}", flush=True)
                jobs[name] = SlurmTrialJob(self._paths.point(name), job, self._launch.scheduler(), found=False)
        except RollcallError as error:
            failures[name] = error
            note_submission(self._paths, kept, entry.point, refused=str(error))
            print(f"error: {entry.point}: {error}", file=sys.stderr, flush=True)
        else:
            note_submission(self._paths, kept, entry.point, job=job)

    def _found(self, entry: PlannedTrial) -> TrialJob:
        """The job of a point that is live already."""
        run = self._paths.point(entry.point.name)
        job = run_registry.submitted_job(run)
        if job is None or job.kind == "local":
            return RemoteTrialJob(run)
        return SlurmTrialJob(run, job.job, self._launch.scheduler(), found=True)

    def _await(self, jobs: dict[str, TrialJob]) -> dict[str, RunSummary]:
        """Show the table until all these jobs are over, or one that was found live is; those that are over.

        A signal ends them all, then raises.
        """

        def over(lines: Iterable[RunSummary]) -> dict[str, RunSummary]:
            return {line.name: line for line in lines if line.name in jobs and line.live is False}

        def enough(lines: Sequence[RunSummary]) -> bool:
            ended = over(lines)
            return bool(self._told) or len(ended) == len(jobs) or any(jobs[name].found for name in ended)

        lines = follow_table(_JobTable(self._overview, jobs), clock=self._clock, until=enough)
        self._leave_if_told(jobs)
        return over(lines)

    def _conclude(self, point: Trial, line: RunSummary, jobs: dict[str, TrialJob]) -> RollcallError | None:
        """Say how the job of a point ended, and drop it; why the point did not finish, unless it is started again."""
        job = jobs.pop(point.name)
        print(f"{point}:", flush=True)
        code = job.conclude()
        if code == 0:
            return None
        if isinstance(job, LocalTrialJob) and code in INTERRUPTED:
            self._stop(jobs)
            raise StudyInterrupted(code)
        failures: dict[str, RollcallError] = {}
        if job.found:
            again = self._look(point.overrides)
            if isinstance(again, RollcallError):
                return again
            if again.plan is not None:
                self._start(again, again.plan, jobs, failures)
            return failures.get(point.name)
        return SweepError(f"{point}: {line.state}" + (f": {line.failure}" if line.failure else ""))

    def _leave_if_told(self, jobs: dict[str, TrialJob]) -> None:
        """After a signal, end these jobs and raise `StudyInterrupted`."""
        if self._told:
            if jobs:
                said = "what was started makes a checkpoint, however long that takes, and stops"
                print(f"{self._told[0].name}: {said}; a second signal ends it at once", file=sys.stderr, flush=True)
            self._stop(jobs)
            raise StudyInterrupted(exit_code(self._told[0]))

    def _stop(self, jobs: dict[str, TrialJob]) -> None:
        """End what this command has started and what Slurm has of it; a second signal kills what runs here."""
        here = [job for job in jobs.values() if isinstance(job, LocalTrialJob)]
        why = describe(self._told[0]) if self._told else "another point of the sweep was interrupted"
        for job in here:
            job.cancel(why)
        for job in here:
            job.end(at_once=lambda: len(self._told) > 1)
        if queued := [job.run for job in jobs.values() if isinstance(job, SlurmTrialJob)]:
            cancel(queued, self._launch.scheduler, self._clock)

    def _result(self, looked: PlannedTrial | RollcallError, failures: dict[str, RollcallError]) -> Result:
        if isinstance(looked, RollcallError):
            return looked
        point = looked.point
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
    """The overview of a sweep some of whose jobs are this process's: those that are over are let go of first."""

    def __init__(self, overview: Overview, jobs: dict[str, TrialJob]) -> None:
        self._overview, self._jobs = overview, jobs

    @property
    def source(self) -> str:
        return self._overview.source

    def look(self) -> list[RunSummary]:
        for job in self._jobs.values():
            job.reap()
        return self._overview.look()
