"""All runs below a directory, a line each.

Owns what a line says and where it comes from. Promises that it only reads, that a run which cannot be read is a line
and no error, and that it knows whether the scheduler answered or the files stand alone. Must not know how it is shown.

    Overview(Path("runs"), scheduler=find_slurm).look()
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import ConfigError, RollcallError, SchedulerError
from pipeline.observability.run_history import attempt_names
from pipeline.run.paths import RUN, SWEEP, RunPaths, SweepPaths
from pipeline.run.run_documents import RunIdentity, SubmittedJob
from slurm.monitor.run_snapshot import Snapshot
from slurm.monitor.run_watcher import Watcher
from slurm.registry import run_registry, sweep_manifest
from slurm.scheduler.scheduler_protocol import QueuedJob, Scheduler

NEVER, UNREADABLE = "not submitted", "unreadable"


@dataclass(frozen=True)
class RunSummary:
    """One run.

    Attributes:
        sweep, name: where it is below the output directory; `sweep` is empty for a run of its own.
        job: id of the job that was submitted last.
        scheduler: what the scheduler says of that job now; empty when it was not asked or knows nothing.
        state: as `slurm.monitor.run_snapshot` reads it from the files, `not submitted`, or `unreadable`.
        live: whether its job runs or may run; None when that could not be told.
        stage, step, steps: the part that trains (`sft` or `rl`), the steps done and wanted.
        reward, accuracy: the latest mean reward and held-out accuracy.
        attempts: how many there were.
        age: seconds since the run was made; None before.
        failure: why it failed, was refused, or cannot be read, in one line.
    """

    sweep: str
    name: str
    job: str = ""
    scheduler: str = ""
    state: str = NEVER
    live: bool | None = False
    stage: str = ""
    step: int | None = None
    steps: int | None = None
    reward: float | None = None
    accuracy: float | None = None
    attempts: int = 0
    age: float | None = None
    failure: str = ""

    @property
    def path(self) -> str:
        """How launchers call it: `run=<path>`."""
        return f"{self.sweep}/{self.name}" if self.sweep else self.name


@dataclass(frozen=True)
class _Run:
    """A run before the scheduler was asked; `line` is set where there is nothing to ask."""

    sweep: str
    paths: RunPaths
    refused: str = ""
    identity: RunIdentity | None = None
    job: SubmittedJob | None = None
    line: RunSummary | None = None


class Overview:
    """All runs below `output`, or those of one sweep; a run that finished is read only once.

    Each look asks the scheduler one question, about all jobs that it has not yet called over. `source` says what the
    lines of the last look are based on.
    """

    def __init__(self, output: Path, sweep: str = "", scheduler: Callable[[], Scheduler] | None = None) -> None:
        """`scheduler` is called when the first job of one is met; it may raise that there is none."""
        self._output, self._sweep, self._make = output, sweep, scheduler
        self._scheduler: Scheduler | None = None
        self._finished: dict[Path, RunSummary] = {}
        self._over: dict[Path, tuple[SubmittedJob, QueuedJob | None]] = {}
        self._watchers: dict[Path, tuple[RunIdentity, Watcher]] = {}
        self.source = "files"

    def look(self) -> list[RunSummary]:
        """The lines now: runs of their own by name, then the points of each sweep by number."""
        found = [] if self._sweep else [self._find("", file.parent) for file in _found(self._output, RUN)]
        sweeps = [self._sweep] if self._sweep else [file.parent.name for file in _found(self._output, SWEEP)]
        for name in sweeps:
            found += self._points(SweepPaths(self._output / name))
        answers = self._ask([run for run in found if run.line is None and run.job and run.job.kind == "slurm"])
        return [run.line or self._line(run, answers) for run in found]

    def _points(self, paths: SweepPaths) -> Iterator[_Run]:
        try:
            kept = sweep_manifest.load_manifest(paths)
        except RollcallError as error:
            yield _unreadable(_Run("", RunPaths(paths.root)), error)
            return
        for point in kept.points if kept else ():
            yield self._find(paths.root.name, paths.point(point.name).root, point.refused)

    def _find(self, sweep: str, folder: Path, refused: str = "") -> _Run:
        """What the files say of the run before its scheduler is asked."""
        run = _Run(sweep, RunPaths(folder), refused)
        if folder in self._finished:
            return replace(run, line=self._finished[folder])
        try:
            if not run.paths.run.exists():
                return replace(run, line=RunSummary(sweep, folder.name, failure=refused))
            return replace(run, identity=run_registry.identity(run.paths), job=run_registry.submitted_job(run.paths))
        except (RollcallError, OSError) as error:
            return _unreadable(run, error)

    def _ask(self, found: Sequence[_Run]) -> Mapping[str, QueuedJob] | None:
        """What the scheduler says of the jobs of these runs by id; None when it gave no answer."""
        self.source = "files"
        if not found or self._make is None:
            return None
        ids = [run.job.job for run in found if run.job and self._known_end(run) is None]
        try:
            self._scheduler = self._scheduler or self._make()
            answers = self._scheduler.known(ids) if ids else {}
        except (SchedulerError, ConfigError) as error:
            self.source = f"files alone; the scheduler gave no answer: {error}"
            return None
        self.source = "the scheduler and files"
        for run in found:
            queued = answers.get(run.job.job) if run.job else None
            if run.job and run.job.job in ids and (queued is None or not queued.live):
                self._over[run.paths.root] = run.job, queued
        return answers

    def _known_end(self, run: _Run) -> tuple[SubmittedJob, QueuedJob | None] | None:
        """What the scheduler said last of a job that it called over, or did not know."""
        known = self._over.get(run.paths.root)
        return known if known and known[0] == run.job else None

    def _line(self, run: _Run, answers: Mapping[str, QueuedJob] | None) -> RunSummary:
        """The run with what its scheduler said."""
        try:
            line = self._read(run, answers)
        except (RollcallError, OSError) as error:
            return _unreadable(run, error).line or RunSummary(run.sweep, run.paths.root.name)
        if line.state == "finished":
            self._finished[run.paths.root] = line
            self._watchers.pop(run.paths.root, None)
        return line

    def _read(self, run: _Run, answers: Mapping[str, QueuedJob] | None) -> RunSummary:
        queued, live = self._standing(run, answers)
        now = self._watcher(run).look(live)
        return RunSummary(
            sweep=run.sweep,
            name=run.paths.root.name,
            job=run.job.job if run.job and run.job.kind == "slurm" else "",
            scheduler=queued.word if queued else "",
            state=now.state if now.ended or live is not False else "interrupted",
            live=False if now.state == "finished" else live,
            stage=(now.progress.file or now.progress.job) if now.progress else "",
            step=now.progress.step if now.progress else None,
            steps=now.progress.steps if now.progress else None,
            reward=now.rewards[-1] if now.rewards else None,
            accuracy=now.accuracies[-1][1] if now.accuracies else None,
            attempts=len(attempt_names(run.paths)),
            age=time.time() - run.identity.created if run.identity else None,
            failure=_failure_text(run, now, live),
        )

    def _watcher(self, run: _Run) -> Watcher:
        """One for each run, so that its metrics are read only once."""
        known = self._watchers.get(run.paths.root)
        if known is None or known[0] != run.identity:
            assert run.identity
            known = self._watchers[run.paths.root] = run.identity, Watcher(run.paths.root)
        return known[1]

    def _standing(self, run: _Run, answers: Mapping[str, QueuedJob] | None) -> tuple[QueuedJob | None, bool | None]:
        """The job as its scheduler sees it, and whether the run is live; None where only a scheduler could tell."""
        if run.job is None or run.job.kind == "local":
            return None, run_registry.is_live_here(run.paths)
        over = self._known_end(run)
        if over is None and answers is None:
            return None, None
        queued = over[1] if over else answers.get(run.job.job) if answers else None
        if queued is None or not run_registry.is_job_of(run.paths, queued):
            return None, False
        return queued, queued.live


def _failure_text(run: _Run, now: Snapshot, live: bool | None) -> str:
    """Why the run failed, or why its last submission was refused; empty while it is well."""
    if now.state == "failed":
        return now.reason
    return run.refused if live is False and now.state != "finished" else ""


def _unreadable(run: _Run, error: Exception) -> _Run:
    """A run of which nothing can be told; what the disk refused now it may give later."""
    live = None if isinstance(error, OSError) else False
    return replace(
        run, line=RunSummary(run.sweep, run.paths.root.name, state=UNREADABLE, live=live, failure=str(error))
    )


def _found(output: Path, name: str) -> list[Path]:
    return sorted(output.glob(f"*/{name}"))
