"""The experiments of the tiny model to their ends: what is learned shows on held-out prompts. Minutes each."""

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.rundir.metrics import read_rows, series
from tests.support.runs.launched import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.trial, pytest.mark.timeout(3600)]


def learned(
    tmp_path: Path, experiment: str, name: str = "eval/accuracy", words: Sequence[str] = ()
) -> tuple[float, float]:
    """A number of the first held-out evaluation and of the last one."""
    argv = [sys.executable, "launchers/submit.py", f"experiment={experiment}", f"output={tmp_path}", *words]
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


SUMS = [
    "model=tiny_text",
    "model.max_length=64",
    "optim=adamw",
    "training.steps=60",
    "training.eval_every=20",
    "training.checkpoint_every=60",
    "training.max_lag=2",
    "training.warm_start.steps=400",
    "training.warm_start.batch=128",
    "training.warm_start.lr=1.5e-3",
    "rollout.max_tokens=8",
    "rollout.concurrency=64",
    "optim.lr=1e-4",
]


def test_an_agent_learns(tmp_path: Path) -> None:
    """The service of docs/agents.md, on sums of a teacher who forgets to carry."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    service = subprocess.Popen([sys.executable, "docs/examples/agent_service.py", str(port)], cwd=ROOT)
    try:
        of = "task.options.of={name: arithmetic, options: {last_digit_first: true, slips: 0.6}}"
        agent = ["task.options.command=[]", f"task.options.service=http://127.0.0.1:{port}", of]
        first, last = learned(tmp_path, "agent", words=[*SUMS, *agent])
        assert last > first + 0.05
    finally:
        service.terminate()
        service.wait(60)
