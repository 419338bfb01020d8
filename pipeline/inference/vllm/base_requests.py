"""A fix for requests without an adapter in a batch with adapters, in vLLM's processes on CPUs.

vLLM marks the tokens of such a request with the index -1. Its GPU kernels skip these tokens. Its CPU products use -1 as
a Python index, and so apply the adapter in the last slot to them.
"""

from typing import Any

from pipeline.inference.vllm.stock_functions import stock_function

NO_ADAPTER = -1
_PARAMETERS = ("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor", "scaling")


def skip_tokens_without_adapter() -> None:
    """Patch the product with A to give zeros for tokens without an adapter, so that B adds nothing.

    A second call changes nothing.
    """
    import torch
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops

    stock = stock_function(lora_ops, "bgmv_shrink", *_PARAMETERS, by=__name__)
    if stock is None:
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
