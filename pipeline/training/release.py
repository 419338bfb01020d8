"""Giving the devices back before anybody is told that the trainer is done.

Owns the rule that a completion is announced only when every rank holds nothing any more: who hears of it may take the
devices at once.
"""

from pipeline.errors import TrainingError
from pipeline.training.dispatch import Dispatch


def release(dispatch: Dispatch) -> None:
    """Offload every model and optimizer on every rank, and see that their device memory is given back.

    Every rank has answered when this returns: that is the barrier. `TrainingError` names what is still held.
    """
    dispatch.offload_all()
    dispatch.empty_cache()
    for rank, models in enumerate(dispatch.memory()):
        for name, memory in models.items():
            if held := memory.model + memory.optimizer:
                raise TrainingError(f"rank {rank} still holds {held} bytes of {name} after its offload")
