"""The number of a run that a sweeper is told."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import SweepError
from pipeline.run.metrics_log import MetricSinks
from pipeline.run.paths import RunPaths
from slurm.submission.sweeps.sweep_metric import SweepMetric


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Four steps with an evaluation at 2 and 4, after one step of SFT; the reward of step 3 is not finite."""
    paths = RunPaths(tmp_path)
    with MetricSinks(paths.metrics, "7-0") as sinks:
        sinks.log("train", "sft", 1, {"loss": 3.0})
        for step, reward in enumerate((0.1, 0.2, float("nan"), 0.4), start=1):
            sinks.log("train", "rl", step, {"reward/mean": reward, "loss": 1.0})
            if step % 2 == 0:
                sinks.log("eval", "rl", step, {"eval/accuracy": step / 8})
    return paths


@pytest.mark.parametrize(
    ("objective", "values"),
    [
        (SweepMetric(("eval/accuracy",)), (0.5,)),
        (SweepMetric(("eval/accuracy",), window=2), (0.375,)),
        (SweepMetric(("eval/accuracy",), window=9), (0.375,)),
        (SweepMetric(("reward/mean",), window=2), (pytest.approx(0.3),)),
        (SweepMetric(("loss",), job="sft"), (3.0,)),
        (SweepMetric(("eval/accuracy", "reward/mean")), (0.5, 0.4)),
    ],
)
def test_the_last_values_are_averaged(run: RunPaths, objective: SweepMetric, values: tuple[Any, ...]) -> None:
    assert objective.of(run) == values


def test_a_metric_that_the_run_does_not_have_is_named_with_the_nearest(run: RunPaths) -> None:
    with pytest.raises(SweepError, match=r"its rl rows have no value of eval/acuracy; did you mean eval/accuracy\?"):
        SweepMetric(("eval/acuracy",)).of(run)


def test_a_run_without_rows_has_no_number(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="its rl rows have no value of loss"):
        SweepMetric(("loss",)).of(RunPaths(tmp_path))


def test_an_earlier_evaluation_does_not_stand_for_a_last_one_without_an_accuracy(run: RunPaths) -> None:
    counts = {"eval/failed": 60.0, "eval/hard/accuracy": 0.25, "eval/hard/failed": 0.0}
    with MetricSinks(run.metrics, "7-0") as sinks:
        sinks.log("eval", "rl", 6, counts)
    with pytest.raises(SweepError, match="its last evaluation, at step 6, has no eval/accuracy: 60 samples failed"):
        SweepMetric(("eval/accuracy",)).of(run)
    assert SweepMetric(("eval/hard/accuracy", "reward/mean")).of(run) == (0.25, 0.4)
