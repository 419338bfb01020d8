"""Whether a model can be made.

Owns the look before a model is made: an error on a rank ends the trainer, and with it what all others were doing.
Promises that nothing is made by looking, and that the need which it tells is a lower bound: what is refused could not
have worked."""

import psutil
import torch

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from pipeline.topology.gpu_memory import GIB, Sizes, adapter_state_memory, least_trainer_memory
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.train.model.model_size import check_client_adapters, sizes_of


class MemoryCheck:
    """The memory of a dispatch's ranks, and what models would take of it."""

    def __init__(self, dispatch: RankGroup, ep: int, served: bool) -> None:
        """`ep`: ranks over which experts are spread; `served`: whether servers get what clients save."""
        self._dispatch, self._ep, self._served = dispatch, ep, served
        self._sizes: dict[str, Sizes] = {}

    def refusal_reason(self, model: ModelConfig, *, reuses_base: bool) -> str:
        """Why there can be no such model, in one line; empty if it seems that there can. `shares`: its base is there
        already, and only its adapter is new."""
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
            f"{min(free) / GIB:.2f} are free; end a session, or use rank and layers of a model that is there"
        )

    def _sizes_of(self, model: ModelConfig) -> Sizes:
        key = model.model_dump_json()
        if key not in self._sizes:
            check_client_adapters(model, self._ep, self._served)
            self._sizes[key] = sizes_of(model)
        return self._sizes[key]


def _free(site: RankState) -> int:
    """On every rank: bytes that it may yet take where it computes. Ranks on one node of CPUs share them."""
    if site.device == "cuda":
        unused: int = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + unused
    return int(psutil.virtual_memory().available)
