"""Runs that the tests of the report share."""

from pathlib import Path

import pytest

from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun

TRAINING = {"steps": 60, "prompts_per_step": 4, "max_lag": 2, "sft": {"steps": 20}}


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "demo", make_config(name="demo", training=TRAINING))


@pytest.fixture
def finished(run: FakeRun) -> FakeRun:
    """A run that was cut off at step 40, went on from its commit of step 30, and was finished by its second attempt."""
    first = run.attempt("local1-0")
    first.meet()
    first.all_roles("starting", "ready")
    first.train("sft", range(1, 21))
    first.train("rl", range(41), eval_every=20)
    first.tell("draining", "agent.0", "SIGTERM")
    first.all_roles("stopping", "stopped")
    run.now += 3600
    second = run.attempt("local2-0")
    second.meet()
    second.all_roles("starting", "ready")
    second.train("rl", range(31, 61), eval_every=20)
    second.tell("training_finished", "trainer.0")
    second.all_roles("stopping", "stopped")
    run.finish(60)
    return run
