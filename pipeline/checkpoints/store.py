"""Which checkpoints exist, which one counts, and which are kept.

Owns the manifest, the commit mark and the rules about them. Promises that what `newest_committed` returns is whole, and
that `prune` never removes it. Must not know torch: shards are files with a size and a hash here.
"""

import hashlib
import logging
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from pipeline import files
from pipeline.checkpoints.fence import Fence
from pipeline.checkpoints.state import JOBS, Job, TrainerState, decode_state, encode_state
from pipeline.checkpoints.storage import Storage
from pipeline.errors import CheckpointError

COMMIT, MANIFEST, STATE = "COMMIT", "manifest.json", "state.msgpack"
MANIFEST_VERSION = 1
READERS = 8
"""Files that are read at once when hashes are checked."""
_NAME = re.compile(rf"({'|'.join(JOBS)})-(\d+)")
_log = logging.getLogger(__name__)


class FileRecord(msgspec.Struct, frozen=True):
    """Size in bytes and hex SHA-256 of one file of a checkpoint."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json`: what a checkpoint consists of, who wrote it, with how many ranks, and when."""

    job: Job
    step: int
    attempt: str
    world_size: int
    time: float
    files: dict[str, FileRecord]
    version: int = MANIFEST_VERSION


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """`COMMIT`: the attempt whose folder counts, and the hash of its manifest."""

    attempt: str
    manifest_sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint below the URL `root`."""

    root: str
    manifest: Manifest

    @property
    def name(self) -> str:
        """`<job>-<step>`."""
        return name_of(self.manifest.job, self.manifest.step)

    @property
    def location(self) -> str:
        """URL (or path) of the folder with its files."""
        return Storage(self.root).url(f"{self.name}/{self.manifest.attempt}")

    def state(self) -> TrainerState:
        """The position that was saved with the tensors."""
        return decode_state(Storage(self.location).get(STATE) or b"", f"{self.location}/{STATE}")

    def __str__(self) -> str:
        return self.location


def name_of(job: Job, step: int) -> str:
    return f"{job}-{step}"


def committed(storage: Storage, name: str, *, hashes: bool = False) -> Checkpoint:
    """The checkpoint of that name, when it is whole; else `CheckpointError` with what is wrong with it.

    Sizes are always compared with the manifest; hashes, which means reading all of it, only when asked.
    """
    commit = _read_commit(storage, name)
    folder = f"{name}/{commit.attempt}"
    manifest = _read_manifest(storage, folder, commit)
    sizes = storage.sizes(folder)
    for file, record in manifest.files.items():
        if sizes.get(file) != record.size:
            found = f"{sizes[file]} bytes" if file in sizes else "missing"
            raise CheckpointError(f"{folder}/{file} is {found}; its manifest says {record.size} bytes")
    if hashes:
        _check_hashes(storage, folder, manifest)
    return Checkpoint(storage.url(), manifest)


def _check_hashes(storage: Storage, folder: str, manifest: Manifest) -> None:
    with ThreadPoolExecutor(READERS) as readers:
        found = readers.map(lambda file: storage.sha256(f"{folder}/{file}"), manifest.files)
        for (file, record), sha256 in zip(manifest.files.items(), found, strict=True):
            if sha256 != record.sha256:
                raise CheckpointError(f"{folder}/{file} has not the content its manifest says (SHA-256 differs)")


def newest_committed(root: str, *, hashes: bool = False) -> Checkpoint | None:
    """The newest whole checkpoint, or None. Those that are not whole are skipped with a warning that says why.

    RL is newer than the warm start before it; within a job the step decides.
    """
    storage = Storage(root)
    for name in _names(storage):
        try:
            return committed(storage, name, hashes=hashes)
        except CheckpointError as error:
            _log.warning("checkpoint %s is skipped: %s", name, error)
    return None


def prune(root: str, keep: int) -> list[str]:
    """Remove what is older than the newest `keep` committed checkpoints; what was removed.

    Of those that stay, the folders of other attempts go too. Whatever is younger than the newest committed checkpoint
    stays untouched: it may be in the middle of being written. Left-overs of a dead attempt go once a newer checkpoint
    is committed. A removal begins with COMMIT, so one that is cut short leaves nothing that looks committed.
    """
    storage = Storage(root)
    kept: list[Checkpoint] = []
    removed: list[str] = []
    for name in _names(storage):
        whole = _committed_or_none(storage, name) if len(kept) < max(1, keep) else None
        if whole is not None:
            kept.append(whole)
            removed += _remove_others(storage, whole)
        elif kept:
            storage.remove(f"{name}/{COMMIT}")
            storage.remove(name)
            removed.append(name)
    return removed


def begin(storage: Storage, state: TrainerState, attempt: str) -> Checkpoint | None:
    """Prepare an empty folder for a save; or the checkpoint itself, when this attempt committed this step already."""
    Fence(storage.url(), attempt).check()
    name = name_of(state.job, state.step)
    found = _committed_or_none(storage, name)
    if found is not None and found.manifest.attempt == attempt:
        return found
    storage.remove(f"{name}/{attempt}")
    return None


def commit(
    storage: Storage, state: TrainerState, attempt: str, shards: Mapping[str, FileRecord], world_size: int
) -> Checkpoint:
    """Write state, manifest and, last, COMMIT beside the shards that are already there."""
    name = name_of(state.job, state.step)
    folder = f"{name}/{attempt}"
    data = encode_state(state)
    storage.put(f"{folder}/{STATE}", data)
    manifest = Manifest(
        job=state.job,
        step=state.step,
        attempt=attempt,
        world_size=world_size,
        time=time.time(),
        files={**shards, STATE: FileRecord(len(data), hashlib.sha256(data).hexdigest())},
    )
    body = msgspec.json.encode(manifest)
    storage.put(f"{folder}/{MANIFEST}", body)
    Fence(storage.url(), attempt).check()
    mark = Commit(attempt=attempt, manifest_sha256=hashlib.sha256(body).hexdigest())
    storage.put(f"{name}/{COMMIT}", files.seal(msgspec.json.encode(mark)))
    return Checkpoint(storage.url(), manifest)


def _names(storage: Storage) -> list[str]:
    """All checkpoint folders, committed or not, the newest first."""
    found = [match for match in map(_NAME.fullmatch, storage.folders()) if match]
    found.sort(key=lambda match: (JOBS.index(match[1]), int(match[2])), reverse=True)
    return [match[0] for match in found]


def _committed_or_none(storage: Storage, name: str) -> Checkpoint | None:
    try:
        return committed(storage, name)
    except CheckpointError:
        return None


def _remove_others(storage: Storage, checkpoint: Checkpoint) -> list[str]:
    others = [folder for folder in storage.folders(checkpoint.name) if folder != checkpoint.manifest.attempt]
    names = [f"{checkpoint.name}/{folder}" for folder in others]
    for name in names:
        storage.remove(name)
    return names


def _read_commit(storage: Storage, name: str) -> Commit:
    data = storage.get(f"{name}/{COMMIT}")
    if data is None:
        raise CheckpointError(f"no {COMMIT}: its save did not end")
    body = files.unseal(data)
    if body is None:
        raise CheckpointError(f"{COMMIT} is torn")
    try:
        return msgspec.json.decode(body, type=Commit)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{COMMIT} is of another form: {error}") from error


def _read_manifest(storage: Storage, folder: str, commit: Commit) -> Manifest:
    body = storage.get(f"{folder}/{MANIFEST}")
    if body is None:
        raise CheckpointError(f"{folder}/{MANIFEST} is missing")
    if hashlib.sha256(body).hexdigest() != commit.manifest_sha256:
        raise CheckpointError(f"{folder}/{MANIFEST} is torn: its hash is not the one in {COMMIT}")
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{folder}/{MANIFEST} is of another form: {error}") from error
    if manifest.version != MANIFEST_VERSION:
        raise CheckpointError(f"{folder}/{MANIFEST} has version {manifest.version}; this code reads {MANIFEST_VERSION}")
    return manifest
