"""Saving and loading of a trainer's models.

Owns the names of the tensors in every checkpoint, of a run or of an offline job: `<model>/<part>`, with the parts of
`ModelWorker.state`. Clients' adapters have other names (`pipeline.train.service.service_checkpoints`). Promises that
models may change as soon as `stage_models` has returned, and that a save times out only after `Deadlines.checkpoint`.
Must not know jobs, ledgers, or the schedule of checkpoints.

    expect_save(dispatch, dispatch.models)                 # early: host memory is allocated in the background
    parts = stage_models(dispatch, state.models)           # the only part that blocks training
    start_save(dispatch, root, attempt, state, parts, keep)
    …
    await_save(dispatch, "the commit of rl-50")            # or without waiting: dispatch.saver.idle
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
    """Begin to allocate host memory for copies of these models with their optimizers; see `Saver.expect`. No model is
    moved for it, since shapes are known also for an offloaded model."""
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
    """Begin to write `state` with the staged parts, in the background; see `Saver.start`."""
    dispatch.run_on_all_models(_start, root, attempt, state, parts, keep)


def await_save(dispatch: RankGroup, what: str) -> None:
    """Wait until no save is in progress; `DeadlineError` naming `what` after `Deadlines.checkpoint` seconds."""

    def is_over() -> bool:
        dispatch.keepalive()
        return dispatch.saver.idle

    wait_for(what, is_over, dispatch.patience.checkpoint)


def load_models(dispatch: RankGroup, checkpoint: Checkpoint, names: Iterable[str], without: Sequence[str] = ()) -> None:
    """Load models and optimizers from a checkpoint, except the parts `without`.

    Raises `TrainingError` if the checkpoint has other tensors, and `DamagedCheckpointError` if a rank read other
    content than was saved: then the models are undefined, and all ranks are ready to load another checkpoint.
    """
    for name in names:
        damage = dispatch.run_on_all_models(
            load_model, name, checkpoint, name, without, needs={name: "load_checkpoint"}
        )[0]
        if damage is not None:
            raise damage


def forget_models(dispatch: RankGroup) -> None:
    """Remove all models, so that new ones can be created; does nothing after the loss of a rank."""
    if not dispatch.broken:
        for name in list(dispatch.models):
            dispatch.remove_model(name)


def _expect(site: RankState, name: str, prefix: str) -> None:
    """Announce a model's tensors to the saver; runs on every rank."""
    for part, tensors in _parts(site, name, prefix).items():
        site.saver.expect(part, tensors)


def stage_model(site: RankState, name: str, prefix: str) -> list[str]:
    """Copy a model for the next save, with names below `prefix`, and return the names of its parts; runs on every
    rank."""
    parts = _parts(site, name, prefix)
    for part, tensors in parts.items():
        site.saver.stage(part, tensors)
    return list(parts)


def _parts(site: RankState, name: str, prefix: str) -> dict[str, Tensors]:
    return {f"{prefix}/{part}": tensors for part, tensors in site.worker(name).state().items()}


def _start(site: RankState, root: str, attempt: str, state: TrainerState, parts: Sequence[str], keep: int) -> None:
    """Begin to write the staged parts; runs on every rank."""
    site.saver.start(root, attempt, state, parts, keep, site.background)


def load_model(
    site: RankState, name: str, checkpoint: Checkpoint, prefix: str, without: Sequence[str] = ()
) -> DamagedCheckpointError | None:
    """Load a model from the tensors below `prefix` of a checkpoint, except the parts `without`; runs on every rank,
    with the same result on all."""
    worker = site.worker(name)
    state = worker.state()
    targets = {f"{prefix}/{part}": tensors for part, tensors in state.items() if f"{prefix}/{part}" not in without}
    damage = fill(site, name, checkpoint, targets)
    if damage is None:
        worker.load_state(state)
    return damage


def fill(site: RankState, name: str, checkpoint: Checkpoint, targets: Tensors) -> DamagedCheckpointError | None:
    """Read a model's tensors from a checkpoint; runs on every rank, with the same result on all. The heartbeat shows
    the loading meanwhile."""
    with heartbeat.busy_with(f"loading {name}", site.patience.checkpoint):
        try:
            load_shards(checkpoint, targets, group=site.background)
        except DamagedCheckpointError as damage:
            return damage
    return None
