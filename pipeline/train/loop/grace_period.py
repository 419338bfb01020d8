"""Whether a step and its checkpoint fit into the time that an attempt gets to end.

Owns the comparison and its words, which the trainer's log, the watcher and the report share. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.cluster_keys import ClusterConfig
from pipeline.run.metrics_log import MetricRecord

_ENOUGH_STEPS = 2
"""One step alone may have compiled, or measured the model too."""
_SPARE = 1.5
"""The grace that is recommended, in units of what a step and its checkpoint took."""


@dataclass(frozen=True)
class GraceWarning:
    """That the steps since the last checkpoint may be lost.

    Attributes:
        seen: what was measured and what it costs.
        change: which key to set.
    """

    observation: str
    change: str

    def __str__(self) -> str:
        return f"{self.observation}; {self.change}"


def grace_warning(cluster: ClusterConfig, rows: Sequence[MetricRecord]) -> GraceWarning | None:
    """None while a step and a checkpoint fit into `cluster.grace_seconds`.

    `rows` are the newest steps of one attempt, as they are logged. Time that a step waits for data does not count,
    since the trainer ends that wait at once.
    """
    if len(rows) < _ENOUGH_STEPS or rows[-1].get("checkpoint/seconds") is None:
        return None
    step = min((row.get("seconds/step") or 0.0) - (row.get("seconds/data") or 0.0) for row in rows[-_ENOUGH_STEPS:])
    commit: float = rows[-1]["checkpoint/seconds"]
    if step + commit <= cluster.grace_seconds:
        return None
    wanted = math.ceil(_SPARE * (step + commit) / 10) * 10
    found = (
        f"a step takes {step:.0f} s and its checkpoint {commit:.0f} s, longer than "
        f"cluster.grace_seconds={cluster.grace_seconds:g}"
    )
    if cluster.kind == "slurm":
        return GraceWarning(
            f"{found}: a job that is told to end loses the steps since its last checkpoint",
            f"set cluster.grace_seconds={wanted}, where the site waits as long (docs/cluster.md, KillWait and "
            "GraceTime), or lower training.checkpoint_seconds",
        )
    return GraceWarning(
        f"{found}: the steps since the last checkpoint are lost if another role fails or the launcher is killed (the "
        "first Ctrl-C waits for the checkpoint)",
        f"set cluster.grace_seconds={wanted}",
    )
