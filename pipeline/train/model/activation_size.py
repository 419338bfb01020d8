"""The bytes of activations that a backward pass needs, counted on the meta device.

A network on the meta device computes a line of tokens, and the tensors that autograd saves for the backward pass are
summed. Of layers that are alike only the first three compute: each further one adds what the third one saved. So 94
layers take little longer than three. Promises that no number is computed. Must not know the config of a run, nor the
use of the sizes.

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(…, attn_implementation=ATTENTION)
    activations_of(network)         # (24586.0, 9216.0), bytes per token
"""

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface

from pipeline.errors import one_line
from pipeline.train.model.recomputation import is_saved

log = logging.getLogger(__name__)

ATTENTION = "rollcall_sizes"
_TOKENS = 256
_COMPUTED = 3
"""How many of the layers that are alike compute. The input of the first one may need no gradient, as below adapters.
What all layers share, such as rotary factors, is then saved by the second one."""


class HeadCountError(ValueError):
    """The heads of keys do not divide those of queries, so that no kernel can attend."""


def activations_of(network: Any, computed: int = _COMPUTED) -> tuple[float, float]:
    """`activations` and `selected` of `Sizes`: bytes per token that a backward pass through the decoder needs, without
    parameters; 0 if the network cannot run on the meta device, such as one whose routing depends on values.

    The network is used up: most of its layers cannot compute afterwards. Of layers that are alike, `computed` compute.
    `HeadCountError` for a network whose heads of queries are no multiple of those of keys.
    """
    saved, tokens_BT = _SavedBytes(network), torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    seen: Counter[str] = Counter()
    for layer in network.get_decoder().layers:
        kind = _description(layer)
        seen[kind] += 1
        repeats = seen[kind] > computed
        layer.forward = partial(saved.repeat, kind) if repeats else partial(saved.compute, kind, layer.forward)
    try:
        with saved_tensors_hooks(saved.keep, lambda tensor: tensor), saved.selected:
            output = network.get_decoder()(input_ids=tokens_BT, position_ids=tokens_BT, use_cache=False)
    except HeadCountError:
        raise
    except Exception as error:  # noqa: BLE001 (any family may refuse in its own way)
        log.info("the activations of %s cannot be measured: %s", type(network).__name__, one_line(error)[:200])
        return 0.0, 0.0
    del output
    return saved.bytes / _TOKENS, saved.selected.bytes / _TOKENS


def _description(layer: nn.Module) -> str:
    """Equal for layers that save the same bytes: their modules, the shapes of their parameters, and their settings."""
    parameters = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()]
    settings = [
        (name, sorted((key, value) for key, value in vars(module).items() if _is_setting(key, value)))
        for name, module in layer.named_modules()
    ]
    return repr((type(layer), parameters, settings))


def _is_setting(key: str, value: object) -> bool:
    return key != "layer_idx" and not key.startswith("_") and isinstance(value, bool | int | float | str)


class _SavedBytes:
    """The bytes that autograd saves in a forward pass."""

    def __init__(self, network: Any) -> None:
        self._parameters = {p.untyped_storage()._cdata for p in network.parameters()}
        self._saved: dict[int, Tensor] = {}
        self.bytes = 0
        self.selected = _SelectedOutputs(network.config.get_text_config().hidden_size)
        self._of_kind: dict[str, tuple[int, int, Any]] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a saved tensor; the hook of autograd."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._parameters and storage._cdata not in self._saved:
            self._saved[storage._cdata] = tensor  # referenced, so that no other storage gets the same address
            self.bytes += storage.nbytes()
        return tensor

    def compute(self, kind: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The output of a layer; note what its kind saves."""
        before = self.bytes, self.selected.bytes
        output = forward(*args, **kwargs)
        self._of_kind[kind] = self.bytes - before[0], self.selected.bytes - before[1], output
        return output

    def repeat(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        """New tensors like the output of the last layer of this kind; count what the kind saves."""
        saved, selected, output = self._of_kind[kind]
        self.bytes += saved
        self.selected.bytes += selected
        return tree_map_only(Tensor, lambda x: torch.empty_like(x).requires_grad_(x.requires_grad), output)


class _SelectedOutputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of outputs that selective recomputation keeps."""

    def __init__(self, hidden: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hidden, self.bytes = hidden, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.rollcall.counted_attention.default or is_saved(self._hidden, func, args):
            self.bytes += sum(tensor.nbytes for tensor in (output if isinstance(output, tuple) else (output,)))
        return output


@torch.library.custom_op("rollcall::counted_attention", mutates_args=())
def _counted_attention(query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor) -> tuple[Tensor, Tensor]:
    """A stand-in for the attention kernel, of sizes alone: its output, and one number per head and token."""
    raise NotImplementedError("sizes are counted on the meta device")


@_counted_attention.register_fake
def _(query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor) -> tuple[Tensor, Tensor]:
    B, H, T, _ = query_BHTD.shape
    attended_BHTD = value_BHTD.new_empty(B, T, H, value_BHTD.shape[-1]).transpose(1, 2)  # as the kernel lays it out
    return attended_BHTD, torch.empty(query_BHTD.shape[:3], dtype=torch.float32, device=query_BHTD.device)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _refuse(ctx: Any, *gradients: Tensor) -> Any:
    raise NotImplementedError("sizes are counted in a forward pass")


_counted_attention.register_autograd(_refuse, setup_context=_save)


def _attend(
    module: nn.Module, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, attention_mask: Any, **others: Any
) -> tuple[Tensor, None]:
    """Attention for counting, with the signature of transformers' attention functions. Grouped heads are repeated, as
    they are for kernels without support for them."""
    heads, key_heads = query_BHTD.shape[1], key_BHTD.shape[1]
    if heads % key_heads:
        raise HeadCountError(f"num_key_value_heads={key_heads} does not divide num_attention_heads={heads}")
    key_BHTD, value_BHTD = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key_BHTD, value_BHTD))
    attended_BHTD, _ = _counted_attention(query_BHTD, key_BHTD, value_BHTD)
    return attended_BHTD.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attend)
