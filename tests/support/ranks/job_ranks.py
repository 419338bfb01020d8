"""What each rank runs for `test_jobs`: one job, and if it is asked to, a stop where it will be killed."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.train.batching.packing import Budget
from pipeline.train.controller.lead_or_serve import run_controller_or_worker
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines
from pipeline.train.offline.job_execution import JobExecution, run_job_file
from tests.support.models.jobs import STEPS, config_of

KILLED_AT = "here"
"""A file that says that the job is at its last step, with commits behind it."""


def execute_on_rank(rank: int, file: Path, model: Path, stop: bool = False) -> None:
    def algorithm(dispatch: RankGroup) -> None:
        if stop:
            stop_at_the_last_step(file.parent / KILLED_AT)
        run_job_file(file, dispatch, config_of(model, checkpoint_every=1))

    run_controller_or_worker(algorithm, Budget(tokens=64), patience=Deadlines(operation=30, control=30, grace=2))


def stop_at_the_last_step(mark: Path) -> None:
    """Once all steps but one are committed and the last is done, wait to be killed."""
    note = JobExecution.note

    def noting(execution: JobExecution, job: Any, step: int, metrics: Mapping[str, float]) -> None:
        note(execution, job, step, metrics)
        if step == STEPS:
            mark.touch()
            time.sleep(60)

    JobExecution.note = noting  # type: ignore[method-assign]
