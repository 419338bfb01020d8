"""Runs that do the jobs of files: started as a user starts them, interrupted, gone on with, failed.

python -m pytest -m trial tests/integration/test_job_runs.py interrupts one on two nodes.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.run.metrics_log import read_rows
from tests.patience import WAIT_SECONDS
from tests.support.models.jobs import STEPS, assert_same, events, write_job
from tests.support.runs.launched import Launched, Launches

pytestmark = [pytest.mark.integration, pytest.mark.slow]
LONG = 300
Start = Callable[..., Launched]


@pytest.fixture
def start(model: Path, launches: Launches) -> Start:
    """Starts `launchers/train.py` on jobs that begin with `model`."""
    keys = (f"model.path={model}", "model.init=pretrained", "model.max_length=48")

    def start(jobs: Path, *overrides: str, run: str = "") -> Launched:
        return launches.train(jobs, *keys, *overrides, run=run)

    return start


def test_a_folder_is_done_then_the_same_command_does_what_came_meanwhile(start: Start, tmp_path: Path) -> None:
    queue = tmp_path / "queue"
    queue.mkdir()
    write_job(queue, "sft", "1-sft")
    first = start(queue, "resources.trainer.processes=2")
    assert first.end() == 0, first.output()
    assert f"finished {STEPS} steps" in first.output()
    assert f"  jobs        {queue}" in first.output()
    assert events(queue / "1-sft.jsonl") == ["started", *["step"] * STEPS, "finished"]
    assert (queue / "done" / "1-sft.json").exists()

    failing, other = write_job(queue, "rl", "2-rl", checkpoint="gone"), write_job(queue, "sft", "3-sft")
    os.utime(failing, (1e9, 1e9))
    second = start(queue, run="queue-2")
    assert second.end() == 1, second.output()
    assert f"failed: 2-rl.json (see {queue / 'failed'})" in second.output()
    assert (queue / "done" / other.name).exists()
    assert (queue / "2-rl-data").exists()


@pytest.mark.trial
def test_a_run_that_is_interrupted_commits_and_the_same_command_goes_on(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "a = b"
    folder.mkdir()
    schedule = {"steps": LONG, "batch": 5, "optim": {"lr": 1e-3}}
    file = write_job(folder, "sft", schedule=schedule)
    keys = ("training.checkpoint_every=1000", "resources.trainer.nodes=2", "resources.trainer.processes=1")

    def steps(of: Launched) -> list[tuple[int, int]]:
        return [(row["step"], row["done"]) for row in read_rows(of.run.metrics)]

    first = start(file, *keys)
    first.wait("a step", lambda: bool(steps(first)), WAIT_SECONDS)
    first.interrupt(signal.SIGTERM)
    assert first.end() == 143, first.output()
    first.assert_nothing_left()
    assert "the same command resumes it from the last checkpoint of each job" in first.output()
    done = events(file.with_suffix(".jsonl")).count("step")
    assert 0 < done < LONG
    assert events(file.with_suffix(".jsonl"))[-1] == "interrupted"
    assert first.attempts[0].checkpointed.exists()

    second = start(file, *keys)
    second.wait("the end", second.run.finished.exists, WAIT_SECONDS)
    assert second.end() == 0, second.output()
    assert events(file.with_suffix(".jsonl")) == ["started", *["step"] * (LONG - done), "finished"]
    assert steps(second) == [(step, step) for step in range(1, LONG + 1)]
    second.assert_nothing_left()

    (tmp_path / "at once").mkdir()
    third = start(write_job(tmp_path / "at once", "sft", schedule=schedule), *keys, run="sft-2")
    assert third.end() == 0, third.output()
    assert_same(folder / "sft-model", tmp_path / "at once" / "sft-model")
