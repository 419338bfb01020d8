"""The experts of a mixture, compared with transformers' loop over experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipeline.config import ModelConfig
from pipeline.train.model import experts
from pipeline.train.model.experts import EXPERTS, grouped_product, use_grouped_experts
from pipeline.train.model.models import build_on_meta
from tests.support.models.tiny import tiny_config, write_tiny

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16},
    "glm4_moe": {
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16},
}


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_and_gradients_are_those_of_a_loop_over_experts(family: str, recomputed: bool) -> None:
    wanted, found = (_answer_and_gradients(family, way, recomputed) for way in ("eager", EXPERTS))

    assert found.keys() == wanted.keys()
    for name in wanted:
        bound = 1e-6 if family == "glm4_moe" else 1e-12  # GLM's router computes in float32
        far = (found[name] - wanted[name]).abs().max() / wanted[name].abs().max().clamp_min(1e-12)
        assert far < bound, name


@pytest.mark.parametrize("sizes", [(32, 16), (31, 15)], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_grouped_product_is_that_of_each_group_even_where_groups_are_empty(
    sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(9, sizes[0], generator=draw), torch.randn(4, *sizes, generator=draw)
    x, w = x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()
    ends, parts = torch.tensor([0, 5, 5, 9], dtype=torch.int32), [slice(0, 0), slice(0, 5), slice(5, 5), slice(5, 9)]

    found = grouped_product(x, w, ends)
    wanted = torch.cat([x.double()[part] @ w.double()[i] for i, part in enumerate(parts)])

    bound = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound)
    slopes = [torch.autograd.grad((y * y.detach()).sum(), (x, w)) for y in (found, wanted)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=bound, atol=bound)


@pytest.mark.filterwarnings("ignore")  # dynamo's own, which would end its tracing as errors
@pytest.mark.parametrize("width", [16, 12], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_compiled_layer_in_bfloat16_contains_the_grouped_products(family: str, width: int) -> None:
    names = {"moe_intermediate_size", "intermediate_size"} & FAMILIES[family].keys()
    settings = FAMILIES[family] | dict.fromkeys(names, width)
    config = tiny_config(model_type=family, initializer_range=0.2, **settings)
    config._experts_implementation = EXPERTS
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    (module, *_), products = experts.fused_experts(network), [0]
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    counts = torch.zeros(8, dtype=torch.int64)
    setattr(module, experts.COUNTS, counts)
    setattr(module, experts.WEIGHTS, torch.full((12,), 2))
    hidden, router = torch.randn(12, config.hidden_size, dtype=torch.bfloat16), torch.rand(12, 2)

    def count_products(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        products[0] += sum("grouped_mm" in str(node.target) for node in graph.graph.nodes)
        return graph

    def answer_and_gradients(forward: Any) -> list[Tensor]:
        tokens, weights = hidden.clone().requires_grad_(), router.clone().requires_grad_()
        answer = forward(tokens, torch.arange(24).view(12, 2) % 7, weights)
        return [answer, *torch.autograd.grad(answer.float().square().sum(), (tokens, weights, *module.parameters()))]

    plain = answer_and_gradients(module)
    compiled = answer_and_gradients(torch.compile(module, backend=count_products))

    assert all(torch.equal(one, other) for one, other in zip(plain, compiled, strict=True))
    assert products[0] == (2 if width == 16 else 1)  # the second has rows of 24 bytes: a loop stands in
    assert counts.tolist() == [2 * 2 * n for n in (4, 4, 4, 3, 3, 3, 3, 0)]  # two passes, each token of two rows


def test_a_policy_of_a_mixture_uses_the_grouped_experts_and_a_dense_one_has_none(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "mixture", model_type="qwen3_moe", **FAMILIES["qwen3_moe"])
    mixture = build_on_meta(ModelConfig(path=str(path), init="random"))
    dense = build_on_meta(ModelConfig(path=str(write_tiny(tmp_path / "dense")), init="random"))

    assert mixture.network.config._experts_implementation == EXPERTS
    assert sum(map(experts.is_fused, mixture.network.modules())) == 2
    assert use_grouped_experts(dense.network) == 0
    assert "experts_implementation" not in mixture.network.config.to_json_string()


def _answer_and_gradients(family: str, way: str, recomputed: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    config = tiny_config(model_type=family, initializer_range=0.2, **FAMILIES[family])
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager")
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for module in network.modules():
        if experts.is_fused(module):
            module.config._experts_implementation = way
    if recomputed:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    logits = network.train()(input_ids=torch.arange(24).view(2, 12) % 17, use_cache=False).logits
    logits.log_softmax(-1)[..., 3].sum().backward()
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}
