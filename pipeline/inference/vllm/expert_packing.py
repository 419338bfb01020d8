"""A fix for mixture-of-experts models in vLLM: pack the experts again at each weight update.

At the first load, the kernel that runs the experts packs their weights (on CPUs, into blocks of the grouped product).
At a reload, vLLM omits this last step. The kernel then reads unpacked weights as packed ones, and fails if packing pads
them.
"""

from typing import Any


def pack_experts_at_updates() -> None:
    """Patch every reload of unquantized experts to end with the packing step. A second call changes nothing.

    Releases without this step, or with this step at reloads, stay unchanged.
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
        # The instance attribute hides the method, and so records whether this release packs here.
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
