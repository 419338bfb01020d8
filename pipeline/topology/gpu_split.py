"""The fastest split of a run's GPUs between trainer and servers, from measured idle fractions. Pure.

A half with n GPUs that was idle for a fraction i of a step did n × (1 - i) GPU-steps of work. With m GPUs the same work
takes n × (1 - i) / m of a step, assuming linear scaling. A step takes as long as the slower half.

    best_split(trainer=1, servers=3, per_server=1, idle_trainer=0.0, idle_servers=0.7)     2 + 2: half the time
"""

from dataclasses import dataclass

WORTHWHILE = 1.05
"""Minimum speedup of a suggested split: below it, the error of assuming linear scaling is larger."""


@dataclass(frozen=True)
class Split:
    """GPUs of the trainer and of the servers, and the speedup of a step over the current split."""

    trainer: int
    servers: int
    factor: float


def best_split(trainer: int, servers: int, per_server: int, idle_trainer: float, idle_servers: float) -> Split | None:
    """The fastest split of the same GPUs; None if the speedup is below `WORTHWHILE`.

    Args:
        trainer, servers: GPUs of each half.
        per_server: GPUs of each server, which stay together.
        idle_trainer, idle_servers: fractions of a step, 0 to 1, in which a half waited.
    """
    work_trainer, work_servers = trainer * (1 - idle_trainer), servers * (1 - idle_servers)
    current = max(work_trainer / trainer, work_servers / servers)
    candidates = []
    for serving in range(per_server, trainer + servers, per_server):
        training = trainer + servers - serving
        step = max(work_trainer / training, work_servers / serving)
        candidates.append(Split(training, serving, current / step if step else 1.0))
    best = max(candidates, key=lambda split: split.factor, default=None)
    return best if best is not None and best.factor >= WORTHWHILE else None
