"""The documents at the root of a run directory and of its attempts: who the run is, its job, its end.

Owns their form. `pipeline.utils.shared_files` reads and writes them, `pipeline.run.paths` knows where they lie.
"""

from typing import Literal

import msgspec


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`: who a run is, from its first submission on.

    Attributes:
        run_id: unique for ever; scopes rendezvous directories, tracking and streams.
        created: seconds since the epoch.
        revision: git revision of the checkout it was submitted from, `-dirty` if edited, empty outside of git.
        code: digest of its copy of the code (`slurm.registry.code_snapshot`); empty if the run is older than digests.
    """

    run_id: str
    created: float
    revision: str = ""
    code: str = ""


class JobStateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`jobs/state-<digest>.json`: an `optimizer_state` in which jobs of files have checkpoints.

    Attributes:
        root: its folder or URL.
        job: tells the job that saved the newest checkpoint from any other.
        done: steps of that job which the checkpoint covers.
    """

    root: str
    job: str
    done: int


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """`finished.json`: written once, when training reached its last step and every role came down."""

    time: float
    steps: int
    attempt: str


class SubmittedJob(msgspec.Struct, frozen=True, kw_only=True):
    """`job.json`: the job that was submitted for a run last. `job` is its id as the scheduler knows it."""

    kind: Literal["local", "slurm"]
    job: str
    user: str
    host: str
    time: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`outcome.json`: what becomes of the job after an attempt, as the one owner of the requeue decided.

    Attributes:
        decision: `finished`: there is nothing left to do. `requeued`: the scheduler was asked to run the job again.
            `left`: the scheduler itself is ending or requeueing the job. `stopped`: the job ends here.
        reason: one line.
        time: seconds since the epoch.
        failures: attempts in a row, up to this one, that failed, or ran out of time, without a new commit.
    """

    decision: Literal["finished", "requeued", "left", "stopped"]
    reason: str
    time: float
    failures: int = 0
