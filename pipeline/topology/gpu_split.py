"""How many of a run's GPUs should train, and how many should serve, from what was measured.

Owns the arithmetic. A half with n GPUs that was idle for a fraction i of a step did n × (1 - i) GPU-steps of work. With
m GPUs the same work takes n × (1 - i) / m of a step, if it scales, and a step takes as long as the slower half. Pure.

    best_split(trainer=1, servers=3, per_server=1, idle_trainer=0.0, idle_servers=0.7)     2 + 2: a half of the time
"""

from dataclasses import dataclass

WORTHWHILE = 1.05
"""The least factor for which a split is suggested: below it the assumption of linear scaling errs by more."""


@dataclass(frozen=True)
class Split:
    """GPUs of the trainer and of the servers, and by which factor a step gets faster than with today's."""

    trainer: int
    servers: int
    factor: float


def best_split(trainer: int, servers: int, per_server: int, idle_trainer: float, idle_servers: float) -> Split | None:
    """The fastest split of the same GPUs, if it is worth a change.

    Args:
        trainer, servers: GPUs of each half.
        per_server: GPUs of each server, which stay together.
        idle_trainer, idle_servers: fractions of a step, 0 to 1, in which a half waited.
    """
    work_trainer, work_servers = trainer * (1 - idle_trainer), servers * (1 - idle_servers)
    today = max(work_trainer / trainer, work_servers / servers)
    candidates = []
    for serving in range(per_server, trainer + servers, per_server):
        training = trainer + servers - serving
        step = max(work_trainer / training, work_servers / serving)
        candidates.append(Split(training, serving, today / step if step else 1.0))
    best = max(candidates, key=lambda split: split.factor, default=None)
    return best if best is not None and best.factor >= WORTHWHILE else None
