"""The run's own metrics, which no sample can report."""

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.environments.agent_report import AgentReport, parse_report
from pipeline.run import metric_names
from pipeline.run.metric_names import below_task, is_run_metric
from pipeline.run.metrics_log import MetricSinks, read_rows, roll_back
from pipeline.train.loop.batch_metrics import batch_metrics
from pipeline.train.loop.evaluations import metrics_of
from pipeline.transport.eval_records import EvalPart, EvalResult
from pipeline.transport.sample_records import Group, PreparedGroup, mean_metrics
from tests.unit.rollout.test_sample_store import a_sample

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
LEVELS = {"none", "basic", "with_entropy"}
"""Values of `training.metrics` on the page."""
FORGED = {"reward/mean": -3.0, "samples": 7.0, "samples/truncated": 1.0, "accuracy": 0.25, "failed": 4.0, "pass@1": 0.9}


@pytest.fixture(autouse=True)
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_names, "_warned", set())


def test_every_metric_of_the_page_is_the_runs_own_and_those_of_samples_are_not() -> None:
    cells = re.findall(r"^\| (`[^|]*`) \|", PAGE.read_text(), re.MULTILINE)
    names = {name for cell in cells for name in re.findall(r"`([a-z_/]+)`", cell)} - LEVELS
    of_samples = {
        name for name in names if name.split("/")[0] in ("agent", "game", "harbor", "env", "rewards", "tools")
    }
    assert len(names) > 100
    assert of_samples == {"agent/calls", "agent/rows", "game/invalid", "game/finished", "harbor/commands"}
    assert {name for name in names if is_run_metric(name)} == names - of_samples
    assert all(is_run_metric(name.removeprefix("eval/")) for name in names if name.startswith("eval/"))


def test_a_sample_reports_none_of_the_runs_own_metrics() -> None:
    sample = a_sample(1.0, metrics={"steps": 20.0, "rewards/exact": 0.5} | FORGED)
    metrics = batch_metrics([PreparedGroup(group=Group(position=0, prompt=0, samples=(sample,)), advantages=(0.0,))], 3)
    assert (metrics["reward/mean"], metrics["samples"], metrics["samples/truncated"]) == (1, 1, 0)
    assert (metrics["steps"], metrics["rewards/exact"]) == (20, 0.5)
    assert not {"accuracy", "failed"} & metrics.keys()
    assert (metrics["task/reward/mean"], metrics["task/accuracy"]) == (-3, 0.25)


@pytest.mark.parametrize("accuracy", [1.0, None])
def test_a_sample_reports_no_accuracy_of_an_evaluation(accuracy: float | None) -> None:
    result = EvalResult(
        id="e",
        policy_version=3,
        accuracy=accuracy,
        prompts=1,
        version_min=3,
        version_max=3,
        seconds=2.0,
        metrics={"steps": 20.0, "seconds": 9.0, "stderr": 0.1, "sums/accuracy": 0.9} | FORGED,
        parts={"sums": EvalPart(accuracy=0.5, error=None, prompts=1, failed=0)},
    )
    metrics = metrics_of(result)
    assert metrics.get("eval/accuracy") == accuracy
    assert (metrics["eval/failed"], metrics["eval/seconds"], metrics["eval/steps"]) == (0, 2, 20)
    assert metrics["eval/sums/accuracy"] == 0.5
    assert not {"eval/stderr", "eval/pass@1"} & metrics.keys()
    assert (metrics["eval/task/accuracy"], metrics["eval/task/stderr"]) == (0.25, 0.1)


def test_the_fields_of_a_record_are_no_numbers_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    forged: dict[str, Any] = dict.fromkeys(metric_names.HEAD, 20.0)
    with MetricSinks(path, "1-0", clock=lambda: 5.0) as sinks:
        for step in (1, 2, 3):
            sinks.log("train", "rl", step, forged | {"loss": 0.5}, eval_set="held")
        sinks.flush()
    expected = {"kind": "train", "job": "rl", "time": 5.0, "attempt": "1-0", "set": "held", "loss": 0.5}
    assert [{name: row[name] for name in expected} for row in read_rows(path)] == [expected] * 3
    assert roll_back(path, "rl", 2) == 1
    assert [row["step"] for row in read_rows(path)] == [1, 2]


def test_a_record_whose_step_is_no_number_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind":"train","job":"rl","step":null,"time":5}\n{"kind":"train","job":"rl","step":2,"time":5}\n')
    assert [row["step"] for row in read_rows(path)] == [2]
    assert roll_back(path, "rl", 2) == 1


def test_a_renamed_metric_is_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    renamed = {"task/step": 1.0, "task/reward/mean": 2.0, "task/reward/a": 2.0, "own": 3.0}
    for _ in range(2):
        assert below_task({"step": 1.0, "reward/mean": 2.0, "reward/a": 2.0, "own": 3.0}) == renamed
    assert [record.message.split(" of samples")[0] for record in caplog.records] == [
        "the metric step",
        "the metric reward/mean",
    ]


def test_an_agents_metrics_are_means_under_its_names() -> None:
    report = parse_report('{"reward": 1, "metrics": {"steps": 7, "step": 20}}')
    assert isinstance(report, AgentReport)
    samples = [a_sample(metrics=dict(report.metrics)), a_sample(metrics={"steps": 5.0})]
    assert mean_metrics(samples) == {"steps": 6.0, "task/step": 20.0}
