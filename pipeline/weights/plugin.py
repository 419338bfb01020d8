"""The vLLM plugin of Rollcall: called in every vLLM process before it does anything else.

Promises that a second call changes nothing, that importing it costs nothing without vLLM, and that vLLM's engine
processes never outlive the server that started them (vLLM leaves them behind when the server is killed), and that no
process of vLLM hears the scheduler's signals.
"""

import multiprocessing

from pipeline.process import die_with_parent, start_resource_tracker

BACKEND = "gloo"
MODEL = "policy"
"""What every request asks a server for: the model that it serves, or the adapter on it."""


def register() -> None:
    """Make `{"backend": "gloo"}` a weight-transfer engine of this vLLM process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if multiprocessing.parent_process() is not None:
        die_with_parent()
    start_resource_tracker()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "pipeline.weights.engine", "GlooEngine")
