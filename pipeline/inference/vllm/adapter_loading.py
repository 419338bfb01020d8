"""The policy as an adapter (LoRA) inside one process of a vLLM server.

Owns the newest adapter from the trainer, and its installation in vLLM. An adapter with layers that the model lacks is
refused before anything changes. The adapter changes between two steps of the engine, for all requests including those
in flight, without a pause. vLLM never reads it from a file.

    slot = AdapterSlot(model, base, settings, names)   # when the server meets the trainer
    adapter = slot.prepare(tensors)                    # in the receiving thread, while the engine generates
    slot.install(adapter)                              # between two steps

vLLM's API process resolves the name `policy` to a folder of the server that has the adapter's settings but no tensors.
When vLLM's adapter manager loads this folder, it gets the installed adapter. Every process of a tensor-parallel server
receives the whole adapter, and vLLM slices it.

vLLM's route `/v1/load_lora_adapter` is unsuitable: with a new path, requests in flight continue with the old adapter;
with `load_inplace`, the server loads the adapter again before each of their tokens.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm import envs
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.lora.worker_manager import WorkerLoRAManager

from pipeline.errors import WeightSyncError
from pipeline.inference.engine_protocol import POLICY
from pipeline.inference.vllm.stock_functions import stock_function
from pipeline.inference.vllm.vllm_compat import adapter_renames
from pipeline.utils import shared_files

_ANY_ID = 1
"""The id of an adapter before its installation. vLLM chooses another id for each copy that it loads."""
_installed: dict[str, Any] = {}
"""The installed adapter of this process, by its folder."""


class AdapterSlot:
    """The adapter of this process of a server."""

    def __init__(self, model: Any, base: str, settings: Mapping[str, Any], names: Iterable[str]) -> None:
        """Prepare for adapters with these settings and tensors. `WeightSyncError` if the server cannot load them.

        Args:
            model: vLLM's model; it has a `lora_manager` if the server was started with `--enable-lora`.
            base: vLLM's name of the model.
            settings: `r`, `lora_alpha` and `target_modules`, as in peft's `adapter_config.json`.
            names: names of the tensors, as in a peft checkpoint.
        """
        folder = envs.VLLM_LORA_RESOLVER_CACHE_DIR
        if not folder or not hasattr(model, "lora_manager"):
            raise WeightSyncError("the trainer sends an adapter, but this server was not started to take one")
        self._manager, self._renames = model.lora_manager, adapter_renames(model)
        self._skipped = getattr(model, "lora_skip_prefixes", None)
        self._folder = Path(folder) / POLICY
        self._config = {"peft_type": "LORA", "base_model_name_or_path": base, **settings}
        self._helper = PEFTHelper.from_dict(self._config)
        try:
            self._helper.validate_legal(self._manager.lora_config)
        except ValueError as error:
            raise WeightSyncError(f"the server cannot take adapters with {dict(settings)}: {error}") from error
        self._check_layers(names)
        _load_installed_adapter()

    def prepare(self, tensors: Sequence[tuple[str, Tensor]]) -> Any:
        """vLLM's representation of an adapter in host memory, with copies of the tensors."""
        return LoRAModel.from_lora_tensors(
            lora_model_id=_ANY_ID,
            tensors={name: tensor.clone() for name, tensor in tensors},  # vLLM scales B in place
            peft_helper=self._helper,
            device="cpu",
            dtype=self._manager.lora_config.lora_dtype,
            model_vocab_size=self._manager.vocab_size,
            weights_mapper=self._renames,
            skip_prefixes=self._skipped,
        )

    def install(self, adapter: Any) -> None:
        """Install the adapter for the engine's next step and all later ones. Call this between two steps.

        vLLM drops its copies here. Releases that treat the base model as changed drop them again at the end of an
        update. The next step with a request loads the adapter again, from memory.
        """
        settings = self._folder / "adapter_config.json"
        if not settings.exists():  # written once, with the first adapter
            try:
                shared_files.write_atomic(settings, json.dumps(self._config).encode())
            except OSError as error:
                raise WeightSyncError(f"the adapter's settings cannot be written to {settings}: {error}") from error
        _installed[str(self._folder)] = adapter
        self._manager.remove_all_adapters()

    def _check_layers(self, names: Iterable[str]) -> None:
        """Raise `WeightSyncError` for tensors of unknown layers, which vLLM would ignore silently."""
        packed = self._manager.packed_modules.values()
        known = {*self._manager.modules, *(part for parts in packed for part in parts)}
        unknown = sorted({parse_fine_tuned_lora_name(name, self._renames)[0] for name in names} - known)
        if unknown:
            raise WeightSyncError(f"the server's model has no adapter at {len(unknown)} layers, such as {unknown[0]}")


def _load_installed_adapter() -> None:
    """Patch vLLM's adapter manager to load the installed adapter of a folder instead of its files.

    A second call changes nothing.
    """
    try:
        stock = stock_function(WorkerLoRAManager, "_load_adapter", "self", "lora_request", by=__name__)
    except ImportError as error:
        raise WeightSyncError(str(error)) from None
    if stock is not None:
        WorkerLoRAManager._load_adapter = _loading(stock)


def _loading(stock: Callable[..., Any]) -> Callable[..., Any]:
    def load_adapter(self: Any, lora_request: Any) -> Any:
        installed = _installed.get(lora_request.lora_path)
        return stock(self, lora_request) if installed is None else installed.clone(lora_request.lora_int_id)

    return load_adapter
