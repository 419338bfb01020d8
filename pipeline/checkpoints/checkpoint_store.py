"""The existing checkpoints, and the rule which of them counts.

Owns the manifest and the completion marker. The manifest lists the bytes that were written, not those on the disk. A
checkpoint with a file that is missing, truncated or of another save is never returned. Must not know torch: here a
shard is a file with a size and hashes.

Finding a checkpoint reads a few small files and compares sizes with the manifest. Hashes are compared when content is
read (`Checkpoint.read`, `sharded_state.load_shards`). A reader that finds a checkpoint damaged continues with the next
one of `complete_checkpoints`.
"""

import hashlib
import logging
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from pipeline.checkpoints.block_hashes import FileRecord, VerifiedFile
from pipeline.checkpoints.fencing import Fence, Ownership, read_ownership
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.checkpoints.trainer_state import PHASES, PhaseName, TrainerState, decode_state, encode_state
from pipeline.errors import CheckpointError, DamagedCheckpointError
from pipeline.utils import shared_files as files

COMPLETE, MANIFEST, STATE = "COMPLETE", "manifest.json", "state.msgpack"
MANIFEST_VERSION = 3
OLD_MARKER = "COMMIT"
"""Name of the last file in earlier versions."""
READERS = 8
"""Number of files that are read concurrently to compare hashes."""
_NAME = re.compile(rf"({'|'.join(PHASES)})-(\d+)")
_log = logging.getLogger(__name__)


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json`: the files of a checkpoint, its attempt, its number of ranks, and its time (Unix seconds)."""

    job: PhaseName
    step: int
    attempt: str
    world_size: int
    time: float
    files: dict[str, FileRecord]
    version: int = MANIFEST_VERSION


class CompletionMarker(msgspec.Struct, frozen=True, kw_only=True):
    """`COMPLETE`: the hash of the manifest in the same folder."""

    manifest_sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint below the URL `root`."""

    root: str
    manifest: CheckpointManifest

    @property
    def name(self) -> str:
        """Phase and step, as `<job>-<step>`."""
        return checkpoint_name(self.manifest.job, self.manifest.step)

    @property
    def folder(self) -> str:
        """The folder of the files, relative to `root`: `<job>-<step>/<attempt>`."""
        return f"{self.name}/{self.manifest.attempt}"

    @property
    def location(self) -> str:
        """URL (or path) of the folder of the files."""
        return Storage(self.root).url(self.folder)

    def state(self) -> TrainerState:
        """The position that was saved with the tensors."""
        return decode_state(self.read(STATE), f"{self.location}/{STATE}")

    def read(self, file: str) -> bytes:
        """The content of a small file. `DamagedCheckpointError` if its hash differs from the manifest."""
        record, data = self.record(file), Storage(self.location).get(file)
        if data is None or FileRecord.of(data) != record:
            raise DamagedCheckpointError(f"{self.location}/{file} is not what was saved (SHA-256 differs)")
        return data

    def record(self, file: str) -> FileRecord:
        """Size and hashes of a file; `DamagedCheckpointError` if the manifest does not list it."""
        if file not in self.manifest.files:
            raise DamagedCheckpointError(f"{self.location} has no {file} in its manifest")
        return self.manifest.files[file]

    def verify(self) -> None:
        """Read every file and compare its hashes. `DamagedCheckpointError` at the first difference."""
        with ThreadPoolExecutor(READERS) as readers:
            for _ in readers.map(self._verify_file, self.manifest.files):
                pass

    def _verify_file(self, file: str) -> None:
        with Storage(self.location).open(file) as stream:
            VerifiedFile(stream, self.record(file), f"{self.location}/{file}").verify()

    def __str__(self) -> str:
        return self.location


def checkpoint_name(job: PhaseName, step: int) -> str:
    return f"{job}-{step}"


def parse_checkpoint_name(name: str) -> tuple[PhaseName, int] | None:
    """Phase and step of a `checkpoint_name`; None for any other text."""
    match = _NAME.fullmatch(name)
    return (PHASES[PHASES.index(match[1])], int(match[2])) if match else None


def complete_checkpoints(root: str, *, hashes: bool = False) -> Iterator[Checkpoint]:
    """The checkpoints that count, the newest first. Incomplete ones are skipped with a warning that has the reason.

    RL is newer than SFT; within a phase the step decides. Sizes are always compared with the manifest. With `hashes`,
    every file is read and verified too.
    """
    storage = Storage(root)
    ownership = read_ownership(storage)
    for name in folder_names(storage):
        try:
            checkpoint = _copy_that_counts(storage, name, ownership)
            if hashes:
                checkpoint.verify()
        except DamagedCheckpointError as error:
            _log.warning("checkpoint %s is skipped: %s", name, error)
        else:
            yield checkpoint


def newest_checkpoint(root: str, *, hashes: bool = False) -> Checkpoint | None:
    """The first of `complete_checkpoints`, or None."""
    return next(complete_checkpoints(root, hashes=hashes), None)


def begin_checkpoint(storage: Storage, state: TrainerState, attempt: str) -> Checkpoint | None:
    """Prepare an empty folder for a save, or return the checkpoint if this attempt has saved this step already."""
    Fence(storage.url(), attempt).check()
    name = checkpoint_name(state.job, state.step)
    try:
        return _complete_copy(storage, name, attempt)
    except DamagedCheckpointError:
        storage.remove(f"{name}/{attempt}")
        return None


def complete_checkpoint(
    storage: Storage, state: TrainerState, attempt: str, shards: Mapping[str, FileRecord], world_size: int
) -> Checkpoint:
    """Write the state, the manifest and, last, COMPLETE next to the shards, which are on disk already.

    `shards` are the records of the written bytes. `CheckpointError` if a shard is missing or has another size, or if
    another attempt has taken over.
    """
    name = checkpoint_name(state.job, state.step)
    folder = f"{name}/{attempt}"
    data = encode_state(state)
    storage.put(f"{folder}/{STATE}", data)
    manifest = CheckpointManifest(
        job=state.job,
        step=state.step,
        attempt=attempt,
        world_size=world_size,
        time=time.time(),
        files={**shards, STATE: FileRecord.of(data)},
    )
    body = msgspec.json.encode(manifest)
    storage.put(f"{folder}/{MANIFEST}", body)
    # Order of writes: shards, state, manifest, marker. Whatever ends the process, a marker implies all files before it,
    # and it hashes the manifest, which hashes them. So no rename is needed, which object stores do not have.
    # The manifest has the sizes of the written bytes: a difference means that the filesystem lost some.
    try:
        _check_sizes(storage, folder, manifest)
    except DamagedCheckpointError as error:
        raise CheckpointError(f"cannot complete {name}: {error}") from error
    # As late as possible: a superseded attempt must not complete a checkpoint.
    Fence(storage.url(), attempt).check()
    mark = CompletionMarker(manifest_sha256=hashlib.sha256(body).hexdigest())
    storage.put(f"{folder}/{COMPLETE}", files.seal(msgspec.json.encode(mark)))
    return Checkpoint(storage.url(), manifest)


def folder_names(storage: Storage) -> list[str]:
    """Names (`<job>-<step>`) of all checkpoint folders, complete or not, the newest first."""
    return sorted(filter(_NAME.fullmatch, storage.folders()), key=_age, reverse=True)


def is_newer(name: str, other: str) -> bool:
    """Whether the checkpoint `name` is newer than another one, both as `checkpoint_name`."""
    return _age(name) > _age(other)


def _age(name: str) -> tuple[int, int]:
    """Sorts names by age: RL is newer than SFT, and within a phase the step decides."""
    job, _, step = name.partition("-")
    return PHASES.index(job), int(step)


def copies_of(storage: Storage, name: str) -> list[str]:
    """The attempts' folders below the checkpoint `name`, as `<job>-<step>/<attempt>`."""
    return [f"{name}/{attempt}" for attempt in storage.folders(name)]


def has_marker(storage: Storage, folder: str) -> bool:
    """Whether COMPLETE is in a folder of `copies_of`, also on a store that lists new files late."""
    return storage.size(f"{folder}/{COMPLETE}") is not None


def valid_copy(storage: Storage, name: str, ownership: Ownership) -> set[str]:
    """The folder of the complete copy of the checkpoint `name` that counts; empty if there is none."""
    try:
        return {_copy_that_counts(storage, name, ownership).folder}
    except DamagedCheckpointError:
        return set()


def _copy_that_counts(storage: Storage, name: str, ownership: Ownership) -> Checkpoint:
    """The complete copy of the checkpoint `name` that counts. `DamagedCheckpointError` with the reasons if none does.

    Two copies count if a cut-off attempt completed its save late. Then the owner's copy is returned, else the later.
    """
    copies, reasons = list[Checkpoint](), list[str]()
    for attempt in storage.folders(name):
        try:
            if not ownership.counts(name, attempt):
                raise DamagedCheckpointError(
                    f"{name}/{attempt} was refused, or came after attempt {ownership.owner} took over"
                )
            copies.append(_complete_copy(storage, name, attempt))
        except DamagedCheckpointError as error:
            reasons.append(str(error))
    if not copies:
        raise DamagedCheckpointError("; ".join(reasons) or "the folder is empty")
    return max(copies, key=lambda copy: (copy.manifest.attempt == ownership.owner, copy.manifest.time))


def _complete_copy(storage: Storage, name: str, attempt: str) -> Checkpoint:
    """An attempt's copy of the checkpoint `name`. `DamagedCheckpointError` if COMPLETE is missing or a file differs."""
    folder = f"{name}/{attempt}"
    manifest = _read_manifest(storage, folder, _read_marker(storage, folder))
    _check_sizes(storage, folder, manifest)
    return Checkpoint(storage.url(), manifest)


def _check_sizes(storage: Storage, folder: str, manifest: CheckpointManifest) -> None:
    sizes = storage.sizes(folder)
    for file, record in manifest.files.items():
        size = sizes.get(file)
        if size != record.size:  # the listing of a store may be older than the file
            size = storage.size(f"{folder}/{file}")
        if size != record.size:
            actual = "missing" if size is None else f"{size} bytes"
            raise DamagedCheckpointError(f"{folder}/{file} is {actual}; its manifest has {record.size} bytes")


def _read_marker(storage: Storage, folder: str) -> CompletionMarker:
    data = storage.get(f"{folder}/{COMPLETE}")
    if data is None:
        _refuse_older_format(storage, folder)
        raise DamagedCheckpointError(f"{folder} has no {COMPLETE}: its save did not end")
    body = files.unseal(data)
    if body is None:
        raise DamagedCheckpointError(f"{folder}/{COMPLETE} is torn")
    try:
        return msgspec.json.decode(body, type=CompletionMarker)
    except msgspec.DecodeError as error:
        raise DamagedCheckpointError(f"{folder}/{COMPLETE} is of another form: {error}") from error


def _refuse_older_format(storage: Storage, folder: str) -> None:
    """Raise `CheckpointError` for a complete checkpoint of an earlier version, by its marker.

    Version 1 has the marker in the parent folder, version 2 in this one. Skipping it would start the run over silently.
    """
    name = folder.partition("/")[0]
    for version, parent in ((1, name), (2, folder)):
        if storage.get(f"{parent}/{OLD_MARKER}") is not None:
            raise _version_error(storage.url(parent), version)


def _version_error(path: str, version: int) -> CheckpointError:
    hint = "use the version of Rollcall that wrote it, or start over elsewhere"
    return CheckpointError(f"{path} has version {version}; this code reads version {MANIFEST_VERSION}; {hint}")


def _read_manifest(storage: Storage, folder: str, marker: CompletionMarker) -> CheckpointManifest:
    body = storage.get(f"{folder}/{MANIFEST}")
    if body is None:
        raise DamagedCheckpointError(f"{folder}/{MANIFEST} is missing")
    if hashlib.sha256(body).hexdigest() != marker.manifest_sha256:
        raise DamagedCheckpointError(f"{folder}/{MANIFEST} is torn: its hash is not the one in {COMPLETE}")
    try:
        manifest = msgspec.json.decode(body, type=CheckpointManifest)
    except msgspec.DecodeError as error:
        raise DamagedCheckpointError(f"{folder}/{MANIFEST} is of another form: {error}") from error
    if manifest.version != MANIFEST_VERSION:
        raise _version_error(f"{folder}/{MANIFEST}", manifest.version)
    return manifest
