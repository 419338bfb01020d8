"""One attempt of the trainer of a run that executes job files, from the first remaining job to `training_finished`.

Owns the appearance of such jobs in their run: rows of its metrics, the trainer's status, and the marks by which the
requeue recognizes that an attempt saved a checkpoint, or that no job is left. Promises that a superseded attempt starts
no further job. Must not know how a job is executed.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from pipeline.checkpoints import Fence, root_of
from pipeline.checkpoints.run_progress import mark_job_checkpointed, new_aside_folder, refuse_lost_state
from pipeline.roles.rank0 import Rank0
from pipeline.roles.role_context import RoleContext
from pipeline.run.metrics_log import FileStep, MetricSinks, roll_back_file
from pipeline.run.run_documents import SubmittedJob
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.group_batches import Interrupted, Pulse
from pipeline.train.offline.job_execution import run_job_files
from pipeline.train.offline.job_observer import Observer
from pipeline.train.train_jobs import Job
from pipeline.utils import shared_files

log = logging.getLogger(__name__)


class OfflineSession(Rank0):
    """Rank 0's part of one attempt."""

    def __init__(self, context: RoleContext, dispatch: RankGroup) -> None:
        super().__init__(context, dispatch)
        self._fence = Fence(root_of(context.config, context.run, context.paths.run_id), context.paths.attempt)

    def run(self) -> None:
        """Execute all remaining jobs; `TrainingError` at the end if one failed."""
        submitted = shared_files.read_document(self._context.run.job, SubmittedJob)
        self._fence.claim(submitted.job if submitted else "")
        self._fence.keep(())  # the run itself has no checkpoints: each job has separate ones
        with ExitStack() as opened:
            sinks = self._open_sinks(opened, self._fence.check)
            self._get_ready("looking for jobs")
            observer = RunObserver(self._context, self._fence, sinks, self._pulse)
            try:
                run_job_files(Path(self._config.training.jobs), self._dispatch, self._config, self._pulse, observer)
            except Interrupted as reason:
                log.info("%s; the finished work is saved", reason)
                return
        self._finish()


class RunObserver(Observer):
    """Reports the progress of jobs to their run."""

    def __init__(self, context: RoleContext, fence: Fence, sinks: MetricSinks, pulse: Pulse) -> None:
        self._context, self._fence, self._sinks, self._pulse = context, fence, sinks, pulse
        self._marked = False
        self._state = self._job = ""
        self._step = 0
        self._at = FileStep("", 0, 0, 0)

    def before_claim(self) -> None:
        self._pulse()  # an attempt that is ending begins no further job
        self._fence.check()

    def began(self, file: Path, job: Job, done: int) -> None:
        self._at = FileStep(file.stem, file.stat().st_mtime_ns, done, job.steps)
        self._state, self._job = job.optimizer_state, f"{self._at.file}-{self._at.written}"
        saved = refuse_lost_state(self._context.run, self._state, self._job, done)
        self._step = self._roll_back(is_behind=saved > done)
        self._report()

    def _roll_back(self, *, is_behind: bool) -> int:
        """Drop the rows of steps that are trained again; returns the last step that still has a row.

        If a damaged checkpoint had covered some of those steps, their rows are moved aside.
        """
        run = self._context.run
        aside = new_aside_folder(run) / run.metrics.name if is_behind else None
        if aside:
            name, done = self._at.file, self._at.done
            log.warning(
                "%s continues from step %d, since newer checkpoints are damaged: rows are moved to %s",
                name,
                done,
                aside,
            )
        return roll_back_file(run.metrics, self._at, self._fence.check, aside)

    def checkpoint_begins(self) -> None:
        self._sinks.flush()

    def checkpoint_completed(self) -> None:
        if not self._marked:
            self._marked = _touch_mark(self._context.paths.checkpointed)
        mark_job_checkpointed(self._context.run, self._state, self._job, self._at.done)

    def exhausted(self) -> None:
        _touch_mark(self._context.paths.exhausted)

    def stepped(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        self._step += 1
        self._at = FileStep(self._at.file, self._at.written, step, job.steps)
        self._sinks.log("train", job.kind, self._step, metrics, self._at)
        self._report()

    def _report(self) -> None:
        self._context.report("ready", f"{self._at.file} step {self._at.done} of {self._at.of}")


def _touch_mark(mark: Path) -> bool:
    """Create a mark. A failing disk costs no step: at worst the requeue decides without the mark."""
    try:
        mark.touch()
    except OSError as error:
        log.warning("%s could not be created: %s", mark, error)
        return False
    return True
