"""Who may write what later attempts read.

Owns the one rule against zombies. A node that was cut off goes on with its attempt while the scheduler runs the next
one, and its trainer reaches the run's files again some time. So the trainer of an attempt claims the run before it
reads anything of it, and whoever writes a file of the run checks right before: checkpoints, `ledger.jsonl`,
`metrics.jsonl`, the exported model, `finished.json`. Promises that a check after a later claim fails. Everything else
belongs to an attempt (`pipeline.paths`), or has a fence of its own (`pipeline.streams.segments`).

Between a check and its write are milliseconds that this cannot close. What slips through does no lasting harm: a commit
is whole, and is replaced when the owner reaches its step.

    fence = Fence(str(run.checkpoints), paths.attempt)
    fence.claim(job)                                     # the trainer, once; the job in `job.json`
    fence.check()                                        # whoever writes
"""

import msgspec

from pipeline import files
from pipeline.checkpoints.storage import Storage
from pipeline.errors import OvertakenError

OWNER = "OWNER"


class Fence:
    """The right of one attempt to write, as the file `OWNER` below the URL `root` tells it."""

    def __init__(self, root: str, attempt: str) -> None:
        self._storage, self._attempt = Storage(root), attempt

    def claim(self, submitted: str = "") -> None:
        """Make this attempt the only one that may write from now on.

        `submitted` is the job that was submitted for the run last; empty where that is not recorded. `OvertakenError`
        if it is another than this attempt's, or if a later attempt of this job did so before: then this is the zombie.
        """
        if submitted and submitted != self._attempt.rpartition("-")[0]:
            raise self._error(f"of job {submitted}")
        owner = self._owner()
        if owner is not None and _is_later(owner, self._attempt):
            raise self._error(owner)
        self._storage.put(OWNER, files.seal(msgspec.json.encode(self._attempt)))

    def check(self) -> None:
        """Raise `OvertakenError` if another attempt has claimed the run. One small file is read."""
        owner = self._owner()
        if owner not in (None, self._attempt):
            raise self._error(str(owner))

    def _owner(self) -> str | None:
        body = files.unseal(self._storage.get(OWNER) or b"")
        return None if body is None else msgspec.json.decode(body, type=str)

    def _error(self, owner: str) -> OvertakenError:
        return OvertakenError(
            f"attempt {owner} has taken over {self._storage.url()}; attempt {self._attempt} must write nothing more"
        )


def _is_later(one: str, other: str) -> bool:
    """Whether two attempts are of one job and `one` comes later. Those of two jobs have no order that names tell."""
    job, _, restart = one.rpartition("-")
    other_job, _, other_restart = other.rpartition("-")
    return job == other_job and int(restart) > int(other_restart)
