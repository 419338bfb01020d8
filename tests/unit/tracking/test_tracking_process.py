"""The process that hands rows to wandb, without wandb."""

from pathlib import Path

import pytest

from pipeline.run.metrics_log import MetricSinks, roll_back
from pipeline.tracking.wandb_process import follow_metrics


class Wandb:
    """Remembers what it was handed, from all attempts."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def log(self, numbers: dict[str, float]) -> None:
        self.steps.append(numbers["step"])


@pytest.fixture
def wandb() -> Wandb:
    return Wandb()


def attempt(folder: Path, wandb: Wandb, name: str, steps: range) -> None:
    """One attempt that trains these steps, and its tracker."""
    end = folder / f"{name}.end"
    end.touch()
    with MetricSinks(folder / "metrics.jsonl", name) as sinks:
        for step in steps:
            sinks.log("train", "rl", step, {"loss": 1.0})
    follow_metrics(folder / "metrics.jsonl", wandb, end, folder / "handed.jsonl")


def test_wandb_gets_each_step_once_although_a_crash_rolled_some_back(tmp_path: Path, wandb: Wandb) -> None:
    attempt(tmp_path, wandb, "12-0", range(1, 8))
    roll_back(tmp_path / "metrics.jsonl", "rl", 5)
    attempt(tmp_path, wandb, "12-1", range(6, 10))
    assert wandb.steps == list(range(1, 10))


def test_evaluations_are_handed_over_beside_the_steps(tmp_path: Path, wandb: Wandb) -> None:
    with MetricSinks(tmp_path / "metrics.jsonl", "12-0") as sinks:
        sinks.log("train", "rl", 5, {})
        sinks.log("eval", "rl", 4, {"eval/accuracy": 0.5})
    attempt(tmp_path, wandb, "12-0", range(6, 7))
    assert wandb.steps == [5, 4, 6]


def test_rows_that_did_not_arrive_are_handed_over_again_and_those_of_a_lost_attempt_too(
    tmp_path: Path, wandb: Wandb
) -> None:
    attempt(tmp_path, wandb, "12-0", range(1, 4))
    with MetricSinks(tmp_path / "metrics.jsonl", "12-1") as sinks:
        sinks.log("train", "rl", 4, {})  # nobody followed this attempt
    del wandb.steps[2:]  # of the first attempt two arrived
    with MetricSinks(tmp_path / "metrics.jsonl", "12-2") as sinks:
        sinks.log("train", "rl", 5, {})
    end = tmp_path / "end"
    end.touch()
    follow_metrics(tmp_path / "metrics.jsonl", wandb, end, tmp_path / "handed.jsonl", known=len(wandb.steps))
    assert wandb.steps == [1, 2, 3, 4, 5]
    wandb.steps.clear()
    follow_metrics(tmp_path / "metrics.jsonl", wandb, end, tmp_path / "handed.jsonl", known=5)
    assert wandb.steps == []
