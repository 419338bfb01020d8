"""The vLLM plugin of Rollcall: called in every vLLM process before it does anything else.

Promises that a second call changes nothing, that importing it costs nothing without vLLM, and that vLLM's engine
processes never outlive the server that started them (vLLM leaves them behind when the server is killed), and that no
process of vLLM hears the scheduler's signals.
"""

import multiprocessing
import signal
from multiprocessing import util
from multiprocessing.context import BaseContext

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
    fork_engines()


def fork_engines() -> None:
    """Have the server fork its engine, which then need not import what the server has imported.

    vLLM's command line and its CPU platform choose `spawn`, as a fork breaks CUDA and OpenMP where they were used
    before. A server has used neither when it starts its engine; where CUDA was used all the same, vLLM's choice stands.
    """
    from vllm.v1.engine import utils

    stock = getattr(utils, "get_mp_context", None)
    if stock is None or stock.__module__ == __name__:
        return

    def get_mp_context() -> BaseContext:
        import torch

        used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        context: BaseContext = stock() if used else multiprocessing.get_context("fork")
        return context

    util.register_after_fork(fork_engines, _leave_parent)
    utils.get_mp_context = get_mp_context


def _leave_parent(_: object) -> None:
    """In the forked engine: end with the server, and tell no signal to the server's event loop."""
    die_with_parent()
    signal.set_wakeup_fd(-1)
