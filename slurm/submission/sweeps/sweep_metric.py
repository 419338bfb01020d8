"""A run's values of a sweep's objective.

Owns how an objective is read from a run's metrics. Promises a finite number for each named metric, or a `SweepError`
that suggests a metric of the run. Must not know sweepers, nor the direction of an objective.

    SweepMetric(("eval/accuracy",), window=2).of(run)     (0.5,): the mean of the run's last two evaluations
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pipeline.config import closest_match
from pipeline.errors import SweepError
from pipeline.run.metrics_log import MetricRecord, read_rows, series
from pipeline.run.paths import RunPaths

Job = Literal["rl", "preference", "sft"]
_OF_A_ROW = ("kind", "job", "step", "time", "attempt")


@dataclass(frozen=True)
class SweepMetric:
    """The metrics that a sweeper optimizes, read from a finished run.

    Attributes:
        names: metrics of `docs/metrics.md`, one for each objective.
        window: the number of last values to average; all values if there are fewer.
        job: the training job whose metrics count.
    """

    names: tuple[str, ...]
    window: int = 1
    job: Job = "rl"

    def __str__(self) -> str:
        return ", ".join(self.names)

    def of(self, run: RunPaths) -> tuple[float, ...]:
        """The mean of each metric's last values; `SweepError` for a metric without a value, and for one that the run's
        last evaluation does not have."""
        rows = [row for row in read_rows(run.metrics) if row["job"] == self.job]
        return tuple(self._mean(name, rows) for name in self.names)

    def _mean(self, name: str, rows: list[MetricRecord]) -> float:
        values = series(rows, name, self.job)[-self.window :]
        if not values:
            hint = closest_match(name, metric_names(rows), "see docs/metrics.md")
            raise SweepError(f"its {self.job} rows have no value of {name}" + (f"; {hint}" if hint else ""))
        # Each evaluation has the number of its failed samples, also one that has no accuracy because of them.
        step, failed = next(iter(series(rows, f"{name.rpartition('/')[0]}/failed", self.job)[-1:]), (0, 0.0))
        if failed and step > values[-1][0]:
            raise SweepError(f"its last evaluation, at step {step}, has no {name}: {failed:.0f} samples failed")
        return sum(value for _, value in values) / len(values)


def metric_names(rows: Iterable[MetricRecord]) -> list[str]:
    """The metrics that have a value in any of these rows, sorted."""
    names = {name for row in rows for name, value in row.items() if value is not None}
    return sorted(names - set(_OF_A_ROW))
