"""The tracker `tensorboard` with the real library: its files have the rows of `metrics.jsonl`, whatever happened."""

import os
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from pipeline.run.metrics_log import MetricSinks, Sink, roll_back
from pipeline.tracking.metric_sinks import TrackerSink, tracking_sinks
from pipeline.utils.waiting import wait_for
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun

SECONDS = 60.0
pytestmark = pytest.mark.integration


def scalars(folder: Path) -> Mapping[str, list[tuple[int, float]]]:
    """The steps and values of each tag, as TensorBoard's own reader has them; it drops purged steps."""
    pytest.importorskip("tensorboard")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = reader.EventAccumulator(str(folder), size_guidance={reader.TENSORS: 0}).Reload()
    tags = [tag for tag in read.Tags()["tensors"] if not tag.startswith("config")]
    floats = {tag: [(event.step, event.tensor_proto.float_val[0]) for event in read.Tensors(tag)] for tag in tags}
    return floats | {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "run", make_config(tracking={"trackers": ["tensorboard"]}))


def attempt(run: FakeRun, name: str, steps: range, loss: float) -> tuple[list[Sink], MetricSinks]:
    sinks = tracking_sinks(run.config, run.attempt(name).paths, {**os.environ}, seconds=60)
    metrics = MetricSinks(run.paths.metrics, name, sinks)
    for step in steps:
        metrics.log("train", "rl", step, {"loss": loss})
    return sinks, metrics


def test_a_killed_attempt_and_its_successor_give_each_step_once_with_the_numbers_of_the_current_weights(
    run: FakeRun,
) -> None:
    folder = run.paths.tracking / "tensorboard"
    (sink,), killed = attempt(run, "7-0", range(1, 8), loss=1.0)
    assert isinstance(sink, TrackerSink)
    wait_for("event files", lambda: folder.exists() and len(scalars(folder).get("loss", ())) == 7, SECONDS)
    psutil.Process(sink._child.pid).kill()
    killed.close()
    roll_back(run.paths.metrics, "rl", 5)
    _, metrics = attempt(run, "7-1", range(6, 10), loss=2.0)
    metrics.log("train", "sft", 1, {"loss": 3.0})
    metrics.close()
    expected = [(step, 1.0 if step <= 5 else 2.0) for step in range(1, 10)]
    assert scalars(folder) == {"loss": expected, "sft/loss": [(1, 3.0)]}
    assert len(list(folder.iterdir())) == 1


def test_a_rollback_while_the_tracker_runs_replaces_the_dropped_steps(run: FakeRun) -> None:
    folder = run.paths.tracking / "tensorboard"
    _, metrics = attempt(run, "7-0", range(1, 4), loss=1.0)
    wait_for("event files", lambda: folder.exists() and len(scalars(folder).get("loss", ())) == 3, SECONDS)
    roll_back(run.paths.metrics, "rl", 1)
    _, later = attempt(run, "7-1", range(2, 3), loss=2.0)
    metrics.close()
    later.close()
    assert scalars(folder) == {"loss": [(1, 1.0), (2, 2.0)]}
