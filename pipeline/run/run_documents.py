"""The documents at the root of a run directory and of its attempts: identity, submitted job, end.

Owns their format. `pipeline.utils.shared_files` reads and writes them; `pipeline.run.paths` has their paths.
"""

from typing import Literal

import msgspec

LOCAL = "local"
"""The scheduler without a queue: virtual nodes on one machine, which end with their launcher."""


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`: the identity of a run, since its first submission.

    Attributes:
        run_id: globally unique; scopes rendezvous directories, tracking and streams.
        created: seconds since the epoch.
        revision: git revision of the checkout at submission, `-dirty` if edited, empty outside of git.
        code: digest of its copy of the code (`slurm.registry.code_snapshot`); empty for runs older than digests.
    """

    run_id: str
    created: float
    revision: str = ""
    code: str = ""


class JobStateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`jobs/state-<digest>.json`: an `optimizer_state` in which job files have checkpoints.

    Attributes:
        root: its folder or URL.
        job: identifies the job that saved the newest checkpoint.
        done: steps of that job that the checkpoint covers.
    """

    root: str
    job: str
    done: int


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """`finished.json`: written once, when training has reached its last step and every role has stopped."""

    time: float
    steps: int
    attempt: str


class SubmittedJob(msgspec.Struct, frozen=True, kw_only=True):
    """`job.json`: the last job submitted for a run.

    Attributes:
        kind: the name of its scheduler, a value of `cluster.scheduler`.
        job: its id at the scheduler.
    """

    kind: str
    job: str
    user: str
    host: str
    time: float

    @property
    def queued(self) -> bool:
        """Whether a scheduler has or had the job in its queue. Otherwise it ran on `host`, below its launcher."""
        return self.kind != LOCAL


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`outcome.json`: the decision about the job after an attempt, by the one owner of the requeue.

    Attributes:
        decision: `finished`: nothing is left to do. `requeued`: the scheduler was asked to run the job again. `left`:
            the scheduler itself is ending or requeueing the job. `stopped`: the job ends here.
        reason: one line.
        time: seconds since the epoch.
        failures: consecutive attempts, up to this one, that failed or timed out without a new checkpoint.
    """

    decision: Literal["finished", "requeued", "left", "stopped"]
    reason: str
    time: float
    failures: int = 0
