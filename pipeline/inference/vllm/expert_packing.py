"""Experts packed again at each weight update, in vLLM's processes.

When a model is loaded, vLLM has a mixture's experts packed by the kernel that runs them (on CPUs, into blocks of the
grouped product). When weights are reloaded, it leaves this last step out: the kernel then reads unpacked numbers in
packed places, and fails where packing pads them.
"""

from typing import Any


def pack_experts_at_updates() -> None:
    """Have every reload of unquantized experts end as their first load does. A second call changes nothing.

    Releases without such a step, or which take it at reloads themselves, stay as they are.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    stock = getattr(UnquantizedFusedMoEMethod, "_setup_kernel", None)
    if stock is None or stock.__module__ == __name__:
        return

    def _setup_kernel(self: Any, layer: Any, *arguments: Any, **named: Any) -> None:
        kernel = getattr(self, "moe_kernel", None)
        experts: Any = getattr(kernel, "fused_experts", None)
        if not hasattr(experts, "process_weights_after_loading"):
            stock(self, layer, *arguments, **named)
            return
        # An attribute of the instance hides the method, so a release that packs here itself is noticed.
        packed: list[Any] = []
        pack = experts.process_weights_after_loading
        experts.process_weights_after_loading = lambda layer: packed.append(pack(layer))
        try:
            stock(self, layer, *arguments, **named)
        finally:
            del experts.process_weights_after_loading
        if not packed:
            pack(layer)

    UnquantizedFusedMoEMethod._setup_kernel = _setup_kernel
