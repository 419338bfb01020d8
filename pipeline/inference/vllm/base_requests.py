"""Requests without an adapter beside others that have one, in vLLM's processes on CPUs.

vLLM marks the tokens of such a request with the index -1. Its kernels for GPUs leave them out; its products for CPUs
take -1 as an index of Python's, and add the adapter in the last slot to them.
"""

from typing import Any

NO_ADAPTER = -1


def skip_tokens_without_adapter() -> None:
    """Have the product with A give zeros for tokens without an adapter, so that B adds nothing. A second call changes
    nothing."""
    import torch
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops

    stock = lora_ops.bgmv_shrink
    if stock.__module__ == __name__:
        return

    def bgmv_shrink(
        inputs: torch.Tensor,
        lora_b_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,
        scaling: float = 1.0,
    ) -> Any:
        # inputs [tokens, in], lora_b_weights [slots, 1, rank, in], output_tensor [tokens, rank], indices [tokens]
        stock(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
        output_tensor.masked_fill_((lora_indices_tensor == NO_ADAPTER)[:, None], 0)

    lora_ops.bgmv_shrink = torch_ops.bgmv_shrink = bgmv_shrink
