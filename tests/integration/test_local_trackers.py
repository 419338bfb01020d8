"""The trackers mlflow, trackio and swanlab with the real libraries and local files: each step once after a kill."""

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.run.metrics_log import MetricSinks
from pipeline.tracking.metric_sinks import TrackerSink, tracking_sinks
from pipeline.tracking.tracker_protocol import upload_commands
from pipeline.utils.waiting import wait_for
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun

SECONDS = 90.0
pytestmark = pytest.mark.integration


def of_mlflow(folder: Path) -> list[int]:
    return query(folder / "mlflow.db", "SELECT step FROM metrics WHERE key = 'loss' ORDER BY step")


def of_trackio(folder: Path) -> list[int]:
    (file,) = folder.glob("trackio/*.db")
    return query(file, "SELECT step FROM metrics ORDER BY step")


def names_of_mlflow(folder: Path) -> set[str]:
    return set(query(folder / "mlflow.db", "SELECT DISTINCT key FROM metrics"))


def of_swanlab(folder: Path) -> list[int]:
    """By the library's own reader of the file that `swanlab sync` uploads."""
    from google.protobuf.json_format import MessageToDict
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (file,) = folder.glob("swanlab/run-*/*.swanlab")
    reader = DataStoreReader()
    reader.open(file)
    scalars = [MessageToDict(Record.FromString(line)).get("scalar", {}) for line in reader]
    reader.close()
    return [int(scalar["step"]) for scalar in scalars if scalar.get("key") == "loss"]


def query(file: Path, text: str) -> list[Any]:
    connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    try:
        return [value for (value,) in connection.execute(text)]
    finally:
        connection.close()


@pytest.mark.parametrize(("name", "steps"), [("mlflow", of_mlflow), ("trackio", of_trackio), ("swanlab", of_swanlab)])
def test_a_killed_tracker_and_its_successor_give_each_step_once(
    tmp_path: Path, name: str, steps: Callable[[Path], list[int]]
) -> None:
    pytest.importorskip(name)
    run = FakeRun(tmp_path / "run", make_config(tracking={"trackers": [name], "mode": "offline"}))

    def attempt(attempt_name: str, first: int, last: int) -> tuple[TrackerSink, MetricSinks]:
        environment = {**os.environ, "TRACKIO_SPACE_ID": "someone/else"}
        (sink,) = tracking_sinks(run.config, run.attempt(attempt_name).paths, environment, seconds=SECONDS)
        metrics = MetricSinks(run.paths.metrics, attempt_name, [sink])
        for step in range(first, last):
            metrics.log("train", "rl", step, {"loss": 1.0, "reward/mean": 0.5})
        assert isinstance(sink, TrackerSink)
        return sink, metrics

    logged = run.paths.tracking / f"{name}.logged.jsonl"
    sink, killed = attempt("7-0", 1, 200)
    wait_for("rows", lambda: logged.exists() and len(logged.read_bytes().splitlines()) > 20, SECONDS)
    psutil.Process(sink._child.pid).kill()
    killed.close()
    _, metrics = attempt("7-1", 200, 210)
    metrics.close()
    assert steps(run.paths.tracking) == list(range(1, 210)), (run.paths.tracking / f"{name}.log").read_text()


def test_the_step_axis_is_not_a_metric_of_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    run = FakeRun(tmp_path / "run", make_config(tracking={"trackers": ["mlflow"], "mode": "offline"}))
    sinks = tracking_sinks(run.config, run.attempt("7-0").paths, {**os.environ}, seconds=SECONDS)
    with MetricSinks(run.paths.metrics, "7-0", sinks) as metrics:
        metrics.log("train", "sft", 1, {"loss": 1.0})
        metrics.log("train", "rl", 1, {"loss": 0.5})
    assert names_of_mlflow(run.paths.tracking) == {"loss", "sft/loss"}


def test_a_swanlab_that_is_killed_while_it_writes_the_rows_again_leaves_the_old_folder(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    run = FakeRun(tmp_path / "run", make_config(tracking={"trackers": ["swanlab"], "mode": "offline"}))

    def attempt(name: str, first: int, last: int) -> tuple[TrackerSink, MetricSinks]:
        (sink,) = tracking_sinks(run.config, run.attempt(name).paths, {**os.environ}, seconds=SECONDS)
        metrics = MetricSinks(run.paths.metrics, name, [sink])
        for step in range(first, last):
            metrics.log("train", "rl", step, {"loss": 1.0})
        assert isinstance(sink, TrackerSink)
        return sink, metrics

    def folders() -> list[Path]:
        return list(run.paths.tracking.glob("swanlab/run-*"))

    attempt("7-0", 1, 50)[1].close()
    (old,) = folders()
    sink, killed = attempt("7-1", 50, 60)
    wait_for("a new folder", lambda: len(folders()) == 2, SECONDS)
    psutil.Process(sink._child.pid).kill()
    killed.close()
    assert upload_commands(run.paths) == [f"swanlab sync {old}"]
    attempt("7-2", 60, 70)[1].close()
    assert len(folders()) == 1
    assert of_swanlab(run.paths.tracking) == list(range(1, 70))
