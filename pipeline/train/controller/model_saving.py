"""The models of a trainer on their way to a checkpoint, and back.

Owns the layout of the tensors in every checkpoint, of a run or of a job that stands alone: `<model>/<part>`, where the
parts are those of `ModelWorker.state`; clients' adapters have one of their own
(`pipeline.train.service.service_checkpoints`). Promises that models may change as soon as `stage_models` returned, and
that a save is given up only after `Deadlines.checkpoint`, however slow one of its parts is. Must not know jobs,
ledgers, nor when to save.

    expect_save(dispatch, dispatch.models)                 # early: memory for the copies is made meanwhile
    parts = stage_models(dispatch, state.models)           # only this holds training up
    start_save(dispatch, root, attempt, state, parts, keep)
    …
    await_save(dispatch, "the commit of rl-50")            # or now and then: dispatch.saver.idle
    checkpoint = dispatch.saver.result()

    load_models(dispatch, checkpoint, names)
"""

from collections.abc import Iterable, Sequence

from pipeline.checkpoints import Checkpoint, TrainerState
from pipeline.checkpoints.sharded_state import Tensors, load_shards
from pipeline.errors import DamagedCheckpointError
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.utils import heartbeat
from pipeline.utils.waiting import wait_for


def expect_save(dispatch: RankGroup, names: Iterable[str]) -> None:
    """Begin to make the memory that copies of these models with their optimizers take; see `Saver.expect`. Nothing is
    moved for it: shapes are there also where a model is not."""
    for name in names:
        dispatch.run_on_all_models(_expect, name, name)


def stage_models(dispatch: RankGroup, names: Iterable[str]) -> list[str]:
    """Copy models with their optimizers for the save that follows; the names of their parts."""
    parts: list[str] = []
    for name in names:
        parts += dispatch.run_on_all_models(stage_model, name, name, needs={name: "save_checkpoint"})[0]
    return parts


def start_save(
    dispatch: RankGroup, root: str, attempt: str, state: TrainerState, parts: Sequence[str], keep: int
) -> None:
    """Begin to commit `state` with the parts that were staged, in the background; see `Saver.start`."""
    dispatch.run_on_all_models(_start, root, attempt, state, parts, keep)


def await_save(dispatch: RankGroup, what: str) -> None:
    """Wait until no save is under way; `DeadlineError` naming `what` after `Deadlines.checkpoint` seconds."""

    def is_over() -> bool:
        dispatch.keepalive()
        return dispatch.saver.idle

    wait_for(what, is_over, dispatch.patience.checkpoint)


def load_models(dispatch: RankGroup, checkpoint: Checkpoint, names: Iterable[str], without: Sequence[str] = ()) -> None:
    """Fill models and optimizers from a checkpoint, but for the parts `without`.

    Raises `TrainingError` if the checkpoint holds other tensors, and `DamagedCheckpointError` if a rank read something
    else than was committed: then the models are worth nothing, and all ranks are ready to load another checkpoint.
    """
    for name in names:
        damage = dispatch.run_on_all_models(
            load_model, name, checkpoint, name, without, needs={name: "load_checkpoint"}
        )[0]
        if damage is not None:
            raise damage


def forget_models(dispatch: RankGroup) -> None:
    """Remove all models, so that others can be made; nothing happens once a rank is lost."""
    if not dispatch.broken:
        for name in list(dispatch.models):
            dispatch.remove_model(name)


def _expect(site: RankState, name: str, place: str) -> None:
    """On every rank."""
    for part, tensors in _parts(site, name, place).items():
        site.saver.expect(part, tensors)


def stage_model(site: RankState, name: str, place: str) -> list[str]:
    """On every rank: copy a model for the next save, below `place`; the names of its parts."""
    parts = _parts(site, name, place)
    for part, tensors in parts.items():
        site.saver.stage(part, tensors)
    return list(parts)


def _parts(site: RankState, name: str, place: str) -> dict[str, Tensors]:
    return {f"{place}/{part}": tensors for part, tensors in site.worker(name).state().items()}


def _start(site: RankState, root: str, attempt: str, state: TrainerState, parts: Sequence[str], keep: int) -> None:
    """On every rank."""
    site.saver.start(root, attempt, state, parts, keep, site.background)


def load_model(
    site: RankState, name: str, checkpoint: Checkpoint, place: str, without: Sequence[str] = ()
) -> DamagedCheckpointError | None:
    """On every rank, which all find the same: fill a model from below `place` of a checkpoint, but for some parts."""
    worker = site.worker(name)
    state = worker.state()
    wanted = {f"{place}/{part}": tensors for part, tensors in state.items() if f"{place}/{part}" not in without}
    damage = fill(site, name, checkpoint, wanted)
    if damage is None:
        worker.load_state(state)
    return damage


def fill(site: RankState, name: str, checkpoint: Checkpoint, wanted: Tensors) -> DamagedCheckpointError | None:
    """On every rank, which all find the same: read tensors of a model from a checkpoint, while heartbeats tell so."""
    with heartbeat.busy_with(f"loading {name}", site.patience.checkpoint):
        try:
            load_shards(checkpoint, wanted, group=site.background)
        except DamagedCheckpointError as damage:
            return damage
    return None
