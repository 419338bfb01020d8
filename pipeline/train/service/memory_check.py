"""The memory check before a model is created.

Without it, a model that does not fit would end the trainer by an error on a rank, and interrupt all other clients.
Promises that the check allocates nothing, and that its estimate is a lower bound: a refused model could not have
worked."""

import psutil
import torch

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from pipeline.topology.gpu_memory import adapter_state_memory, least_trainer_memory
from pipeline.topology.memory_budget import GIB
from pipeline.topology.sizes import Sizes
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.train.model.model_size import check_client_adapters, sizes_of


class MemoryCheck:
    """Compares the memory that a model needs with the free memory of a dispatch's ranks."""

    def __init__(self, dispatch: RankGroup, ep: int, served: bool) -> None:
        """`ep`: ranks over which experts are sharded; `served`: whether clients' saved models go to servers."""
        self._dispatch, self._ep, self._served = dispatch, ep, served
        self._sizes: dict[str, Sizes] = {}

    def refusal_reason(self, model: ModelConfig, *, reuses_base: bool) -> str:
        """Why the model cannot be created, in one line; empty if it seems to fit. With `reuses_base`, only the adapter
        needs memory."""
        try:
            sizes = self._sizes_of(model)
        except ConfigError as error:
            return str(error)
        free = self._dispatch.run_on_all_models(_free)
        need = adapter_state_memory(sizes, len(free)) if reuses_base else least_trainer_memory(sizes, len(free))
        if need <= min(free):
            return ""
        return (
            f"there is no room for this model: it needs {need / GIB:.2f} GiB on each of {len(free)} ranks, "
            f"{min(free) / GIB:.2f} are free; end a session, or use rank and layers of an existing model"
        )

    def _sizes_of(self, model: ModelConfig) -> Sizes:
        key = model.model_dump_json()
        if key not in self._sizes:
            check_client_adapters(model, self._ep, self._served)
            self._sizes[key] = sizes_of(model)
        return self._sizes[key]


def _free(site: RankState) -> int:
    """Free bytes of this rank's device; runs on every rank. CPU ranks of one node share them."""
    if site.device == "cuda":
        # torch's allocator holds freed blocks, which CUDA reports as used.
        unused: int = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + unused
    return int(psutil.virtual_memory().available)
