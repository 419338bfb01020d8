"""The experiments of the tiny model to their ends: what is learned shows on held-out prompts. Minutes each."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.rundir.metrics import read_rows, series
from tests.support.runs.launched import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.trial, pytest.mark.timeout(3600)]


def learned(tmp_path: Path, experiment: str, name: str = "eval/accuracy") -> tuple[float, float]:
    """A number of the first held-out evaluation and of the last one."""
    argv = [sys.executable, "launchers/submit.py", f"experiment={experiment}", f"output={tmp_path}"]
    subprocess.run(argv, cwd=ROOT, check=True, timeout=3600)
    values = [value for _, value in series(read_rows(tmp_path / experiment / "metrics.jsonl"), name)]
    return values[0], values[-1]


@pytest.mark.parametrize("experiment", ["countdown", "reasoning_gym"])
def test_held_out_accuracy_rises(experiment: str, tmp_path: Path) -> None:
    first, last = learned(tmp_path, experiment)
    assert last > first + 0.05


def test_a_calculator_is_called_more_often_as_it_pays(tmp_path: Path) -> None:
    first, last = learned(tmp_path, "tools", "eval/tools/calculator")
    assert last > first
    accuracies = [value for _, value in series(read_rows(tmp_path / "tools" / "metrics.jsonl"), "eval/accuracy")]
    assert accuracies[-1] > accuracies[0] + 0.05
