"""Runs and sweeps that a table shows."""

from pathlib import Path

from pipeline.run.paths import SweepPaths
from pipeline.utils import shared_files
from slurm.registry import run_registry, sweep_manifest
from slurm.registry.sweep_manifest import SweepManifest
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun
from tests.fakes.scheduler import FakeScheduler

TRAINING = {"steps": 60, "prompts_per_step": 4, "max_lag": 2, "sft": {"steps": 20}}


def make_run(folder: Path, steps: int = 0, job: str = "1") -> FakeRun:
    run = FakeRun(folder, make_config(name=folder.name, training=TRAINING))
    if steps:
        attempt = run.attempt(f"{job}-0")
        attempt.meet()
        attempt.all_roles("starting", "ready")
        attempt.train("rl", range(1, steps + 1), eval_every=10)
    return run


def make_sweep(folder: Path, *overrides: str) -> SweepManifest:
    sweep = sweep_manifest.extended(None, [], [[text] for text in overrides])
    shared_files.write_document(SweepPaths(folder).manifest, sweep)
    return sweep


def queued(run: FakeRun, scheduler: FakeScheduler, state: str = "RUNNING", reason: str = "") -> str:
    job = scheduler.submit(run.root.name, state=state)
    scheduler.set(job, state, reason)
    run_registry.record_job(run.paths, "slurm", job)
    return job
