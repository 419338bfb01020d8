"""The vLLM plugin of Rollcall: called in every vLLM process before it does anything else.

Promises that a second call changes nothing, that importing it costs nothing without vLLM, and that vLLM's engine
processes never outlive the server that started them (vLLM leaves them behind when the server is killed), and that no
process of vLLM hears the scheduler's signals.
"""

import multiprocessing

from pipeline.system.process import die_with_parent, start_resource_tracker

ENGINES = {"gloo": "rollcall_gloo", "nccl": "rollcall_nccl"}
"""What vLLM calls our weight-transfer engines; it has an `nccl` of its own, which needs a pause."""
_PLACES = {
    "rollcall_gloo": ("pipeline.weights.engine", "GlooEngine"),
    "rollcall_nccl": ("pipeline.weights.nccl_engine", "NcclEngine"),
}
MODEL = "policy"
"""What every request asks a server for: the model that it serves, or the adapter on it."""


def register() -> None:
    """Make `ENGINES` weight-transfer engines of this vLLM process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from pipeline.weights.fast_logprobs import add_fast_logprobs
    from pipeline.weights.releases import add_float32_head

    if multiprocessing.parent_process() is not None:
        die_with_parent()
    start_resource_tracker()
    for name, (module, engine) in _PLACES.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, engine)
    add_float32_head()
    add_fast_logprobs()
