"""The operations of a scheduler, and the types of its answers.

Owns the types of a job and a partition, and three protocols. A folder of `slurm.scheduler` implements the first two:

- `Scheduler`: the part that every scheduler has. It describes the rank that this process is.
- `BatchScheduler`: a scheduler with a queue. Its jobs outlive their launcher. It writes and submits batch files.
- `JobQueue`: a connection to the queue, which lists, requeues and cancels jobs. The tests have one in memory.

Promises that every failure is a `SchedulerError` of one line. The states and reasons of jobs are Slurm's words; another
scheduler translates its own into them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import psutil

from pipeline.config import RunConfig
from pipeline.config.cluster_keys import ClusterConfig
from pipeline.errors import SchedulerError
from pipeline.run.paths import RunPaths
from pipeline.topology.plan import Plan
from slurm.scheduler.rank_environment import Environment

PENDING, RUNNING = "PENDING", "RUNNING"
OWNED = frozenset({RUNNING, "CONFIGURING", "RESIZING", "SIGNALING"})
"""States of a job that holds its nodes while the scheduler does not end it."""
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
OUT_OF_TIME = "TimeLimit"
"""The reason of a job that the scheduler ends at its time limit."""

CALL_SECONDS = 60.0
"""Deadline of a command of a scheduler. Slurm's own timeout for a controller that does not answer is 10 to 20 s."""
SUBMIT_SECONDS = 300.0
"""Deadline of a submission: the commands for it may retry while the scheduler is busy."""


def user_name() -> str:
    """The user name of this process, as schedulers print it, or the user id if it has no name."""
    return psutil.Process().username()


class SchedulerSilent(SchedulerError):
    """Whether the job is queued is unknown, since the scheduler did not answer."""


@dataclass(frozen=True)
class QueuedJob:
    """The scheduler's current state of a job.

    Attributes:
        id: the id that the submission returned; for a heterogeneous job, the leader's.
        state: PENDING, COMPLETING, one of `OWNED`, or one of `ENDED`.
        reason: the reason for that state; empty for none.
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
        time_limit: the limit in the format of `cluster.time`; `infinite` for none.
        kinds: its nodes, grouped by equality.
    """

    name: str
    default: bool
    up: bool
    nodes: int
    gpus: str
    time_limit: str
    kinds: tuple[Nodes, ...] = ()


class JobQueue(Protocol):
    """A connection to a scheduler's queue. A method raises `SchedulerError` if the scheduler refuses or is silent."""

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

    def test_only(self, batch_file: Path, *, nodes_down: bool = False) -> str:
        """Why the scheduler would refuse this batch file; empty if it would accept it. Queues nothing.

        With `nodes_down`, some nodes are down, and a refusal that may be due to them alone is none: the job waits for
        their repair.
        """
        ...

    def requeue(self, job: str) -> None:
        """End a running job and queue it again."""
        ...

    def cancel(self, job: str) -> None:
        """End a job, or remove it from the queue."""
        ...


Connect = Callable[[str], JobQueue]
"""Connects to the queue of a scheduler by its name; `ConfigError` without one. Called only if a job may be in it."""


class Scheduler(Protocol):
    """A scheduler: the `SCHEDULER` of a folder of `slurm.scheduler`.

    Attributes:
        title: its name in messages, such as `Slurm`.
        job_variables: prefixes of the environment variables that describe its job or a step. A child does not inherit
            them.
        client_variables: variables with these prefixes that are no part of a job, so that every child inherits them.
    """

    @property
    def title(self) -> str: ...

    @property
    def job_variables(self) -> tuple[str, ...]: ...

    @property
    def client_variables(self) -> frozenset[str]: ...

    def environment(self, variables: Mapping[str, str]) -> Environment | None:
        """The rank that a process with these variables is; None if this scheduler has not started it."""
        ...


@runtime_checkable
class BatchScheduler(Scheduler, Protocol):
    """A scheduler with a queue, in which jobs outlive their launcher.

    Attributes:
        kill_settings: the site's settings for the time between TERM and KILL; the first applies to every end of a job.
    """

    @property
    def kill_settings(self) -> tuple[str, ...]: ...

    def queue(self, seconds: float) -> JobQueue:
        """A connection whose commands have a deadline of `seconds` each. Runs no command."""
        ...

    def require_commands(self) -> None:
        """Raise `ConfigError` unless this machine has the scheduler's commands."""
        ...

    def batch_attempt(self, variables: Mapping[str, str]) -> tuple[str, int] | None:
        """Job id and number of requeues of the enclosing job, in its batch script and its tasks alike; else None."""
        ...

    def batch_file(
        self, config: RunConfig, plan: Plan, run: RunPaths, *, run_id: str, folder: Path, python: str, command: str
    ) -> str:
        """The text of the batch file, which starts one agent on every node and then decides about a requeue.

        The decision is the last command of the file: `python -P -m slurm.batch.requeue <run> <exit code>`. The comment
        of the job is `rollcall <run_id>`.

        Args:
            folder: submitit's folder of the job. Agent `rank` writes its log to `<folder>/<job>_<rank>_log.out`.
            python: the interpreter.
            command: the quoted words that start an agent. Its environment makes submitit find its job: Slurm's
                variables, or `SUBMITIT_EXECUTOR=local` with `SUBMITIT_LOCAL_JOB_ID` and `SUBMITIT_LOCAL_GLOBALID`.

        Raises:
            ConfigError: for a value of `cluster.*` that the scheduler or a batch file cannot express.
        """
        ...

    def submit(self, batch_file: Path) -> str:
        """Queue the file within `SUBMIT_SECONDS`. Returns the job's id.

        `SchedulerError` if it was refused, `SchedulerSilent` without an answer.
        """
        ...

    def behind(self, cluster: ClusterConfig, job: str) -> ClusterConfig:
        """The settings with which a job waits for the end of `job`. A requeue does not end a job."""
        ...
