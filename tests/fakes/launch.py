"""A launcher of points that submits to a scheduler in memory."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.errors import SchedulerError
from pipeline.run.paths import SweepPaths
from pipeline.run.run_documents import Finished, SubmittedJob
from pipeline.topology.plan import Plan, make_plan
from pipeline.utils import shared_files
from slurm.registry import run_registry
from slurm.scheduler.scheduler_protocol import JobQueue
from slurm.submission.submit_sweep import PointLauncher
from tests.fakes.scheduler import FakeScheduler


@dataclass
class FakeLaunch:
    """Submits to a scheduler in memory; `refused` names the runs that it refuses, `codes` how local runs end."""

    scheduler: FakeScheduler = field(default_factory=FakeScheduler)
    refused: set[str] = field(default_factory=set)
    codes: dict[str, int] = field(default_factory=dict)
    submitted: list[str] = field(default_factory=list)
    shown: list[tuple[str, bool]] = field(default_factory=list)

    @property
    def launch(self) -> PointLauncher:
        return PointLauncher(self.check, self.show, self.run, self.submit, self.find)

    def check(self, config: RunConfig) -> Plan:
        run_registry.examine(config, self.find)
        return make_plan(config)

    def show(self, config: RunConfig, plan: Plan, whole: bool) -> None:
        self.shown.append((config.name, whole))

    def run(self, config: RunConfig, plan: Plan) -> int:
        self.submitted.append(config.name)
        with run_registry.claimed_run(config, self.find) as run:
            code = self.codes.get(config.name, 0)
            if code == 0:
                shared_files.write_document(run.finished, Finished(time=time.time(), steps=1, attempt="local-0"))
        return code

    def submit(self, config: RunConfig, plan: Plan) -> str:
        with run_registry.claimed_run(config, self.find) as run:
            if config.name in self.refused:
                raise SchedulerError("sbatch: job submit limit reached")
            job = self.scheduler.submit(config.name, comment=f"rollcall {run_registry.identity(run).run_id}")
            run_registry.record_job(run, "slurm", job)
        self.submitted.append(config.name)
        return job

    def find(self, name: str) -> JobQueue:
        assert name == "slurm"
        return self.scheduler

    def end(self, output: Path, name: str, state: str = "FAILED") -> None:
        """The job of a point is over; `COMPLETED` finishes its run."""
        run = SweepPaths(output / "lr").point(name)
        record = shared_files.read_document(run.job, SubmittedJob)
        assert record
        self.scheduler.set(record.job, state)
        if state == "COMPLETED":
            shared_files.write_document(run.finished, Finished(time=time.time(), steps=1, attempt=f"{record.job}-0"))
