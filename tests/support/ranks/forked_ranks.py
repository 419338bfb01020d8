"""Ranks as processes that are forked from one which has imported torch and the trainer: they start in milliseconds.

Torchrun starts each of its processes from nothing, which takes seconds. These get the same environment, and as with
torchrun their store is the starter's: it has its port before any of them looks for it, and as long as they live.
"""

import os
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed import TCPStore

JOIN_SECONDS = 120.0
PRELOADED = [
    "tests.support.ranks.checkpoint_processes",
    "tests.support.ranks.checkpoint_worlds",
    "tests.support.ranks.training_ranks",
    "pipeline.train.model.lora",
    "transformers.models.qwen3.modeling_qwen3",
    "tests.support.ranks.frozen_imports",
]
Work = Callable[..., None]

_stores: WeakKeyDictionary[BaseProcess, TCPStore] = WeakKeyDictionary()
"""The store of each rank's world."""
_context = get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


def run_ranks(count: int, work: Work, *arguments: Any, seconds: float = JOIN_SECONDS) -> None:
    """Run `work(rank, *arguments)`, which asserts, in `count` processes; fail if one of them does."""
    ranks = start_ranks(count, work, *arguments)
    for process in ranks:
        process.join(seconds)
    codes = [process.exitcode for process in ranks]
    end_ranks(ranks)
    assert codes == [0] * count, f"exit codes of the ranks of {work.__name__}"


def start_ranks(count: int, work: Work, *arguments: Any) -> list[BaseProcess]:
    """The processes of `run_ranks`, started."""
    return start_in(_context, count, work, *arguments)


def start_in(context: Any, count: int, work: Work, *arguments: Any) -> list[BaseProcess]:
    """`start_ranks` with processes of another context of multiprocessing."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    worlds = [dict(os.environ) | place_of(rank, count, store.port) for rank in range(count)]
    ranks = [context.Process(target=enter, args=(rank, world, work, *arguments)) for rank, world in enumerate(worlds)]
    for process in ranks:
        process.start()
        _stores[process] = store
    return list(ranks)


def end_ranks(ranks: list[BaseProcess]) -> None:
    """KILL those that are left, and wait for them."""
    for process in ranks:
        process.kill()
    for process in ranks:
        process.join()


def place_of(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun says to a rank."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    return place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def enter(rank: int, environment: dict[str, str], work: Work, *arguments: Any) -> None:
    """What each process runs: `work`, in this environment."""
    import fsspec.config
    import torch

    os.environ.clear()
    os.environ |= environment
    fsspec.config.set_conf_env(fsspec.config.conf)  # which fsspec itself does when it is imported
    torch.set_num_threads(1)
    work(rank, *arguments)
