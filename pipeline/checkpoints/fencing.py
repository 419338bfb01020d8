"""Fencing: which attempt may write files of the run, and which checkpoints count.

The fence protects against zombie attempts. A node that was cut off continues its attempt while the scheduler runs the
next one, and may later reach the run's files again. So the trainer of an attempt claims the run before it reads any of
its files, and every writer of a file of the run calls `check` right before: of checkpoints, `ledger.jsonl`,
`metrics.jsonl`, stored samples, the exported model and `finished.json`. A check fails after a later claim, or if the
owner cannot be read. All other files belong to one attempt (`pipeline.run.paths`), or have a separate fence
(`pipeline.transport.topic_segments`).

The trainer can be restarted within an attempt. Each of its processes is then a separate *writer*: `12-0`, `12-0.1`, …
A claim by the next one refuses the writes of its predecessor. Roles that stay while the trainer is restarted check for
their attempt only (`any_restart`). Below, an attempt means a writer.

    checkpoints/OWNER                the attempt that may write
    checkpoints/ancestry/<attempt>   its ancestry: the checkpoints of other attempts that count while it is the owner

A write can hang after its check, for minutes on an unreachable file server. A late write is harmless, because

- a checkpoint goes to a separate folder per attempt, and counts only if the owner wrote it or has it in its ancestry,
  which is final before the owner trains;
- a removal deletes only folders that were listed before the check, so none of a later owner's;
- a line of `ledger.jsonl` or `metrics.jsonl` goes to a file that was opened before the check, and every owner starts
  with new files under these names (`pipeline.utils.append_log`);
- a late segment of samples carries the name of its attempt;
- a late `model/` or `finished.json` is complete, and of the last step of the same run.

One case is open: an attempt that is superseded while it restores, and whose rename of `ledger.jsonl` or `metrics.jsonl`
hangs, replaces the owner's newer lines by the old ones. Both files are for people; no attempt needs them.

    fence = Fence(str(run.checkpoints), paths.attempt)
    fence.claim(job)                                     # the trainer, once; the job in `job.json`
    fence.keep(["rl-50/12-0", "rl-100/12-0"])            # once it has restored: the ancestry, and nothing else
    fence.check()                                        # every writer
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.errors import CheckpointError, SupersededError
from pipeline.utils import shared_files

OWNER, ANCESTRY = "OWNER", "ancestry"
Ancestry = tuple[str, ...] | None
"""Checkpoints that count, as `<job>-<step>/<attempt>`, or attempts whose every checkpoint counts. None: all count."""
T = TypeVar("T")
UNOWNED = b"anybody"
"""Content of `OWNER` that a person writes after the loss of `OWNER` or an ancestry: there is no owner, and every
complete checkpoint counts."""
_SAVE = re.compile(r"[a-z]+-\d+")
"""The folder of the saves of one step."""
_HINT = (
    "make sure that no attempt of the run is left running, write the word anybody to {}, and resume the run. Then "
    "every complete checkpoint counts, also a refused one or one of a cut-off attempt, and the run resumes from the "
    "newest: first remove the folders of those that must not count"
)


@dataclass(frozen=True)
class Ownership:
    """The attempt that owns the run (empty before the first claim), and its ancestry."""

    owner: str
    ancestry: Ancestry

    def counts(self, name: str, attempt: str) -> bool:
        """Whether the checkpoint `name` of an attempt counts, provided that it is complete."""
        return (
            self.ancestry is None
            or attempt == self.owner
            or not {attempt, f"{name}/{attempt}"}.isdisjoint(self.ancestry)
        )


class Fence:
    """The write permission of one attempt, recorded in the file `OWNER` below the URL `root`."""

    def __init__(self, root: str, attempt: str, *, any_restart: bool = False) -> None:
        """With `any_restart` the permission lasts while any trainer process of the attempt owns the run."""
        self._storage, self._attempt, self._any_restart = Storage(root), attempt, any_restart
        self._old_ancestries: list[str] = []

    def claim(self, submitted: str = "") -> None:
        """Make this attempt the only one that may write. All checkpoints that counted before still count.

        `submitted` is the job that was last submitted for the run, empty if it is not recorded. `SupersededError` if
        this attempt belongs to another job, or if a later attempt of its job has claimed the run: then this attempt is
        the zombie. `CheckpointError` if the owner cannot be read.
        """
        if submitted and submitted != self._attempt.rpartition("-")[0]:
            raise self._error(f"of job {submitted}")
        before = read_ownership(self._storage)
        if before.owner == self._attempt:
            return
        if before.owner and _is_later(before.owner, self._attempt):
            raise self._error(before.owner)
        self._old_ancestries = [name for name in self._storage.sizes(ANCESTRY) if name != self._attempt]
        # The ancestry first: an owner without one would block every reader.
        self._write_ancestry(None if before.ancestry is None else (*before.ancestry, before.owner))
        self._put(OWNER, self._attempt)

    def keep(self, checkpoints: Iterable[str]) -> None:
        """Set the ancestry: only these checkpoints, `<job>-<step>/<attempt>`, and this attempt's count from now on.

        Raises like `check`.
        """
        self._write_ancestry(tuple(checkpoints))
        self.check()
        for name in self._old_ancestries:  # listed before the claim, so none of a later owner's
            self._storage.remove(f"{ANCESTRY}/{name}")

    def check(self) -> None:
        """Raise `SupersededError` if another attempt has claimed the run, `CheckpointError` if the owner is unreadable.

        Reads one small file.
        """
        owner = _owner(self._storage)
        if owner not in ("", self._attempt) and not (self._any_restart and attempt_of(owner) == self._attempt):
            raise self._error(owner)

    def _write_ancestry(self, ancestry: Ancestry) -> None:
        self._put(f"{ANCESTRY}/{self._attempt}", ancestry)

    def _put(self, name: str, document: object) -> None:
        self._storage.put(name, shared_files.seal(msgspec.json.encode(document)))

    def _error(self, owner: str) -> SupersededError:
        return SupersededError(
            f"attempt {owner} has taken over {self._storage.url()}; attempt {self._attempt} must write nothing more"
        )


def writer_of(attempt: str, restart: int) -> str:
    """The name under which the trainer of an attempt writes after its restarts: `12-0`, `12-0.1`, …"""
    return f"{attempt}.{restart}" if restart else attempt


def attempt_of(writer: str) -> str:
    """The attempt of a writer: `12-0` of `12-0.1`."""
    job, dash, restarts = writer.rpartition("-")
    return f"{job}{dash}{restarts.partition('.')[0]}"


def read_ownership(storage: Storage) -> Ownership:
    """The current owner of the run, and its ancestry."""
    owner = _owner(storage)
    if not owner:
        return Ownership("", None)
    name = f"{ANCESTRY}/{owner}"
    data = storage.get(name)
    if data is None:
        if _owner(storage) != owner:  # superseded meanwhile, and its ancestry is removed
            return read_ownership(storage)
        raise _damaged_error(storage, name, "is missing", "which checkpoints count")
    return Ownership(owner, _read(storage, name, data, Ancestry, "which checkpoints count"))


def _owner(storage: Storage) -> str:
    """The attempt that owns the run; empty before the first claim, and after a person has written `UNOWNED`."""
    data = storage.get(OWNER)
    # A claim writes its ancestry, then OWNER, and saves follow. With both an ancestry and saves, OWNER was lost.
    if data is None and storage.sizes(ANCESTRY) and any(_SAVE.fullmatch(name) for name in storage.folders()):
        data = storage.get(OWNER)  # it may have been claimed between the two reads
        if data is None:
            raise _damaged_error(storage, OWNER, "is missing", "who may write")
    if data is None or data.strip() == UNOWNED:
        return ""
    return _read(storage, OWNER, data, str, "who may write")


def _read(storage: Storage, name: str, data: bytes, kind: type[T] | object, meaning: str) -> T:
    """The document `name`, which records `meaning`. A damaged document raises, since it must not open the fence."""
    try:
        return msgspec.json.decode(shared_files.unseal(data) or b"", type=kind)
    except msgspec.DecodeError:
        raise _damaged_error(storage, name, "is damaged", meaning) from None


def _damaged_error(storage: Storage, name: str, state: str, meaning: str) -> CheckpointError:
    hint = _HINT.format(storage.url(OWNER))
    return CheckpointError(f"{storage.url(name)} {state}, so {meaning} is not known: {hint}")


def _is_later(one: str, other: str) -> bool:
    """Whether both attempts are of one job and `one` is later. The names of two jobs' attempts have no order."""
    job, _, restarts = one.rpartition("-")
    other_job, _, other_restarts = other.rpartition("-")
    return job == other_job and [*map(int, restarts.split("."))] > [*map(int, other_restarts.split("."))]
