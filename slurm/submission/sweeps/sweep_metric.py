"""The number that a run has reached, as a sweeper is told it.

Owns how an objective is read from a run's metrics. Promises a finite number for each metric that is named, or a
`SweepError` that says what the run has instead. Must not know sweepers, nor which way is better.

    SweepMetric(("eval/accuracy",), window=2).of(run)     (0.5,): the mean of the run's last two evaluations
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pipeline.config import closest_match
from pipeline.errors import SweepError
from pipeline.run.metrics_log import MetricRecord, read_rows, series
from pipeline.run.paths import RunPaths

Job = Literal["rl", "sft"]
_OF_A_ROW = ("kind", "job", "step", "time", "attempt")


@dataclass(frozen=True)
class SweepMetric:
    """What is read of a finished run.

    Attributes:
        names: metrics as `docs/metrics.md` has them; several for a sweeper of several objectives.
        window: how many of their last values the mean is taken of: all, if there are fewer.
        job: the training job whose rows count.
    """

    names: tuple[str, ...]
    window: int = 1
    job: Job = "rl"

    def __str__(self) -> str:
        return ", ".join(self.names)

    def of(self, run: RunPaths) -> tuple[float, ...]:
        """One number for each name."""
        rows = [row for row in read_rows(run.metrics) if row["job"] == self.job]
        return tuple(self._mean(name, rows) for name in self.names)

    def _mean(self, name: str, rows: list[MetricRecord]) -> float:
        values = [value for _, value in series(rows, name, self.job)][-self.window :]
        if not values:
            hint = closest_match(name, metric_names(rows), "see docs/metrics.md")
            raise SweepError(f"its {self.job} rows have no value of {name}" + (f"; {hint}" if hint else ""))
        return sum(values) / len(values)


def metric_names(rows: Iterable[MetricRecord]) -> list[str]:
    """The metrics that have a value in any of these rows."""
    found = {name for row in rows for name, value in row.items() if value is not None}
    return sorted(found - set(_OF_A_ROW))
