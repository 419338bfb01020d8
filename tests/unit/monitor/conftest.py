"""What the tests of watching share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeAttempt, FakeRun
from tests.fakes.scheduler import FakeScheduler

TRAINING = {"steps": 60, "prompts_per_step": 4, "max_lag": 2, "sft": {"steps": 20}}


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FakeRun]:
    """A local run whose launcher lives."""
    with FakeRun(tmp_path / "demo", make_config(name="demo", training=TRAINING)).launched() as made:
        yield made


@pytest.fixture
def left(tmp_path: Path) -> FakeRun:
    """A run that no process of this machine has."""
    return FakeRun(tmp_path / "left", make_config(name="left", training=TRAINING))


@pytest.fixture
def attempt(run: FakeRun) -> FakeAttempt:
    return run.attempt("local1-0")
