"""Giving the devices back before anybody is told that the trainer is done.

Owns the rule that a completion is announced only when no rank holds anything any more: who hears of it may take the
devices at once. The models are not kept in host memory, as an offload would: they are committed and exported by now,
and a node need not have room for them.
"""

from pipeline.checkpoints.background import saver
from pipeline.errors import TrainingError
from pipeline.training.dispatch.dispatch import Dispatch
from pipeline.training.dispatch.ranks import Site


def release(dispatch: Dispatch) -> None:
    """Give the device memory of every model and optimizer back on every rank, see that it is, and drop the models.

    Every rank has answered when this returns: that is the barrier. `TrainingError` names what is still held; counted
    are the tensors of models and optimizers, not what an allocator keeps.
    """
    dispatch.on_sites(discard_models)
    for rank, models in enumerate(dispatch.memory()):
        for name, memory in models.items():
            if held := memory.model + memory.optimizer:
                raise TrainingError(f"rank {rank} still holds {held} bytes of {name}, which nobody needs any more")
    for name in list(dispatch.models):
        dispatch.remove_model(name)


def discard_models(site: Site) -> None:
    """On every rank: empty all models, and forget the copies that saves were written from."""
    saver.forget()
    for worker in site.workers.values():
        worker.discard()
