"""All runs below a directory, with a summary line each.

Owns the content of a line and its sources. Promises that it only reads, that an unreadable run is a line and no error,
and that `source` names whether the scheduler answered. Must not know the rendering.

    Overview(Path("runs"), connect=connect_scheduler).look()
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import ConfigError, RollcallError, SchedulerError
from pipeline.observability.run_history import attempt_names
from pipeline.run.paths import RUN, SWEEP, RunPaths, SweepPaths
from pipeline.run.run_documents import RunIdentity, SubmittedJob
from slurm.monitor.run_snapshot import Snapshot
from slurm.monitor.run_watcher import Watcher
from slurm.registry import run_registry, sweep_manifest
from slurm.scheduler.scheduler_protocol import Connect, JobQueue, QueuedJob

NEVER, UNREADABLE = "not submitted", "unreadable"
Answers = dict[tuple[str, str], QueuedJob]
"""The states of jobs by scheduler and id: two schedulers may use the same id."""


@dataclass(frozen=True)
class RunSummary:
    """The summary line of one run.

    Attributes:
        sweep, name: its path below the output directory; `sweep` is empty for a run outside a sweep.
        job: id of the job that was submitted last.
        scheduler: the scheduler's current state of that job; empty without an answer.
        state: the state of `slurm.monitor.run_snapshot`, `not submitted`, or `unreadable`.
        live: whether its job runs or may run; None if unknown.
        stage, step, steps: the training job (`sft` or `rl`), its completed steps, and its total steps.
        reward, accuracy: the latest mean reward and held-out accuracy.
        attempts: the number of attempts.
        age: seconds since the run was created; None before.
        failure: why the run failed, was refused, or cannot be read, in one line.
        attached: the number of its attached servers that are ready.
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
    attached: int = 0

    @property
    def path(self) -> str:
        """The run's path in commands: `run=<path>`."""
        return f"{self.sweep}/{self.name}" if self.sweep else self.name


@dataclass(frozen=True)
class _Run:
    """A run before the query to the scheduler; `line` is set if the run needs no query."""

    sweep: str
    paths: RunPaths
    refused: str = ""
    identity: RunIdentity | None = None
    job: SubmittedJob | None = None
    line: RunSummary | None = None


class Overview:
    """All runs below `output`, or those of one sweep. A finished run is read only once.

    Each `look` sends one query to each scheduler, for all jobs that are not over by an earlier answer. `source` names
    the sources of the last result.
    """

    def __init__(self, output: Path, sweep: str = "", connect: Connect | None = None) -> None:
        """`connect` is called once a run has a job of a scheduler; it may raise that there is none."""
        self._output, self._sweep, self._connect = output, sweep, connect
        self._queues: dict[str, JobQueue] = {}
        self._finished: dict[Path, RunSummary] = {}
        self._over: dict[Path, tuple[SubmittedJob, QueuedJob | None]] = {}
        self._watchers: dict[Path, tuple[RunIdentity, Watcher]] = {}
        self.source = "files"

    def look(self) -> list[RunSummary]:
        """The current lines: runs outside sweeps by name, then the points of each sweep by number."""
        runs = [] if self._sweep else [self._find("", file.parent) for file in _files(self._output, RUN)]
        sweeps = [self._sweep] if self._sweep else [file.parent.name for file in _files(self._output, SWEEP)]
        for name in sweeps:
            runs += self._points(SweepPaths(self._output / name))
        answers = self._ask([run for run in runs if run.line is None and run.job and run.job.queued])
        return [run.line or self._line(run, answers) for run in runs]

    def _points(self, paths: SweepPaths) -> Iterator[_Run]:
        try:
            manifest = sweep_manifest.load_manifest(paths)
        except RollcallError as error:
            yield _unreadable(_Run("", RunPaths(paths.root)), error)
            return
        for point in manifest.points if manifest else ():
            yield self._find(paths.root.name, paths.point(point.name).root, point.refused)

    def _find(self, sweep: str, folder: Path, refused: str = "") -> _Run:
        """The run from its files, before the query to its scheduler."""
        run = _Run(sweep, RunPaths(folder), refused)
        if folder in self._finished:
            return replace(run, line=self._finished[folder])
        try:
            if not run.paths.run.exists():
                return replace(run, line=RunSummary(sweep, folder.name, failure=refused))
            return replace(run, identity=run_registry.identity(run.paths), job=run_registry.submitted_job(run.paths))
        except (RollcallError, OSError) as error:
            return _unreadable(run, error)

    def _ask(self, runs: Sequence[_Run]) -> Answers | None:
        """The schedulers' states of these runs' jobs; None if a scheduler did not answer."""
        self.source = "files"
        if not runs or self._connect is None:
            return None
        jobs = [run.job for run in runs if run.job and self._known_end(run) is None]
        answers: Answers = {}
        try:
            for name in dict.fromkeys(run.job.kind for run in runs if run.job):
                queue = self._queues[name] = self._queues.get(name) or self._connect(name)
                ids = [job.job for job in jobs if job.kind == name]
                answers |= {(name, job): queued for job, queued in queue.known(ids).items()} if ids else {}
        except (SchedulerError, ConfigError) as error:
            self.source = f"files alone; the scheduler gave no answer: {error}"
            return None
        self.source = "the scheduler and files"
        for run in runs:
            queued = _answer(run.job, answers)
            if run.job in jobs and run.job and (queued is None or not queued.live):
                self._over[run.paths.root] = run.job, queued
        return answers

    def _known_end(self, run: _Run) -> tuple[SubmittedJob, QueuedJob | None] | None:
        """The scheduler's last state of a job that is over, or unknown to it."""
        known = self._over.get(run.paths.root)
        return known if known and known[0] == run.job else None

    def _line(self, run: _Run, answers: Answers | None) -> RunSummary:
        """The run's line, with its scheduler's answer."""
        try:
            line = self._read(run, answers)
        except (RollcallError, OSError) as error:
            return _unreadable(run, error).line or RunSummary(run.sweep, run.paths.root.name)
        if line.state == "finished":
            self._finished[run.paths.root] = line
            self._watchers.pop(run.paths.root, None)
        return line

    def _read(self, run: _Run, answers: Answers | None) -> RunSummary:
        queued, live = self._standing(run, answers)
        now = self._watcher(run).look(live)
        return RunSummary(
            sweep=run.sweep,
            name=run.paths.root.name,
            job=run.job.job if run.job and run.job.queued else "",
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
            attached=sum(role.attached > 0 and role.state == "ready" for role in now.roles),
        )

    def _watcher(self, run: _Run) -> Watcher:
        """The run's watcher, which is kept so that metrics are read only once."""
        known = self._watchers.get(run.paths.root)
        if known is None or known[0] != run.identity:
            assert run.identity
            known = self._watchers[run.paths.root] = run.identity, Watcher(run.paths.root)
        return known[1]

    def _standing(self, run: _Run, answers: Answers | None) -> tuple[QueuedJob | None, bool | None]:
        """The job's state at its scheduler, and whether the run is live; None if the scheduler did not answer."""
        if run.job is None or not run.job.queued:
            return None, run_registry.is_live_here(run.paths)
        over = self._known_end(run)
        if over is None and answers is None:
            return None, None
        queued = over[1] if over else _answer(run.job, answers)
        if queued is None or not run_registry.is_job_of(run.paths, queued):
            return None, False
        return queued, queued.live


def _answer(job: SubmittedJob | None, answers: Answers | None) -> QueuedJob | None:
    return answers.get((job.kind, job.job)) if job and answers else None


def _failure_text(run: _Run, now: Snapshot, live: bool | None) -> str:
    """Why the run failed, or why its last submission was refused; empty otherwise."""
    if now.state == "failed":
        return now.reason
    return run.refused if live is False and now.state != "finished" else ""


def _unreadable(run: _Run, error: Exception) -> _Run:
    """The run with an `unreadable` line. After an error of the disk it may be live, so `live` is None."""
    live = None if isinstance(error, OSError) else False
    return replace(
        run, line=RunSummary(run.sweep, run.paths.root.name, state=UNREADABLE, live=live, failure=str(error))
    )


def _files(output: Path, name: str) -> list[Path]:
    return sorted(output.glob(f"*/{name}"))
