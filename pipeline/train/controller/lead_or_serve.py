"""The start and the end of a trainer's processes: rank 0 is the controller, the others are workers.

Owns the creation of the `RankGroup`, and the config keys that it and its world depend on. Must not know algorithms.
"""

from collections.abc import Callable
from functools import partial

from pipeline.config import RunConfig
from pipeline.config.debug_keys import DEBUGGER_SECONDS
from pipeline.topology.memory_fit import trainer_allowance
from pipeline.topology.sizes import sizes_of_run
from pipeline.train.batching.packing import Budget
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Allowance, Deadlines, Device, joined_world
from pipeline.train.model.model_size import sizes_of


def run_controller_or_worker(
    algorithm: Callable[[RankGroup], None],
    budget: Budget,
    *,
    device: Device = "cpu",
    patience: Deadlines | None = None,
    colocated: bool = False,
    secret: str = "",
    allowance: Allowance | None = None,
) -> None:
    """Run `algorithm` on rank 0, and operations on the other ranks, until the algorithm returns.

    Called in each process of torchrun. `secret` authenticates messages between the ranks, `allowance` bounds each
    process's memory of its device: see `joined_world`.
    """
    with joined_world(device, patience or Deadlines(), secret, allowance) as site:
        if site.rank != 0:
            site.serve()
            return
        dispatch = RankGroup(site, budget, colocated)
        try:
            algorithm(dispatch)
        finally:
            dispatch.close()


def run_role_of_rank(config: RunConfig, secret: str, algorithm: Callable[[RankGroup], None]) -> None:
    """`run_controller_or_worker` with the micro-batches, the device and the offload of a config. On GPUs that servers
    share, each process is limited to the memory that they leave: `ConfigError` if it is too little."""
    training, resources = config.training, config.resources
    budget = Budget(
        training.micro_batch_budget,
        training.micro_batch_rows or None,
        packed=training.packing,
        shared=config.shares_prefixes,
    )
    shared = resources.colocate and config.has_servers
    allowance = partial(trainer_allowance, config, sizes_of_run(config, sizes_of)) if shared else None
    run_controller_or_worker(
        algorithm,
        budget,
        device=resources.device,
        patience=Deadlines(DEBUGGER_SECONDS, DEBUGGER_SECONDS) if config.debug.role else None,
        colocated=training.offload_idle_models,
        secret=secret,
        allowance=allowance,
    )
