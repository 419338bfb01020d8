"""All models of a trainer that serves, in one commit.

Owns what such a commit holds: every model with its optimizer, and the number of the last request that it has behind it.
An adapter lies in `<id>/<vector>/rank-<n>`, as each of the ranks that committed it packed it.
Promises that what is restored is one commit whole; that a model whose gradients wait for a step is saved as it was
after its last step, and its requests since are asked for again; and that at most one commit is under way."""

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
from pipeline.train.controller.model_saving import await_save, fill, forget_models, load_model, stage_model, start_save
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.train.model import adapter_swap
from pipeline.train.service.client_models import ServedModels

log = logging.getLogger(__name__)


class _Model(msgspec.Struct, frozen=True):
    """`ranks`: how many had a part of it, each one of its own if it is an adapter."""

    adapter: Adapter
    cursor: int
    ranks: int


class ServiceCheckpoints:
    """The commits of one attempt below `root`."""

    def __init__(
        self, root: str, attempt: str, dispatch: RankGroup, keep: int, paths: AttemptPaths | None = None
    ) -> None:
        """`paths` are those of the attempt, where it belongs to a run."""
        self._root, self._attempt, self._dispatch, self._keep = root, attempt, dispatch, keep
        self._paths, self._marked = paths, paths is None
        self.fence = Fence(root, attempt)
        self._number = 0
        self._flight: dict[str, int] | None = None
        self._began = self._took = 0.0

    def restore(self, models: ServedModels, job: str) -> dict[str, int]:
        """Make the models of the newest commit that is whole; the last request that each has behind it.

        `CheckpointError` where a run that had committed has no commit to go on from.
        """
        self.fence.claim(job)
        if self._paths is not None:
            copy_identity(RunPaths(self._paths.run), self._root)
        cursors = self._newest(models)
        remove_unfinished(self._root, self._attempt)
        return cursors

    def _newest(self, models: ServedModels) -> dict[str, int]:
        found = complete_checkpoints(self._root)
        for checkpoint in found:
            try:
                cursors = self._load(checkpoint, models)
            except DamagedCheckpointError as damage:
                log.warning("%s is refused, now and in later attempts: %s", checkpoint.name, damage)
                for id in models.adapters:
                    models.remove(id)
                forget_models(self._dispatch)
            else:
                self.fence.keep([checkpoint.folder, *(older.folder for older in found)])
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
            damage = models.run_on_model(id, load, checkpoint, _place(id), *more, needs="load_checkpoint")[0]
            if damage is not None:
                raise damage
        self._number = state.step
        log.info("going on from %s with %d models", checkpoint.name, len(known))
        return {id: model.cursor for id, model in known.items()}

    @property
    def none_yet(self) -> bool:
        """Whether this run has no commit."""
        return self._number == 0

    @property
    def idle(self) -> bool:
        """Whether no commit is under way."""
        return self._flight is None

    @property
    def rest(self) -> float:
        """The time since the last commit began, in units of what it took."""
        return (time.monotonic() - self._began) / self._took if self._took else math.inf

    def start(self, models: ServedModels, cursors: Mapping[str, int]) -> None:
        """Begin to commit all models as they are; they may change when this returns. None is under way."""
        self.fence.check()
        self._began = time.monotonic()
        parts: list[str] = []
        adapters = models.adapters
        for id in cursors:
            if not adapters[id].rank:
                parts += models.run_on_model(id, stage_model, _place(id), needs="save_checkpoint")[0]
        sharing: dict[str, list[tuple[str | None, str]]] = {}
        for id in cursors:
            if adapters[id].rank:
                name, key = models.place(id)
                sharing.setdefault(name, []).append((key, _place(id)))
        for name, packing in sharing.items():  # one after the other: there may be room for one base only
            parts += self._dispatch.run_on_all_models(_stage_adapters, name, packing, needs={name: "save_checkpoint"})[
                0
            ]
        ranks = len(self._dispatch.run_on_all_models(_rank))
        known = {id: _Model(adapters[id], cursor, ranks) for id, cursor in cursors.items()}
        state = TrainerState(
            job="serve", step=self._number + 1, models=tuple(known), served=msgspec.msgpack.encode(known)
        )
        start_save(self._dispatch, self._root, self._attempt, state, parts, self._keep)
        self._number, self._flight = self._number + 1, dict(cursors)

    def collect(self) -> dict[str, int] | None:
        """The cursors of the commit that was under way, once it is durable; `CheckpointError` if it failed. Cheap."""
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
        """Wait for the commit under way, then `collect`."""
        if self._flight is not None and not self._dispatch.broken:
            await_save(self._dispatch, f"the commit of serve-{self._number}")
        return self.collect()


def _place(id: str) -> str:
    return id.replace(":", "-")


def _rank(site: RankState) -> int:
    return site.rank


def _stage_adapters(site: RankState, name: str, packing: Sequence[tuple[str | None, str]]) -> list[str]:
    """On every rank: adapters on one model, by key and place; the names of the parts."""
    worker, parts = site.worker(name), []
    for key, place in packing:
        for vector in adapter_swap.VECTORS:
            parts.append(f"{place}/{vector}")
            site.saver.stage(parts[-1], {f"rank-{site.rank}": adapter_swap.packed(worker, key, vector)})
    return parts


def _load_adapter(
    site: RankState, name: str, checkpoint: Checkpoint, place: str, ranks: int
) -> DamagedCheckpointError | None:
    """On every rank, which all find the same: what each of `ranks` staged of an adapter."""
    worker = site.worker(name)
    packs = adapter_swap.empty_packs(worker, ranks)
    wanted = {
        f"{place}/{each}": {f"rank-{i}": pack[each] for i, pack in enumerate(packs)} for each in adapter_swap.VECTORS
    }
    damage = fill(site, name, checkpoint, wanted)
    if damage is None:
        adapter_swap.unpack(worker, packs)
    return damage
