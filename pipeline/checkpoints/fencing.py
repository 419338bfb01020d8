"""Who may write what later attempts read, and whose commits count.

Owns the one rule against zombies. A node that was cut off goes on with its attempt while the scheduler runs the next
one, and its trainer reaches the run's files again some time. So the trainer of an attempt claims the run before it
reads anything of it, and whoever writes a file of the run checks right before: checkpoints, `ledger.jsonl`,
`metrics.jsonl`, kept samples, the exported model, `finished.json`. Promises that a check after a later claim fails; so
does one that cannot tell. Everything else belongs to an attempt (`pipeline.run.paths`), or has a fence of its own
(`pipeline.transport.topic_segments`).

    checkpoints/OWNER                the attempt that may write
    checkpoints/lines/<attempt>      the commits, beside its own, that count while it is the owner

Between a check and its write lies as long as a write can hang: minutes, on a file server that is away. What slips
through there does no harm, because

- a commit goes to a folder of its attempt's own, and counts only if the owner wrote it or had it in its line, which it
  closes before it trains;
- nothing of an owner's can be removed: what is removed was listed before the check, so before the owner began;
- a line of `ledger.jsonl` or `metrics.jsonl` goes to a file that was opened before the check, and every owner begins
  with new files under these names (`pipeline.utils.append_log`);
- a late segment of samples has the name of its attempt;
- a late `model/` or `finished.json` is whole, and is of the last step of the same run.

One thing stays open: an attempt that is replaced while it restores, and whose rename of one of those two files hangs,
puts the lines that it found in place of those that the owner added meanwhile. Both are for people; no attempt needs
them.

    fence = Fence(str(run.checkpoints), paths.attempt)
    fence.claim(job)                                     # the trainer, once; the job in `job.json`
    fence.keep(["rl-50/12-0", "rl-100/12-0"])            # once it has restored: what it found, and nothing else
    fence.check()                                        # whoever writes
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.errors import CheckpointError, SupersededError
from pipeline.utils import shared_files

OWNER, LINES = "OWNER", "lines"
Ancestry = tuple[str, ...] | None
"""Commits that count, as `<job>-<step>/<attempt>`, and attempts all of whose commits count; None for any whatever."""
T = TypeVar("T")
UNOWNED = b"anybody"
"""What a person writes to `OWNER` where it, or a line, is lost: nobody owns the run, and every whole commit counts."""
_SAVE = re.compile(r"[a-z]+-\d+")
"""The folder of the saves of one step."""
_HINT = (
    "make sure that no attempt of the run is left running, write the word anybody to {}, and resume the run. Then "
    "every whole commit counts, also one that was refused or came from a cut-off attempt, and the run goes on from the "
    "newest: remove first the folders of those that must not count"
)


@dataclass(frozen=True)
class Ownership:
    """The attempt that owns the run, empty if none has claimed it, and the commits of others that count."""

    owner: str
    line: Ancestry

    def counts(self, name: str, attempt: str) -> bool:
        """Whether the commit `name` of an attempt counts, if it is whole."""
        return self.line is None or attempt == self.owner or not {attempt, f"{name}/{attempt}"}.isdisjoint(self.line)


class Fence:
    """The right of one attempt to write, as the file `OWNER` below the URL `root` tells it."""

    def __init__(self, root: str, attempt: str) -> None:
        self._storage, self._attempt = Storage(root), attempt
        self._old_lines: list[str] = []

    def claim(self, submitted: str = "") -> None:
        """Make this attempt the only one that may write from now on.

        What counted until now goes on to count. `submitted` is the job that was submitted for the run last; empty where
        that is not recorded. `SupersededError` if it is another than this attempt's, or if a later attempt of this job
        did so before: then this is the zombie. `CheckpointError` if who owns the run cannot be read.
        """
        if submitted and submitted != self._attempt.rpartition("-")[0]:
            raise self._error(f"of job {submitted}")
        before = read_ownership(self._storage)
        if before.owner == self._attempt:
            return
        if before.owner and _is_later(before.owner, self._attempt):
            raise self._error(before.owner)
        self._old_lines = [name for name in self._storage.sizes(LINES) if name != self._attempt]
        self._write_line(None if before.line is None else (*before.line, before.owner))
        self._put(OWNER, self._attempt)

    def keep(self, commits: Iterable[str]) -> None:
        """Have no commit count from now on but these and its own. The commits are `<job>-<step>/<attempt>`.

        Raises as `check`.
        """
        self._write_line(tuple(commits))
        self.check()
        for name in self._old_lines:  # none of a later owner's, which would have had to come before the claim
            self._storage.remove(f"{LINES}/{name}")

    def check(self) -> None:
        """Raise `SupersededError` if another attempt has claimed the run, `CheckpointError` if that cannot be told.

        One small file is read.
        """
        owner = _owner(self._storage)
        if owner not in ("", self._attempt):
            raise self._error(owner)

    def _write_line(self, line: Ancestry) -> None:
        self._put(f"{LINES}/{self._attempt}", line)

    def _put(self, name: str, document: object) -> None:
        self._storage.put(name, shared_files.seal(msgspec.json.encode(document)))

    def _error(self, owner: str) -> SupersededError:
        return SupersededError(
            f"attempt {owner} has taken over {self._storage.url()}; attempt {self._attempt} must write nothing more"
        )


def read_ownership(storage: Storage) -> Ownership:
    """Whose commits count, as it is now."""
    owner = _owner(storage)
    if not owner:
        return Ownership("", None)
    name = f"{LINES}/{owner}"
    data = storage.get(name)
    if data is None:
        if _owner(storage) != owner:  # replaced meanwhile, and its line is gone
            return read_ownership(storage)
        raise _damaged_error(storage, name, "is missing", "which commits count")
    return Ownership(owner, _read(storage, name, data, Ancestry, "which commits count"))


def _owner(storage: Storage) -> str:
    """The attempt that owns the run; empty before the first claim, and where a person has written `UNOWNED`.

    A claim writes its line, then the owner. Saves come later: with lines and saves, a missing owner got lost.
    """
    data = storage.get(OWNER)
    if data is None and storage.sizes(LINES) and any(_SAVE.fullmatch(name) for name in storage.folders()):
        data = storage.get(OWNER)  # claimed between the two looks
        if data is None:
            raise _damaged_error(storage, OWNER, "is missing", "who may write")
    if data is None or data.strip() == UNOWNED:
        return ""
    return _read(storage, OWNER, data, str, "who may write")


def _read(storage: Storage, name: str, data: bytes, kind: type[T] | object, told: str) -> T:
    """The document of that name, which tells `told`. A damaged one must not open the fence."""
    try:
        return msgspec.json.decode(shared_files.unseal(data) or b"", type=kind)
    except msgspec.DecodeError:
        raise _damaged_error(storage, name, "is damaged", told) from None


def _damaged_error(storage: Storage, name: str, state: str, told: str) -> CheckpointError:
    return CheckpointError(f"{storage.url(name)} {state}, so {told} is not known: {_HINT.format(storage.url(OWNER))}")


def _is_later(one: str, other: str) -> bool:
    """Whether two attempts are of one job and `one` comes later. Those of two jobs have no order that names tell."""
    job, _, restart = one.rpartition("-")
    other_job, _, other_restart = other.rpartition("-")
    return job == other_job and int(restart) > int(other_restart)
