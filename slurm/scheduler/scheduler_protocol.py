"""What is asked of the scheduler, and what it answers.

Owns the words: a scheduler's job, its partitions, its limits, and the operations on them as a protocol. It is answered
by Slurm's own commands in `slurm.scheduler.slurm.slurm_commands`, and in the tests by a scheduler in memory. Promises
that everything which goes wrong is a `SchedulerError` of one line.
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
"""States of a job that will never run again by itself."""


@dataclass(frozen=True)
class QueuedJob:
    """A job as the scheduler sees it now.

    Attributes:
        id: as `sbatch` printed it; of a heterogeneous job its leader's.
        state: Slurm's word: PENDING, RUNNING, COMPLETING, or one of `ENDED`.
        reason: why it is in that state, in Slurm's word; empty for none.
        restarts: how often it was requeued.
        comment: what it was submitted with; ours is `rollcall <run_id>`.
        preempted: whether it was ended at once to make room for another.
        making_room: whether it has to make room for another, at once or after a time of grace.
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
        """`RUNNING`, or `PENDING (Resources)`: a reason matters while a job waits."""
        return f"{self.state} ({self.reason})" if self.state == PENDING and self.reason else self.state

    @property
    def live(self) -> bool:
        """Whether it runs, or may run again."""
        return self.state not in ENDED


@dataclass(frozen=True)
class Nodes:
    """Nodes of a partition that are alike.

    Attributes:
        gpus: how many each has, by kind; the kind is empty where the site names none.
        down: how many of them take no job until they are mended.
    """

    count: int
    gpus: Mapping[str, int] = field(default_factory=dict)
    down: int = 0


@dataclass(frozen=True)
class Partition:
    """A partition.

    Attributes:
        up: whether it takes jobs.
        nodes: how many it has, those that are down included.
        gpus: what GPUs its nodes have, for people; empty for none.
        time_limit: as Slurm writes it; `infinite` for none.
        kinds: its nodes, alike ones together.
    """

    name: str
    default: bool
    up: bool
    nodes: int
    gpus: str
    time_limit: str
    kinds: tuple[Nodes, ...] = ()


class Scheduler(Protocol):
    """The operations. Each raises `SchedulerError` when the scheduler does not answer or refuses."""

    def job(self, job: str) -> QueuedJob | None:
        """The job, or None when the scheduler does not know it (any more)."""
        ...

    def jobs_with(self, word: str) -> list[QueuedJob]:
        """The live jobs of this user whose comment has this word; for a job whose id was never told."""
        ...

    def known(self, ids: Sequence[str]) -> dict[str, QueuedJob]:
        """Those of these jobs that the scheduler knows, in one question; `restarts` and `preempted` are left out."""
        ...

    def partitions(self) -> list[Partition]:
        """All partitions that this user sees."""
        ...

    def accounts(self) -> list[str] | None:
        """The accounts that this user may charge, or None at a site without accounting."""
        ...

    def kill_wait(self) -> int:
        """Seconds between TERM and KILL when a job is ended."""
        ...

    def test_only(self, batch_file: Path) -> str:
        """Why the scheduler would refuse this file; empty if it would take it. Queues nothing."""
        ...

    def requeue(self, job: str) -> None:
        """Have a running job end and be queued again."""
        ...

    def cancel(self, job: str) -> None:
        """End a job, or take it out of the queue."""
        ...
