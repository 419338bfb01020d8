"""Which checkpoints exist, and which one counts.

Owns the manifest, the commit mark and the rules about them. Promises that the manifest says what was written, not what
lies there; and that a commit of which a file is missing, torn or another's is not returned. Must not know torch: shards
are files with a size and hashes here.

To find a commit costs a few small files: sizes are compared with the manifest. The hashes of what is read are compared
where it is read (`Checkpoint.read`, `sharded.load_shards`): who finds a commit damaged goes on to the next of
`complete_checkpoints`.
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

COMMIT, MANIFEST, STATE = "COMMIT", "manifest.json", "state.msgpack"
MANIFEST_VERSION = 2
READERS = 8
"""Files that are read at once when hashes are checked."""
_NAME = re.compile(rf"({'|'.join(PHASES)})-(\d+)")
_log = logging.getLogger(__name__)


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json`: what a checkpoint consists of, who wrote it, with how many ranks, and when."""

    job: PhaseName
    step: int
    attempt: str
    world_size: int
    time: float
    files: dict[str, FileRecord]
    version: int = MANIFEST_VERSION


class CompletionMarker(msgspec.Struct, frozen=True, kw_only=True):
    """`COMMIT`: the hash of the manifest beside it."""

    manifest_sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint below the URL `root`."""

    root: str
    manifest: CheckpointManifest

    @property
    def name(self) -> str:
        """`<job>-<step>`."""
        return checkpoint_name(self.manifest.job, self.manifest.step)

    @property
    def place(self) -> str:
        """`<job>-<step>/<attempt>`, the folder with its files."""
        return f"{self.name}/{self.manifest.attempt}"

    @property
    def location(self) -> str:
        """URL (or path) of that folder."""
        return Storage(self.root).url(self.place)

    def state(self) -> TrainerState:
        """The position that was saved with the tensors."""
        return decode_state(self.read(STATE), f"{self.location}/{STATE}")

    def read(self, file: str) -> bytes:
        """A small file of it; `DamagedCheckpointError` if it is not what was committed."""
        record, data = self.record(file), Storage(self.location).get(file)
        if data is None or FileRecord.of(data) != record:
            raise DamagedCheckpointError(f"{self.location}/{file} is not what was committed (SHA-256 differs)")
        return data

    def record(self, file: str) -> FileRecord:
        """Size and hashes of one of its files; `DamagedCheckpointError` if it has none of that name."""
        if file not in self.manifest.files:
            raise DamagedCheckpointError(f"{self.location} has no {file} in its manifest")
        return self.manifest.files[file]

    def verify(self) -> None:
        """Read every byte of it; `DamagedCheckpointError` if one is not what was committed."""
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
    """Job and step of a `checkpoint_name`; None for every other text."""
    match = _NAME.fullmatch(name)
    return (PHASES[PHASES.index(match[1])], int(match[2])) if match else None


def complete_checkpoints(root: str, *, hashes: bool = False) -> Iterator[Checkpoint]:
    """The commits that count, the newest first. Those that are not whole are skipped with a warning that says why.

    RL is newer than the warm start before it; within a job the step decides. Sizes are always compared with the
    manifest; hashes, which means reading all of it, only when asked.
    """
    storage = Storage(root)
    counting = read_ownership(storage)
    for name in folder_names(storage):
        try:
            checkpoint = _copies_that_count(storage, name, counting)
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
    """Prepare an empty folder for a save; or the checkpoint itself, when this attempt committed this step already."""
    Fence(storage.url(), attempt).check()
    name = checkpoint_name(state.job, state.step)
    try:
        return _complete_copies(storage, name, attempt)
    except DamagedCheckpointError:
        storage.remove(f"{name}/{attempt}")
        return None


def complete_checkpoint(
    storage: Storage, state: TrainerState, attempt: str, shards: Mapping[str, FileRecord], world_size: int
) -> Checkpoint:
    """Write state, manifest and, last, COMMIT beside the shards that are already there, as they were written.

    `CheckpointError` if one of them is not there any more, or not as long, or if another attempt took over.
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
    try:
        _check_sizes(storage, folder, manifest)
    except DamagedCheckpointError as error:
        raise CheckpointError(f"cannot commit {name}: {error}") from error
    Fence(storage.url(), attempt).check()
    mark = CompletionMarker(manifest_sha256=hashlib.sha256(body).hexdigest())
    storage.put(f"{folder}/{COMMIT}", files.seal(msgspec.json.encode(mark)))
    return Checkpoint(storage.url(), manifest)


def folder_names(storage: Storage) -> list[str]:
    """All checkpoint folders, committed or not, the newest first."""
    found = [match for match in map(_NAME.fullmatch, storage.folders()) if match]
    found.sort(key=lambda match: (PHASES.index(match[1]), int(match[2])), reverse=True)
    return [match[0] for match in found]


def copies_of(storage: Storage, name: str) -> list[str]:
    """The folders of attempts in one of them."""
    return [f"{name}/{attempt}" for attempt in storage.folders(name)]


def valid_copy(storage: Storage, name: str, counting: Ownership) -> set[str]:
    """The folder of the one whole commit of that name that counts, if there is one."""
    try:
        return {_copies_that_count(storage, name, counting).place}
    except DamagedCheckpointError:
        return set()


def _copies_that_count(storage: Storage, name: str, counting: Ownership) -> Checkpoint:
    """The one whole commit of that name that counts; `DamagedCheckpointError` with what is wrong with the others.

    There may be two where an attempt that was cut off ended its commit late: the owner's is taken, else the later.
    """
    found, wrong = list[Checkpoint](), list[str]()
    for attempt in storage.folders(name):
        try:
            if not counting.counts(name, attempt):
                raise DamagedCheckpointError(
                    f"{name}/{attempt} was refused, or came after attempt {counting.owner} took over"
                )
            found.append(_complete_copies(storage, name, attempt))
        except DamagedCheckpointError as error:
            wrong.append(str(error))
    if not found:
        raise DamagedCheckpointError("; ".join(wrong) or "nothing is in it")
    return max(found, key=lambda each: (each.manifest.attempt == counting.owner, each.manifest.time))


def _complete_copies(storage: Storage, name: str, attempt: str) -> Checkpoint:
    """What an attempt committed under a name; `DamagedCheckpointError` if it has no COMMIT or is not all there."""
    folder = f"{name}/{attempt}"
    manifest = _read_manifest(storage, folder, _read_marker(storage, folder))
    _check_sizes(storage, folder, manifest)
    return Checkpoint(storage.url(), manifest)


def _check_sizes(storage: Storage, folder: str, manifest: CheckpointManifest) -> None:
    sizes = storage.sizes(folder)
    for file, record in manifest.files.items():
        if sizes.get(file) != record.size:
            found = f"{sizes[file]} bytes" if file in sizes else "missing"
            raise DamagedCheckpointError(f"{folder}/{file} is {found}; its manifest says {record.size} bytes")


def _read_marker(storage: Storage, folder: str) -> CompletionMarker:
    data = storage.get(f"{folder}/{COMMIT}")
    if data is None:
        _refuse_older_format(storage, folder.partition("/")[0])
        raise DamagedCheckpointError(f"{folder} has no {COMMIT}: its save did not end")
    body = files.unseal(data)
    if body is None:
        raise DamagedCheckpointError(f"{folder}/{COMMIT} is torn")
    try:
        return msgspec.json.decode(body, type=CompletionMarker)
    except msgspec.DecodeError as error:
        raise DamagedCheckpointError(f"{folder}/{COMMIT} is of another form: {error}") from error


def _refuse_older_format(storage: Storage, name: str) -> None:
    """A commit of version 1 has its COMMIT one folder further up. To skip it would be to start over without a word."""
    if storage.get(f"{name}/{COMMIT}") is not None:
        found = f"{storage.url(name)} has version 1; this code reads version {MANIFEST_VERSION}"
        raise CheckpointError(f"{found}; go on with the Rollcall that wrote it, or start anew elsewhere")


def _read_manifest(storage: Storage, folder: str, marker: CompletionMarker) -> CheckpointManifest:
    body = storage.get(f"{folder}/{MANIFEST}")
    if body is None:
        raise DamagedCheckpointError(f"{folder}/{MANIFEST} is missing")
    if hashlib.sha256(body).hexdigest() != marker.manifest_sha256:
        raise DamagedCheckpointError(f"{folder}/{MANIFEST} is torn: its hash is not the one in {COMMIT}")
    try:
        manifest = msgspec.json.decode(body, type=CheckpointManifest)
    except msgspec.DecodeError as error:
        raise DamagedCheckpointError(f"{folder}/{MANIFEST} is of another form: {error}") from error
    if manifest.version != MANIFEST_VERSION:
        found = f"{folder}/{MANIFEST} has version {manifest.version}; this code reads version {MANIFEST_VERSION}"
        raise CheckpointError(f"{found}; go on with the Rollcall that wrote it, or start anew elsewhere")
    return manifest
