"""The process that logs rows to a service, with a service in memory."""

from pathlib import Path

import pytest

from pipeline.run.metrics_log import MetricRecord, MetricSinks, roll_back
from pipeline.tracking.tracker_process import follow_metrics
from pipeline.tracking.tracker_protocol import Tracker, numbers_of


class Service(Tracker):
    """A service that keeps the steps of all attempts, and reports how many of them it received if it is asked to."""

    package = "none"

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.numbers: list[int] = []
        self.reports_received = False

    @property
    def received(self) -> int | None:
        return len(self.steps) if self.reports_received else None

    def log(self, row: MetricRecord, number: int) -> None:
        self.steps.append(numbers_of(row)["step"])
        self.numbers.append(number)

    def finish(self) -> None:
        raise AssertionError("only the process ends it")


@pytest.fixture
def service() -> Service:
    return Service()


def attempt(folder: Path, service: Service, name: str, steps: range) -> None:
    """One attempt that trains these steps, and its tracker."""
    end = folder / f"{name}.end"
    end.touch()
    with MetricSinks(folder / "metrics.jsonl", name) as sinks:
        for step in steps:
            sinks.log("train", "rl", step, {"loss": 1.0})
    follow_metrics(folder / "metrics.jsonl", service, end, folder / "logged.jsonl")


def test_a_service_gets_each_step_once_although_a_crash_rolled_some_back(tmp_path: Path, service: Service) -> None:
    attempt(tmp_path, service, "12-0", range(1, 8))
    roll_back(tmp_path / "metrics.jsonl", "rl", 5)
    attempt(tmp_path, service, "12-1", range(6, 10))
    assert service.steps == list(range(1, 10))
    assert service.numbers == list(range(9))


def test_evaluations_are_handed_over_beside_the_steps(tmp_path: Path, service: Service) -> None:
    with MetricSinks(tmp_path / "metrics.jsonl", "12-0") as sinks:
        sinks.log("train", "rl", 5, {})
        sinks.log("eval", "rl", 4, {"eval/accuracy": 0.5})
    attempt(tmp_path, service, "12-0", range(6, 7))
    assert service.steps == [5, 4, 6]


def test_rows_that_did_not_arrive_are_handed_over_again_and_those_of_a_lost_attempt_too(
    tmp_path: Path, service: Service
) -> None:
    attempt(tmp_path, service, "12-0", range(1, 4))
    with MetricSinks(tmp_path / "metrics.jsonl", "12-1") as sinks:
        sinks.log("train", "rl", 4, {})  # nobody followed this attempt
    service.reports_received = True
    del service.steps[2:]  # of the first attempt two arrived
    with MetricSinks(tmp_path / "metrics.jsonl", "12-2") as sinks:
        sinks.log("train", "rl", 5, {})
    end = tmp_path / "end"
    end.touch()
    follow_metrics(tmp_path / "metrics.jsonl", service, end, tmp_path / "logged.jsonl")
    assert service.steps == [1, 2, 3, 4, 5]
    follow_metrics(tmp_path / "metrics.jsonl", service, end, tmp_path / "logged.jsonl")
    assert service.steps == [1, 2, 3, 4, 5]
