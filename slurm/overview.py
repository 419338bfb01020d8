"""All runs below a directory, a line each.

Owns what a line says and where it comes from. Promises that it only reads, that a run which cannot be read is a line
and no error, and that it knows whether the scheduler answered or the files stand alone. Must not know how it is shown.

    Overview(Path("runs"), scheduler=find_slurm).look()
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline import files
from pipeline.errors import ConfigError, SchedulerError
from pipeline.paths import RunPaths, SweepPaths
from pipeline.records import RunIdentity, SubmittedJob
from pipeline.report.history import attempt_names
from pipeline.report.state import ENDED
from slurm import manifest, runs
from slurm.scheduler import QueuedJob, Scheduler
from slurm.watcher import snapshot

NEVER = "not submitted"


@dataclass(frozen=True)
class Line:
    """One run.

    Attributes:
        sweep, name: where it is below the output directory; `sweep` is empty for a run of its own.
        job: id of the job that was submitted last.
        scheduler: what the scheduler says of that job now; empty when it was not asked or knows nothing.
        state: as `slurm.snapshot` reads it from the files, or `not submitted`.
        live: whether its job runs or may run; None when only the scheduler could tell and did not.
        stage, step, steps: the part that trains (`sft` or `rl`), the steps done and wanted.
        reward, accuracy: the latest mean reward and held-out accuracy.
        attempts: how many there were.
        age: seconds since the run was made; None before.
        failure: the first failure in one line, if its newest attempt failed, or why its submission was refused.
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


class Overview:
    """All runs below `output`, or those of one sweep; a run that finished is read only once.

    `source` says what the lines of the last look rest on.
    """

    def __init__(self, output: Path, sweep: str = "", scheduler: Callable[[], Scheduler] | None = None) -> None:
        """`scheduler` is called when the first job of one is met; it may raise that there is none."""
        self._output, self._sweep, self._make = output, sweep, scheduler
        self._scheduler: Scheduler | None = None
        self._trouble = ""
        self._finished: dict[Path, Line] = {}
        self.source = "files"

    def look(self) -> list[Line]:
        """The lines now: runs of their own by name, then the points of each sweep by number."""
        self._trouble, self.source = "", "files"
        lines = [] if self._sweep else [self._line("", file.parent) for file in _found(self._output, "run.json")]
        sweeps = [self._sweep] if self._sweep else [file.parent.name for file in _found(self._output, "sweep.json")]
        for name in sweeps:
            lines += self._points(SweepPaths(self._output / name))
        return lines

    def _points(self, paths: SweepPaths) -> Iterator[Line]:
        kept = manifest.read(paths)
        for point in kept.points if kept else ():
            yield self._line(paths.root.name, paths.point(point.name).root, point.refused)

    def _line(self, sweep: str, folder: Path, refused: str = "") -> Line:
        if folder in self._finished:
            return self._finished[folder]
        run = RunPaths(folder)
        identity = files.read_document(run.run, RunIdentity)
        if identity is None:
            return Line(sweep, folder.name, failure=refused)
        line = self._read(sweep, run, identity, refused)
        if line.state == "finished":
            self._finished[folder] = line
        return line

    def _read(self, sweep: str, run: RunPaths, identity: RunIdentity, refused: str) -> Line:
        job = files.read_document(run.job, SubmittedJob)
        queued = self._ask(run, job) if job and job.kind == "slurm" and not run.finished.exists() else None
        live = self._is_live(run, job, queued)
        now = snapshot(run.root, live)
        done = now.state in ENDED
        return Line(
            sweep=sweep,
            name=run.root.name,
            job=job.job if job else "",
            scheduler=queued.word if queued else "",
            state=now.state if done or live is not False else "interrupted",
            live=live and now.state != "finished",
            stage=now.progress.job if now.progress else "",
            step=now.progress.step if now.progress else None,
            steps=now.progress.steps if now.progress else None,
            reward=now.rewards[-1] if now.rewards else None,
            accuracy=now.accuracies[-1][1] if now.accuracies else None,
            attempts=len(attempt_names(run)),
            age=time.time() - identity.created,
            failure=now.failure.one_line() if now.failure and now.state == "failed" else refused,
        )

    def _ask(self, run: RunPaths, job: SubmittedJob) -> QueuedJob | None:
        """What the scheduler says; when it gives no answer it is not asked again in the same look."""
        if self._make is None or self._trouble:
            return None
        try:
            self._scheduler = self._scheduler or self._make()
            queued = self._scheduler.job(job.job)
            queued = queued if queued and runs.is_job_of(run, queued) else None
        except (SchedulerError, ConfigError) as error:
            self._trouble = str(error)
            self.source = f"files alone; the scheduler gave no answer: {error}"
            return None
        self.source = "the scheduler and files"
        return queued

    def _is_live(self, run: RunPaths, job: SubmittedJob | None, queued: QueuedJob | None) -> bool | None:
        if queued is not None:
            return queued.live
        if job and job.kind == "slurm":
            return None if self._trouble or self._make is None else False
        return runs.is_live_here(run)


def _found(output: Path, name: str) -> list[Path]:
    return sorted(output.glob(f"*/{name}"))
