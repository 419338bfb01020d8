"""What each rank runs for `test_expert_dispatch`: one layer's experts spread over ranks, and whole."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from pipeline.train.model.cpu_offload import local
from pipeline.train.model.expert_load import ExpertLoad
from pipeline.train.model.experts import experts_forward, fused_experts, spread_experts
from tests.support.models.tiny import tiny_config

EXPERTS, TAKEN, SIZE = 8, 2, 32
CHOICES = {
    "all experts": (0, 1, 2, 3, 4, 5, 6, 7),
    "one rank's alone": (0, 1),
    "one expert alone": (7,),
}
"""The experts that tokens choose from."""
TOKENS = ((9, 5), (9, 0), (0, 9), (0, 0))
"""Tokens of either rank: also of one that has none, and of ranks without any."""


def work(rank: int, dtype: torch.dtype) -> None:
    dist.init_process_group("gloo")
    try:
        for family in ("qwen3_moe", "gpt_oss"):
            for chosen_from in CHOICES.values():
                for tokens in TOKENS:
                    compare(family, chosen_from, tokens, dtype)
    finally:
        dist.destroy_process_group()


def compare(family: str, chosen_from: tuple[int, ...], tokens: tuple[int, ...], dtype: torch.dtype) -> None:
    """Outputs and gradients of this rank's tokens, and of its experts over the tokens of all ranks."""
    whole, spread = layer(family, dtype), layer(family, dtype)
    spread_experts(spread, init_device_mesh("cpu", (dist.get_world_size(),)))
    (experts,), (mine,) = fused_experts(whole), fused_experts(spread)
    given = [tokens_of(rank, count, chosen_from, dtype) for rank, count in enumerate(tokens)]
    outputs = [experts_forward(experts, *each) for each in given]
    sum((loss(output) for output in outputs), start=torch.zeros((), dtype=dtype)).backward()
    hidden, chosen, weights = given[dist.get_rank()]
    own = hidden.detach().requires_grad_(), chosen, weights.detach().requires_grad_()
    load = ExpertLoad(spread)
    with load.counting(np.ones(len(hidden), np.int64), hidden.device):
        output = experts_forward(mine, *own)
    loss(output).backward()
    counts = torch.cat([each[1].reshape(-1) for each in given]).bincount(minlength=EXPERTS).double()
    busiest = float(counts.max() / counts.mean()) if counts.sum() else 0.0
    assert load.collect(measured=True, rate=0) == pytest.approx({"experts/load_max": busiest})
    assert load.collect(measured=True, rate=0) == {}
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for found, wanted in ((output, outputs[dist.get_rank()]), (own[0].grad, hidden.grad), (own[2].grad, weights.grad)):
        assert_close(found, wanted, rtol=bound, atol=bound)
    rank, share = dist.get_rank(), EXPERTS // dist.get_world_size()
    for name, parameter in mine.named_parameters():
        slope = parameter.grad
        assert slope is not None, f"{name} has a gradient even if no token chose its experts"
        wanted = experts.get_parameter(name).grad
        assert wanted is not None
        assert_close(local(slope), wanted[rank * share : (rank + 1) * share], rtol=bound, atol=bound)


def layer(family: str, dtype: torch.dtype) -> nn.Module:
    """A network with one layer of experts, the same at every call and on every rank."""
    counts = {"num_experts": EXPERTS} if family == "qwen3_moe" else {"num_local_experts": EXPERTS}
    config = tiny_config(
        model_type=family,
        num_hidden_layers=1,
        hidden_size=SIZE,
        num_experts_per_tok=TAKEN,
        intermediate_size=16,
        moe_intermediate_size=16,
        **counts,
    )
    network: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    (experts,) = fused_experts(network)
    draw = torch.Generator().manual_seed(1)
    for _, parameter in sorted(experts.named_parameters()):
        parameter.data = torch.randn(parameter.shape, generator=draw, dtype=torch.float64).mul(0.2).to(dtype)
    wrapper = nn.Module()
    wrapper.experts = experts
    return wrapper


def tokens_of(rank: int, count: int, chosen_from: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [T, E], chosen experts [T, K] and their weights [T, K]."""
    draw = torch.Generator().manual_seed(10 + rank)
    hidden = torch.randn(count, SIZE, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    chosen = torch.tensor(chosen_from)[torch.randint(len(chosen_from), (count, TAKEN), generator=draw)]
    weights = torch.rand(count, TAKEN, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, chosen, weights


def loss(output: Tensor) -> Tensor:
    """Its slopes do not depend on the output, whose rounding differs between one rank and several."""
    return (output * torch.arange(output.numel()).view_as(output).cos().to(output.dtype)).sum()
