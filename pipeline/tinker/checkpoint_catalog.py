"""Checkpoints and sampling clients.

Owns what was saved: under which name, whose it is, until when; and the folders behind the names. Promises that a
checkpoint is there once its save was answered, that nobody sees another owner's, that a snapshot stays while its
sampling client uses it, and that a folder without a name stays as long as an open request reads it. Must not know how a
checkpoint is written.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Set
from typing import TypeVar

import msgspec

from pipeline.tinker import durable_store, tinker_paths
from pipeline.tinker.api_errors import ApiError, NotFoundError
from pipeline.tinker.api_keys import Owner
from pipeline.tinker.durable_store import Statement, Store
from pipeline.tinker.entities import Model, SamplingSession, SavedWeights
from pipeline.tinker.model_requests import SaveNote
from pipeline.tinker.tinker_records import Save, SaveResult, encode

MAX_EPHEMERAL = 8
"""Snapshots (checkpoints without a name) that each model of an adapter keeps, whether they are used or not."""
MAX_WHOLE_EPHEMERAL = 2
"""Those of a whole model, which are a thousand times as large."""
SNAPSHOT_SECONDS = 3600.0
"""How long an older snapshot is kept after its sampling client last used it (`serve.snapshot_seconds`)."""
F = TypeVar("F")


class CheckpointCatalog:
    """The checkpoints and samplers that a store holds."""

    def __init__(self, store: Store, clock: Callable[[], float], is_read: Callable[[str], bool]) -> None:
        """`is_read` returns whether an open request reads a folder."""
        self._store, self._clock, self._is_read = store, clock, is_read
        self.checkpoints = _restored(store, "checkpoint", SavedWeights)
        self.samplers = _restored(store, "sampler", SamplingSession)
        self._unnamed = {folder for folder, _ in store.facts("unnamed")}
        """Folders of checkpoints that are gone; each stays while an open request reads it."""
        self.on_removed: Callable[[str], None] = lambda folder: None
        """Called in a thread, with a folder that nobody needs."""
        self.open_folders: Callable[[], Set[str]] = frozenset
        """The folders of samples that were accepted and whose clients have no result yet."""
        self.snapshot_seconds = SNAPSHOT_SECONDS
        self._started = clock()
        self._used: dict[str, float] = {}
        """When a sampling client last used a checkpoint, by its path (seconds since the epoch)."""

    def checkpoint(self, owner: Owner, path: str) -> SavedWeights:
        """`NotFoundError` for one that is not there, has expired, or is another owner's; `ApiError` for no path."""
        checkpoint = self.checkpoints.get(path)
        if checkpoint is None:
            tinker_paths.parse_path(path)  # a path of another form is refused by its form
        if (
            checkpoint is None
            or checkpoint.owner != owner.name
            or (checkpoint.expires and checkpoint.expires < self._clock())
        ):
            raise NotFoundError(f"no checkpoint {path!r}")
        return checkpoint

    def named(self, owner: Owner, parts: Mapping[str, str]) -> SavedWeights:
        """The checkpoint of an address's `model`, `kind` and `name`."""
        return self.checkpoint(owner, f"tinker://{parts['model']}/{parts['kind']}/{parts['name']}")

    def of_model(self, model: str) -> list[SavedWeights]:
        return [
            checkpoint
            for checkpoint in self.checkpoints.values()
            if tinker_paths.stored_path(checkpoint.path).model == model
        ]

    def stored_bytes(self, owner: str) -> int:
        return sum(checkpoint.size for checkpoint in self.checkpoints.values() if checkpoint.owner == owner)

    async def keep_for(self, checkpoint: SavedWeights, seconds: int | None) -> None:
        """Make the checkpoint expire `seconds` from now; with None, never."""
        expires = None if seconds is None else self._clock() + seconds
        changed = msgspec.structs.replace(checkpoint, expires=expires)
        await self._store.keep(durable_store.fact("checkpoint", changed.path, encode(changed)))
        self.checkpoints[changed.path] = changed

    async def remove(self, checkpoint: SavedWeights) -> None:
        """Forget it, with the sampling clients that were made for it alone; its folder goes once nobody reads it."""
        orphans = [
            sampler for sampler in self.samplers.values() if checkpoint.ephemeral and sampler.path == checkpoint.path
        ]
        dropped = [durable_store.no_fact("sampler", orphan.id) for orphan in orphans]
        await self._store.keep(
            durable_store.no_fact("checkpoint", checkpoint.path),
            durable_store.fact("unnamed", checkpoint.folder, b""),
            *dropped,
        )
        self.checkpoints.pop(checkpoint.path, None)
        self._used.pop(checkpoint.path, None)
        for orphan in orphans:
            self.samplers.pop(orphan.id, None)
        self._unnamed.add(checkpoint.folder)
        await self.remove_folders()

    async def remove_expired(self) -> None:
        now = self._clock()
        for checkpoint in list(self.checkpoints.values()):
            if checkpoint.expires is not None and checkpoint.expires < now:
                await self.remove(checkpoint)
        for checkpoint in self._replaced():
            if now - self._last_use(checkpoint) > self.snapshot_seconds:
                await self.remove(checkpoint)
        await self.remove_folders()

    async def make_room(self, owner: str, limit: int) -> None:
        """Have an owner's checkpoints be below `limit` bytes, as far as snapshots can give way before their time."""
        own = [checkpoint for checkpoint in self._replaced() if checkpoint.owner == owner]
        for old in sorted(own, key=self._last_use):
            if self.stored_bytes(owner) < limit:
                return
            await self.remove(old)

    def _replaced(self) -> list[SavedWeights]:
        """Snapshots that are not among the newest of their models, and that no open sample reads."""
        by_model: dict[str, list[SavedWeights]] = {}
        for saved in self.checkpoints.values():
            if saved.ephemeral:
                by_model.setdefault(tinker_paths.stored_path(saved.path).model, []).append(saved)
        opened = self.open_folders()
        older = (saved for own in by_model.values() for saved in sorted(own, key=_created)[: -_most_ephemeral(own[0])])
        return [checkpoint for checkpoint in older if checkpoint.folder not in opened]

    def _last_use(self, checkpoint: SavedWeights) -> float:
        """When its client last used it; what was before this process started is not known, and counts as its start."""
        return max(checkpoint.created, self._started, self._used.get(checkpoint.path, 0.0))

    async def remove_folders(self) -> None:
        opened = self.open_folders()
        for folder in [folder for folder in self._unnamed if folder not in opened and not self._is_read(folder)]:
            await asyncio.to_thread(self.on_removed, folder)
            with contextlib.suppress(ApiError):  # then it is removed again
                await self._store.keep(durable_store.no_fact("unnamed", folder))
                self._unnamed.discard(folder)

    def sampler(self, owner: Owner, id: str) -> SamplingSession:
        """`NotFoundError` for one that is not there, or another owner's."""
        sampler = self.samplers.get(id)
        if sampler is None or sampler.owner != owner.name:
            raise NotFoundError(
                f"no sampling session {id!r}, or its snapshot was not used for {self.snapshot_seconds:.0f} s and newer "
                "ones exist; what save_weights_for_sampler saves under a name stays"
            )
        self._used[sampler.path] = self._clock()
        return sampler

    async def add_sampler(self, sampler: SamplingSession) -> None:
        await self._store.keep(durable_store.fact("sampler", sampler.id, encode(sampler)))
        self.samplers[sampler.id] = sampler

    async def drop_samplers(self, sessions: Set[str]) -> None:
        """Forget the sampling clients of these sessions, with their snapshots."""
        for checkpoint in [checkpoint for checkpoint in self.checkpoints.values() if checkpoint.ephemeral]:
            if tinker_paths.session_of(tinker_paths.stored_path(checkpoint.path).model) in sessions:
                await self.remove(checkpoint)
        old = [id for id in self.samplers if tinker_paths.session_of(id) in sessions]
        if old:
            await self._store.keep(*(durable_store.no_fact("sampler", id) for id in old))
        for id in old:
            self.samplers.pop(id, None)

    def put(self, model: Model, save: Save, size: int) -> tuple[SaveResult, list[Statement], Callable[[], None]]:
        """A checkpoint that was written: the result of its save, what to have in the store, and what to do then."""
        order = msgspec.json.decode(save.note, type=SaveNote)
        checkpoint = SavedWeights(
            path=order.path,
            owner=model.owner,
            base=model.base,
            adapter=model.adapter,
            folder=save.folder,
            size=size,
            created=self._clock(),
            expires=None if order.ttl is None else self._clock() + order.ttl,
            metadata=order.metadata,
            ephemeral=bool(order.sampler),
        )
        changes = [durable_store.fact("checkpoint", checkpoint.path, encode(checkpoint))]
        sampler = SamplingSession(order.sampler, model.owner, model.base, order.path) if order.sampler else None
        if sampler:
            changes.append(durable_store.fact("sampler", sampler.id, encode(sampler)))
        replaced = self.checkpoints.get(order.path)
        dropped = replaced.folder if replaced is not None and replaced.folder != checkpoint.folder else ""
        if dropped:
            changes.append(durable_store.fact("unnamed", dropped, b""))

        def after() -> None:
            self.checkpoints[checkpoint.path] = checkpoint
            if sampler:
                self.samplers[sampler.id] = sampler
            if dropped:
                self._unnamed.add(dropped)

        return SaveResult(size, order.path, order.sampler), changes, after


def _most_ephemeral(snapshot: SavedWeights) -> int:
    return MAX_EPHEMERAL if snapshot.adapter.rank else MAX_WHOLE_EPHEMERAL


def _created(checkpoint: SavedWeights) -> float:
    return checkpoint.created


def _restored(store: Store, kind: str, record_type: type[F]) -> dict[str, F]:
    return {key: msgspec.msgpack.decode(body, type=record_type) for key, body in store.facts(kind)}
