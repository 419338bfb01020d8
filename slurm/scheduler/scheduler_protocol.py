"""The operations of a scheduler, and the types of its answers.

Owns the types of a job and a partition, and the operations as a protocol. `slurm.scheduler.slurm.slurm_commands`
implements it with Slurm's commands, and the tests with a scheduler in memory. Promises that every failure is a
`SchedulerError` of one line.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

PENDING, RUNNING = "PENDING", "RUNNING"
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""States of a job that does not run again by itself."""


@dataclass(frozen=True)
class QueuedJob:
    """The scheduler's current state of a job.

    Attributes:
        id: the id that `sbatch` printed; for a heterogeneous job, the leader's.
        state: Slurm's state: PENDING, RUNNING, COMPLETING, or one of `ENDED`.
        reason: Slurm's reason for that state; empty for none.
        restarts: the number of requeues.
        comment: the comment of the submission; ours is `rollcall <run_id>`.
        preempted: whether a preemption ended the job at once.
        preempt_pending: whether a preemption ends the job, at once or after a grace time.
    """

    id: str
    name: str
    user: str
    state: str
    reason: str = ""
    restarts: int = 0
    comment: str = ""
    preempted: bool = False
    preempt_pending: bool = False

    @property
    def word(self) -> str:
        """The state, with the reason of a pending job: `RUNNING`, or `PENDING (Resources)`."""
        return f"{self.state} ({self.reason})" if self.state == PENDING and self.reason else self.state

    @property
    def live(self) -> bool:
        """Whether the job runs, or may run again."""
        return self.state not in ENDED


@dataclass(frozen=True)
class Nodes:
    """A group of equal nodes of a partition.

    Attributes:
        gpus: the number of GPUs of each node, by kind; the kind is empty if the site names none.
        down: the number of these nodes that accept no job until their repair.
    """

    count: int
    gpus: Mapping[str, int] = field(default_factory=dict)
    down: int = 0


@dataclass(frozen=True)
class Partition:
    """A partition of the cluster.

    Attributes:
        up: whether it accepts jobs.
        nodes: the number of its nodes, including nodes that are down.
        gpus: a text about its nodes' GPUs; empty for none.
        time_limit: the limit in Slurm's format; `infinite` for none.
        kinds: its nodes, grouped by equality.
    """

    name: str
    default: bool
    up: bool
    nodes: int
    gpus: str
    time_limit: str
    kinds: tuple[Nodes, ...] = ()


class Scheduler(Protocol):
    """The operations of a scheduler. Each raises `SchedulerError` if the scheduler refuses or does not answer."""

    def job(self, job: str) -> QueuedJob | None:
        """The job; None if the scheduler has no such job, or has dropped its record."""
        ...

    def jobs_with(self, word: str) -> list[QueuedJob]:
        """The live jobs of this user whose comment contains `word`; for a job whose id is unknown."""
        ...

    def known(self, ids: Sequence[str]) -> dict[str, QueuedJob]:
        """The jobs that the scheduler knows, by id, from one query; `restarts` and `preempted` are not set."""
        ...

    def partitions(self) -> list[Partition]:
        """All partitions that are visible to this user."""
        ...

    def accounts(self) -> list[str] | None:
        """The accounts that this user may charge, or None at a site without accounting."""
        ...

    def kill_wait(self) -> int:
        """Seconds between TERM and KILL at a job's end."""
        ...

    def test_only(self, batch_file: Path) -> str:
        """Why the scheduler would refuse this batch file; empty if it would accept it. Queues nothing."""
        ...

    def requeue(self, job: str) -> None:
        """End a running job and queue it again."""
        ...

    def cancel(self, job: str) -> None:
        """End a job, or remove it from the queue."""
        ...
