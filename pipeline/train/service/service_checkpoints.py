"""Checkpoints of a serving trainer: all models in one.

A checkpoint has every model with its optimizer, and the number of the model's last completed request (its cursor). The
parts of an adapter are `<id>/<vector>/rank-<n>`, one for each rank that saved it. Promises that a restored state is
exactly one checkpoint; that a model with accumulated gradients is saved with the cursor of its last step, so that the
requests since are repeated; and that at most one save is in progress."""

import logging
import math
import time
from collections.abc import Mapping, Sequence

import msgspec

from pipeline.checkpoints import Checkpoint, Fence, TrainerState, complete_checkpoints, remove_unfinished
from pipeline.checkpoints.run_progress import copy_identity, mark_checkpointed, refuse_restart
from pipeline.errors import DamagedCheckpointError
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.tinker.tinker_records import Adapter
from pipeline.train.controller.device_placement import Requirements
from pipeline.train.controller.model_saving import await_save, fill, forget_models, load_model, stage_model, start_save
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.train.model import adapter_swap
from pipeline.train.service.client_models import ServedModels

log = logging.getLogger(__name__)


class _Model(msgspec.Struct, frozen=True):
    """A model in a checkpoint: its adapter, its cursor, and the number of ranks that saved it."""

    adapter: Adapter
    cursor: int
    ranks: int


class ServiceCheckpoints:
    """Reads and writes the checkpoints below `root`, for one attempt."""

    def __init__(
        self, root: str, attempt: str, dispatch: RankGroup, keep: int, paths: AttemptPaths | None = None
    ) -> None:
        """`paths` are those of the attempt, if it belongs to a run."""
        self._root, self._attempt, self._dispatch, self._keep = root, attempt, dispatch, keep
        self._paths, self._marked = paths, paths is None
        self.fence = Fence(root, attempt)
        self._number = 0
        self._flight: dict[str, int] | None = None
        self._began = self._took = 0.0

    def restore(self, models: ServedModels, job: str) -> dict[str, int]:
        """Create the models of the newest undamaged checkpoint, and return their cursors.

        `CheckpointError` if the run had a checkpoint and none can be loaded.
        """
        self.fence.claim(job)
        if self._paths is not None:
            copy_identity(RunPaths(self._paths.run), self._root)
        cursors = self._newest(models)
        remove_unfinished(self._root, self._attempt)
        return cursors

    def _newest(self, models: ServedModels) -> dict[str, int]:
        candidates = complete_checkpoints(self._root)
        for checkpoint in candidates:
            try:
                cursors = self._load(checkpoint, models)
            except DamagedCheckpointError as damage:
                log.warning("%s is refused, now and in later attempts: %s", checkpoint.name, damage)
                for id in models.adapters:
                    models.remove(id)
                forget_models(self._dispatch)
            else:
                # `candidates` is an iterator, newest first, so what remains of it are the older checkpoints.
                self.fence.keep([checkpoint.folder, *(older.folder for older in candidates)])
                return cursors
        if self._paths is not None:
            refuse_restart(RunPaths(self._paths.run), self._root)
        self.fence.keep([])
        return {}

    def _load(self, checkpoint: Checkpoint, models: ServedModels) -> dict[str, int]:
        state = checkpoint.state()
        known = msgspec.msgpack.decode(state.served, type=dict[str, _Model])
        for id, model in known.items():
            models.create(id, model.adapter)
            load, more = (_load_adapter, (model.ranks,)) if model.adapter.rank else (load_model, ())
            damage = models.run_on_model(id, load, checkpoint, _prefix(id), *more, needs="load_checkpoint")[0]
            if damage is not None:
                raise damage
        self._number = state.step
        log.info("continuing from %s with %d models", checkpoint.name, len(known))
        return {id: model.cursor for id, model in known.items()}

    @property
    def none_yet(self) -> bool:
        """Whether this run has no checkpoint."""
        return self._number == 0

    @property
    def idle(self) -> bool:
        """Whether no save is in progress."""
        return self._flight is None

    @property
    def rest(self) -> float:
        """The time since the last save began, divided by its duration."""
        return (time.monotonic() - self._began) / self._took if self._took else math.inf

    def start(self, models: ServedModels, cursors: Mapping[str, int]) -> None:
        """Begin a checkpoint of the models in `cursors`; they may change after the return. No save may be in
        progress."""
        self.fence.check()
        self._began = time.monotonic()
        parts: list[str] = []
        adapters = models.adapters
        for id in cursors:
            if not adapters[id].rank:
                parts += models.run_on_model(id, stage_model, _prefix(id), needs="save_checkpoint")[0]
        # Adapters are staged by slot, where they are: the active one, and the swapped-out ones in host memory.
        sharing: dict[str, list[tuple[str | None, str]]] = {}
        for id in cursors:
            if adapters[id].rank:
                name, key = models.location(id)
                sharing.setdefault(name, []).append((key, _prefix(id)))
        for name, adapters_of_base in sharing.items():  # in turn: the device may have memory for one base only
            needs: Requirements = {name: "save_checkpoint"}
            parts += self._dispatch.run_on_all_models(_stage_adapters, name, adapters_of_base, needs=needs)[0]
        ranks = len(self._dispatch.run_on_all_models(_rank))
        known = {id: _Model(adapters[id], cursor, ranks) for id, cursor in cursors.items()}
        state = TrainerState(
            job="serve", step=self._number + 1, models=tuple(known), served=msgspec.msgpack.encode(known)
        )
        start_save(self._dispatch, self._root, self._attempt, state, parts, self._keep)
        self._number, self._flight = self._number + 1, dict(cursors)

    def collect(self) -> dict[str, int] | None:
        """The cursors of the save in progress, once its checkpoint is durable; `CheckpointError` if it failed. Does not
        wait."""
        if self._flight is None or not self._dispatch.saver.idle:
            return None
        flight, self._flight = self._flight, None
        self._took = self._dispatch.saver.ended - self._began
        checkpoint = self._dispatch.saver.result()
        log.info("committed %s", checkpoint.name)
        if self._paths is not None:
            self._marked = self._marked or mark_checkpointed(self._paths)
        return flight

    def finish(self) -> dict[str, int] | None:
        """Wait for the save in progress, then `collect`."""
        if self._flight is not None and not self._dispatch.broken:
            await_save(self._dispatch, f"the commit of serve-{self._number}")
        return self.collect()


def _prefix(id: str) -> str:
    """The prefix of a model's parts in a checkpoint."""
    return id.replace(":", "-")


def _rank(site: RankState) -> int:
    return site.rank


def _stage_adapters(site: RankState, name: str, adapters: Sequence[tuple[str | None, str]]) -> list[str]:
    """Copy the adapters (key, prefix) of one model for a save, and return the names of their parts; runs on every
    rank."""
    worker, parts = site.worker(name), []
    for key, prefix in adapters:
        for vector in adapter_swap.VECTORS:
            parts.append(f"{prefix}/{vector}")
            site.saver.stage(parts[-1], {f"rank-{site.rank}": adapter_swap.packed(worker, key, vector)})
    return parts


def _load_adapter(
    site: RankState, name: str, checkpoint: Checkpoint, prefix: str, ranks: int
) -> DamagedCheckpointError | None:
    """Load an adapter that `ranks` ranks saved; runs on every rank, with the same result on all."""
    worker = site.worker(name)
    # Every rank reads all packs and unpacks its shard, since the number of ranks may have changed since the save.
    packs = adapter_swap.empty_packs(worker, ranks)
    tensors = {
        f"{prefix}/{vector}": {f"rank-{rank}": pack[vector] for rank, pack in enumerate(packs)}
        for vector in adapter_swap.VECTORS
    }
    damage = fill(site, name, checkpoint, tensors)
    if damage is None:
        adapter_swap.unpack(worker, packs)
    return damage
