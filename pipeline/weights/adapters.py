"""The policy as an adapter (LoRA) inside a vLLM server, in place of a whole model.

Owns the server's own folder, where each adapter that the trainer sent replaces the one before, under the path that vLLM
knows it by. Promises that an adapter with layers that the model does not have is refused before anything changes, and
that requests in flight change over with all others: once an update is finished, vLLM forgets the adapters that it has,
and loads them again from where each request says, which is always this path. Must not know how the tensors came.

vLLM's own route for it, `/v1/load_lora_adapter`, is of no use here: with a new path the requests in flight go on with
the old one, and with `load_inplace` the server loads the adapter again before each of their tokens.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor
from vllm import envs
from vllm.lora.utils import parse_fine_tuned_lora_name

from pipeline.errors import WeightSyncError
from pipeline.system import files
from pipeline.weights.plugin import MODEL


class AdapterFolder:
    """Where this server's adapter lies."""

    def __init__(self, model: Any, base: str, settings: Mapping[str, Any], names: Iterable[str]) -> None:
        """Make ready for adapters of these settings and tensors; `WeightSyncError` when the server takes none such.

        Args:
            model: vLLM's; it has a `lora_manager` if the server was started with `--enable-lora`.
            base: the name that vLLM has for the model.
            settings: `r`, `lora_alpha` and `target_modules`, as in peft's `adapter_config.json`.
            names: of the tensors, as in a peft checkpoint.
        """
        folder = envs.VLLM_LORA_RESOLVER_CACHE_DIR
        if not folder or not hasattr(model, "lora_manager"):
            raise WeightSyncError("the trainer sends an adapter, but this server was not started to take one")
        _check_layers(model.lora_manager, names)
        self._folder = Path(folder) / MODEL
        self._folder.mkdir(exist_ok=True)
        config = {"peft_type": "LORA", "base_model_name_or_path": base, **settings}
        files.write_atomic(self._folder / "adapter_config.json", json.dumps(config).encode())

    def replace(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Put these tensors in the place of those before; vLLM loads them for the next token after the update."""
        try:
            files.write_atomic(self._folder / "adapter_model.safetensors", save(dict(tensors)))
        except OSError as error:
            raise WeightSyncError(f"the adapter cannot be kept in {self._folder}: {error}") from error


def _check_layers(manager: Any, names: Iterable[str]) -> None:
    """vLLM leaves out, without a word, what it finds no layer for."""
    known = set(manager.modules) | {part for parts in manager.packed_modules.values() for part in parts}
    strange = sorted({parse_fine_tuned_lora_name(name)[0] for name in names} - known)
    if strange:
        raise WeightSyncError(f"the server's model has no adapter at {len(strange)} layers, such as {strange[0]}")
