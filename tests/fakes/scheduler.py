"""A scheduler in memory: its jobs change state only when told, and it remembers what it was asked to do."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.errors import SchedulerError
from slurm.scheduler.scheduler_protocol import PENDING, Nodes, Partition, QueuedJob
from slurm.scheduler.slurm.slurm_commands import NO_SUCH_NODES


def make_partition(
    name: str = "main",
    *,
    default: bool = False,
    up: bool = True,
    time_limit: str = "infinite",
    nodes: tuple[Nodes, ...] = (Nodes(count=4),),
) -> Partition:
    """A partition of four nodes without GPUs, unless something else is said."""
    gpus = ", ".join(f"{count}×{kind or 'GPU'}" for alike in nodes for kind, count in alike.gpus.items())
    return Partition(name, default, up, sum(alike.count for alike in nodes), gpus, time_limit, nodes)


class FakeScheduler:
    """A `slurm.scheduler.scheduler_protocol.JobQueue`.

    Attributes:
        jobs: by id; `submit`, `set` and `forget` change them.
        requeued, cancelled: ids, in the order of the successful calls.
        asked: the ids of each call of `known`.
        tried: texts of the batch files that were tried out.
        refusal: what `test_only` answers.
    """

    def __init__(self, *partitions: Partition) -> None:
        self.jobs: dict[str, QueuedJob] = {}
        self.requeued: list[str] = []
        self.cancelled: list[str] = []
        self.tried: list[str] = []
        self.asked: list[tuple[str, ...]] = []
        self.refusal = ""
        self.known_accounts: list[str] | None = None
        self.seconds_to_kill = 30
        self._partitions = list(partitions) or [make_partition(default=True)]
        self._failures: defaultdict[str, list[str]] = defaultdict(list)

    def submit(self, name: str = "test", *, comment: str = "", user: str = "alice", state: str = PENDING) -> str:
        """Put a job into the queue; its id."""
        job = str(len(self.jobs) + 1)
        self.jobs[job] = QueuedJob(id=job, name=name, user=user, state=state, comment=comment)
        return job

    def set(self, job: str, state: str, reason: str = "") -> None:
        """Have a job in this state from now on."""
        self.jobs[job] = replace(self.jobs[job], state=state, reason=reason)

    def forget(self, job: str) -> None:
        """Drop a job, as Slurm does some minutes after its end; its id is not given again."""
        self.jobs[job] = replace(self.jobs[job], state="")

    def fail(self, operation: str, times: int = 1, said: str = "Socket timed out on send/recv operation") -> None:
        """Have the next `times` calls of this method raise `SchedulerError`."""
        self._failures[operation] += [said] * times

    def job(self, job: str) -> QueuedJob | None:
        self._answer("job")
        found = self.jobs.get(job)
        return found if found is not None and found.state else None

    def jobs_with(self, word: str) -> list[QueuedJob]:
        self._answer("jobs_with")
        return [job for job in self.jobs.values() if job.state and job.live and word in job.comment.split()]

    def known(self, ids: Sequence[str]) -> dict[str, QueuedJob]:
        self._answer("known")
        self.asked.append(tuple(ids))
        return {job: self.jobs[job] for job in ids if job in self.jobs and self.jobs[job].state}

    def partitions(self) -> list[Partition]:
        self._answer("partitions")
        return self._partitions

    def accounts(self) -> list[str] | None:
        self._answer("accounts")
        return self.known_accounts

    def kill_wait(self) -> int:
        self._answer("kill_wait")
        return self.seconds_to_kill

    def test_only(self, batch_file: Path, *, nodes_down: bool = False) -> str:
        self._answer("test_only")
        self.tried.append(batch_file.read_text())
        return "" if nodes_down and self.refusal == NO_SUCH_NODES else self.refusal

    def requeue(self, job: str) -> None:
        """As Slurm: the job is pending at once, with one more restart, also one that ends; refused while it pends."""
        self._answer("requeue")
        found = self._known(job)
        if found.state == PENDING:
            raise SchedulerError(f"scontrol requeue {job}: Job is pending execution for job {job}")
        self.jobs[job] = replace(found, state=PENDING, restarts=found.restarts + 1)
        self.requeued.append(job)

    def cancel(self, job: str) -> None:
        """As Slurm: says nothing of a job that is over or unknown."""
        self._answer("cancel")
        found = self.jobs.get(job)
        if found is not None and found.state and found.live:
            self.set(job, "CANCELLED")
        self.cancelled.append(job)

    def _known(self, job: str) -> QueuedJob:
        found = self.jobs.get(job)
        if found is None or not found.state:
            raise SchedulerError(f"scontrol requeue {job}: Invalid job id specified for job {job}")
        return found

    def _answer(self, operation: str) -> None:
        if self._failures[operation]:
            raise SchedulerError(f"{operation}: {self._failures[operation].pop(0)}")
