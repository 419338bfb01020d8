"""Differences between releases of vLLM: features that older ones lack, and names that changed.

Features are patched in vLLM's processes before a model is built. Each function checks whether its patch is needed.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from pipeline.inference.vllm.stock_functions import stock_function

SUPPORTED = "float32"


def adapter_renames(model: Any) -> Any:
    """The mapper from a checkpoint's layer names to those of a vLLM model, without fusing layers, for adapters.

    None if the names are equal. The name of the method depends on the release.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    make = getattr(mapper, "get_rename_mapper", None) or getattr(mapper, "get_unstacked_mapper", None)
    return mapper if make is None else make()


def add_float32_head() -> None:
    """Honor `head_dtype=float32`, which releases before `LogitsProcessor._apply_head` support for pooling models only.

    The product of the head is then computed and stored in float32, as in the trainer. Otherwise, log-probabilities of a
    model in 16 bits would differ from the trainer's by the rounding of its logits.
    """
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if hasattr(LogitsProcessor, "_apply_head"):
        return
    stock_init, stock_logits = LogitsProcessor.__init__, LogitsProcessor._get_logits

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        config = get_current_vllm_config().model_config
        self.rollcall_float32 = config is not None and getattr(config.hf_config, "head_dtype", "") == SUPPORTED

    def get_logits(self: Any, hidden_states: Tensor, lm_head: Any, embedding_bias: Tensor | None) -> Tensor | None:
        plain = type(lm_head.quant_method) is UnquantizedEmbeddingMethod
        if not (self.rollcall_float32 and plain and hidden_states.is_cuda and hidden_states.dtype != torch.float32):
            logits: Tensor | None = stock_logits(self, hidden_states, lm_head, embedding_bias)
            return logits
        # [tokens, hidden] × [hidden, local vocabulary] in compute type, accumulated and stored in float32.
        product = torch.mm(hidden_states, lm_head.weight.t(), out_dtype=torch.float32)
        gathered: Tensor | None = self._gather_logits(product if embedding_bias is None else product + embedding_bias)
        return gathered if gathered is None else gathered[..., : self.org_vocab_size]

    LogitsProcessor.__init__, LogitsProcessor._get_logits = init, get_logits


def expand_sampling_settings() -> None:
    """Give every drafted token the sampling settings of its request, on CPUs.

    The kernel of vLLM's CPU build (0.32) writes them into a converted copy, which is then dropped, so tokens were
    sampled with a temperature out of uninitialized memory.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.sample import rejection_sampler

        parameters = signature(_repeated).parameters
        if stock_function(rejection_sampler, "expand_batch_to_tokens", *parameters, by=__name__):
            rejection_sampler.expand_batch_to_tokens = _repeated


def _repeated(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """The settings x[requests], repeated for the tokens of each request: [num_tokens].

    `cu_num_tokens` has the cumulative numbers of tokens; `replace_from` is replaced by `replace_to`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(replaced, counts, output_size=num_tokens)
