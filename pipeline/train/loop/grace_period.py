"""The warning that a step and its checkpoint take longer than the grace period of an attempt.

The trainer's log, the watcher and the report share this comparison and its text. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.cluster_keys import ClusterConfig
from pipeline.run.metrics_log import MetricRecord

_ENOUGH_STEPS = 2
"""The minimum of two steps is compared, since one alone may include a compilation or an evaluation."""
_SPARE = 1.5
"""The recommended grace period, as a multiple of the time of a step and its checkpoint."""


@dataclass(frozen=True)
class GraceWarning:
    """A warning that the steps since the last checkpoint may be lost.

    Attributes:
        observation: the measured times and their consequence.
        change: the key to set, and its value.
    """

    observation: str
    change: str

    def __str__(self) -> str:
        return f"{self.observation}; {self.change}"


def grace_warning(cluster: ClusterConfig, rows: Sequence[MetricRecord]) -> GraceWarning | None:
    """The warning, or None if a step and a checkpoint fit into `cluster.grace_seconds`.

    `rows` are the metric records of the newest steps of one attempt. The time that a step waits for data does not
    count, since the trainer ends that wait at once.
    """
    if len(rows) < _ENOUGH_STEPS or rows[-1].get("checkpoint/seconds") is None:
        return None
    step = min((row.get("seconds/step") or 0.0) - (row.get("seconds/data") or 0.0) for row in rows[-_ENOUGH_STEPS:])
    commit: float = rows[-1]["checkpoint/seconds"]
    if step + commit <= cluster.grace_seconds:
        return None
    recommended = math.ceil(_SPARE * (step + commit) / 10) * 10
    observation = (
        f"a step takes {step:.0f} s and its checkpoint {commit:.0f} s, longer than "
        f"cluster.grace_seconds={cluster.grace_seconds:g}"
    )
    if not cluster.on_this_machine:
        return GraceWarning(
            f"{observation}: a job that receives a stop signal loses the steps since its last checkpoint",
            f"set cluster.grace_seconds={recommended}, where the site waits as long (docs/cluster.md, KillWait and "
            "GraceTime), or lower training.checkpoint_seconds",
        )
    return GraceWarning(
        f"{observation}: the steps since the last checkpoint are lost if another role fails or the launcher is killed "
        "(the first Ctrl-C waits for the checkpoint)",
        f"set cluster.grace_seconds={recommended}",
    )
