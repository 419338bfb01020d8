"""The experts that routers choose under bfloat16 compute, compared with float64."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from pipeline.train.model.routers import routers, use_exact_routers
from tests.support.models.tiny import tiny_config

EXPERTS, TAKEN, TOKENS = 64, 4, 400
GROUPS = {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": EXPERTS},
    "gpt_oss": {"num_local_experts": EXPERTS},
    "granitemoe": {"num_local_experts": EXPERTS},
    "olmoe": {"num_experts": EXPERTS},
    "afmoe": {"num_experts": EXPERTS, "num_dense_layers": 0, "moe_intermediate_size": 16},
    "glm4_moe": {"moe_intermediate_size": 16, **GROUPS},
    "deepseek_v3": {"moe_intermediate_size": 16, "q_lora_rank": None, "kv_lora_rank": 16, **GROUPS},
}
ROUNDED = FAMILIES.keys() - {"glm4_moe", "deepseek_v3"}
"""Families whose routers multiply in the compute type in transformers."""


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_chosen_in_float32_where_bfloat16_logits_would_choose_others(family: str) -> None:
    stock, hidden_TE = _router(family)
    stock, exact = deepcopy(stock), stock
    wanted = _outputs(deepcopy(stock).double(), hidden_TE.double())

    network = nn.ModuleDict({"block": nn.ModuleDict({"gate": exact, "experts": _Fused()})})
    assert use_exact_routers(network) == 1
    rounded, found = _outputs(stock, hidden_TE), _outputs(exact, hidden_TE)

    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1].double(), wanted[1].double(), rtol=1e-5, atol=1e-6)
    assert torch.equal(rounded[0], wanted[0]) == (family not in ROUNDED)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_float64_rounded_once(family: str) -> None:
    router, hidden_TE = _router(family)
    wanted = _slopes(deepcopy(router).double(), hidden_TE.double())
    use_exact_routers(nn.ModuleDict({"block": nn.ModuleDict({"gate": router, "experts": _Fused()})}))
    for found, expected in zip(_slopes(router, hidden_TE), wanted, strict=True):
        torch.testing.assert_close(
            found.double(), expected.double(), rtol=2**-8, atol=2**-8 * expected.abs().max().item()
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_of_experts_has_a_router_that_is_found(family: str) -> None:
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(_config(family))
    assert routers(network)
    assert all(routers(network))


def test_a_router_in_float32_computes_as_without_the_change_and_compiles_in_one_graph() -> None:
    router, hidden_TE = _router("qwen3_moe")
    whole, stock = deepcopy(router).float(), deepcopy(router).float()
    network = nn.ModuleDict({"block": nn.ModuleDict({"gate": router, "experts": _Fused()})})
    use_exact_routers(network)
    use_exact_routers(nn.ModuleDict({"block": nn.ModuleDict({"gate": whole, "experts": _Fused()})}))

    for found, wanted in zip(whole(hidden_TE.float()), stock(hidden_TE.float()), strict=True):
        assert torch.equal(found, wanted)
    compiled = torch.compile(router, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(compiled(hidden_TE), router(hidden_TE), strict=True):
        torch.testing.assert_close(found, wanted)


class _Fused(nn.Module):
    """Experts of the form that the trainer computes itself."""

    is_transposed = False

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.zeros(1, 1, 1)) for _ in range(2))


def _config(family: str) -> Any:
    return tiny_config(model_type=family, num_experts_per_tok=TAKEN, **FAMILIES[family])


def _router(family: str) -> tuple[nn.Module, Tensor]:
    """A router in bfloat16 with random parameters, and hidden states [1, T, E] for it."""
    torch.manual_seed(0)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(_config(family))
    router = next(module for module in routers(network) if module is not None).to_empty(device="cpu")
    for tensor in (*router.parameters(), *router.buffers()):
        nn.init.normal_(tensor, std=0.1)
    hidden_TE = torch.randn(TOKENS, 32)
    return router.bfloat16(), (hidden_TE[None] if family == "afmoe" else hidden_TE).bfloat16()


def _outputs(router: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of each token in order [T, K], and their weights."""
    outputs = router(hidden) if hidden.ndim == 2 else router(hidden, torch.zeros(EXPERTS, dtype=hidden.dtype))
    chosen_TK = next(tensor for tensor in outputs if not tensor.is_floating_point())
    weights_TK = next(tensor for tensor in outputs if tensor.is_floating_point() and tensor.shape[-1] == TAKEN)
    chosen_TK, order_TK = chosen_TK.sort(-1)
    return chosen_TK, weights_TK.gather(-1, order_TK)


def _slopes(router: nn.Module, hidden: Tensor) -> tuple[Tensor, ...]:
    hidden = hidden.detach().requires_grad_()
    weights_TK = _outputs(router, hidden)[1]
    toward = torch.linspace(-1, 1, TAKEN, dtype=torch.float64)
    targets = (hidden, *router.parameters())
    return torch.autograd.grad((weights_TK.double() * toward).sum(), targets)
