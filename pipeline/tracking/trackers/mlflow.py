"""MLflow (https://mlflow.org).

Online, the server of `MLFLOW_TRACKING_URI`; offline, the SQLite file `tracking/mlflow.db` of the run directory:

    mlflow ui --backend-store-uri sqlite:///runs/<name>/tracking/mlflow.db

No other module imports mlflow.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.run.metrics_log import MetricRecord
from pipeline.tracking import tracker_protocol
from pipeline.tracking.tracker_protocol import Mode, metrics_of

_RUN_ID, _ROWS = "rollcall.run_id", "rollcall.rows"
"""Tags of the MLflow run: the run's run_id, and the number of rows that are stored."""
_MAX_PARAMS = 100
"""MLflow's limit for one request."""


class Tracker(tracker_protocol.Tracker):
    """One MLflow run, which later attempts find by the tag of its run_id. Each step is logged once."""

    package = "mlflow"

    @staticmethod
    def has_login(variables: Mapping[str, str], home: Path) -> bool:
        """With the address of a server in `MLFLOW_TRACKING_URI`."""
        return bool(variables.get("MLFLOW_TRACKING_URI"))

    def __init__(self, config: RunConfig, run_id: str, folder: Path, mode: Mode) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(None if mode == "online" else f"sqlite:///{folder}/mlflow.db")
        known = self._client.get_experiment_by_name(config.tracking.project)
        experiment = known.experiment_id if known else self._client.create_experiment(config.tracking.project)
        runs = self._client.search_runs([experiment], f"tags.`{_RUN_ID}` = '{run_id}'", max_results=1)
        self._is_resumed = bool(runs)
        self._run: Any = runs[0] if runs else self._new_run(experiment, config, run_id)
        self._client.update_run(self._run.info.run_id, status="RUNNING")

    def _new_run(self, experiment: str, config: RunConfig, run_id: str) -> Any:
        from mlflow.entities import Param

        run = self._client.create_run(experiment, tags={_RUN_ID: run_id, _ROWS: "0"}, run_name=config.name)
        values = [Param(key, str(value)) for key, value in _leaves(config.model_dump(mode="json")) if str(value)]
        for begin in range(0, len(values), _MAX_PARAMS):
            self._client.log_batch(run.info.run_id, params=values[begin : begin + _MAX_PARAMS])
        return run

    @property
    def received(self) -> int:
        """The tag is written after a row, so the service may have one more row."""
        return int(self._run.data.tags[_ROWS])

    def log(self, row: MetricRecord, number: int) -> None:
        from mlflow.entities import Metric, RunTag

        run_id, when, numbers = self._run.info.run_id, int(row["time"] * 1000), metrics_of(row)
        if self._is_resumed:  # the row after those of the tag: a killed process may have stored it, or a part
            numbers = {name: value for name, value in numbers.items() if not self._has(name, row["step"])}
            self._is_resumed = False
        metrics = [Metric(name, float(value), when, row["step"]) for name, value in numbers.items()]
        self._client.log_batch(run_id, metrics=metrics, tags=[RunTag(_ROWS, str(number + 1))])

    def _has(self, name: str, step: int) -> bool:
        return any(metric.step == step for metric in self._client.get_metric_history(self._run.info.run_id, name))

    def finish(self) -> None:
        self._client.set_terminated(self._run.info.run_id)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
