"""Routing replay in float64: each family with recorded experts, compared with the same network's own routers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from pipeline.errors import ConfigError, TrainingError
from pipeline.train.batching.packing import Packing
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.model.collate import collate
from pipeline.train.model.experts import EXPERTS, use_grouped_experts
from pipeline.train.model.routers import use_exact_routers
from pipeline.train.model.routing_replay import RoutedTokens, RoutingReplay
from tests.support.models.tiny import tiny_config
from tests.unit.train.test_experts import FAMILIES

TOKENS = torch.arange(24).view(2, 12) * 7 % 17
GROUPED = {"n_group": 4, "topk_group": 2, "n_routed_experts": 8}
"""A family that chooses two groups of experts first, as many as experts."""
KINDS: dict[str, dict[str, Any]] = FAMILIES | {"glm4_moe-groups": FAMILIES["glm4_moe"] | GROUPED}


@pytest.mark.parametrize("kind", KINDS)
def test_the_recorded_experts_of_its_own_routers_change_nothing(kind: str) -> None:
    network, recorded = make_network(kind)
    wanted = answer_and_gradients(network)
    own = RoutedTokens(own_experts(network), recorded)
    flipped = RoutedTokens(own.experts_TLK.flip(-1), recorded)

    replay = RoutingReplay(network)
    for routed in (own, flipped, None):  # the order of a token's experts has no meaning
        with replay.of(routed):
            found = answer_and_gradients(network)
        assert found.keys() == wanted.keys()
        bound = 1e-6 if "glm4" in kind else 1e-13  # GLM's router computes in float32
        assert all(distance(found[name], wanted[name]) < bound for name in wanted)
    assert all(wanted[name].abs().sum() > 0 for name in wanted if name.endswith((".gate.weight", ".router.weight")))


@pytest.mark.parametrize("kind", KINDS)
def test_the_experts_of_the_neighbor_token_are_noticed(kind: str) -> None:
    network, recorded = make_network(kind)
    wanted = answer_and_gradients(network)
    shifted = RoutedTokens(own_experts(network).roll(1, 0), recorded)

    with RoutingReplay(network).of(shifted):
        found = answer_and_gradients(network)

    assert distance(found["logits"], wanted["logits"]) > 1e-3
    assert any(found[name].abs().sum() > 0 for name in found if "gate.weight" in name or "router.weight" in name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_without_a_record_keeps_the_choice_of_its_router(kind: str) -> None:
    network, recorded = make_network(kind)
    wanted = answer_and_gradients(network)
    partial = own_experts(network)
    partial[::2], recorded[::2] = 0, False

    with RoutingReplay(network).of(RoutedTokens(partial, recorded)):
        found = answer_and_gradients(network)

    assert distance(found["logits"], wanted["logits"]) < (1e-6 if "glm4" in kind else 1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_a_router_that_computes_in_float32_replays_too(kind: str) -> None:
    network, recorded = make_network(kind)
    use_exact_routers(network.to(torch.bfloat16))
    with torch.no_grad():
        wanted = network(input_ids=TOKENS, use_cache=False).logits
        own, replay = own_experts(network), RoutingReplay(network)
        with replay.of(RoutedTokens(own.flip(-1), recorded)):
            same = network(input_ids=TOKENS, use_cache=False).logits
        with replay.of(RoutedTokens(own.roll(1, 0), recorded)):
            other = network(input_ids=TOKENS, use_cache=False).logits

    assert distance(same, wanted) < 0.02  # experts are summed in another order
    assert distance(other, wanted) > 0.1


@pytest.mark.filterwarnings("ignore")  # dynamo's own
def test_a_compiled_and_recomputed_layer_replays_other_records_without_another_compilation() -> None:
    network, recorded = make_network("qwen3_moe")
    own, replay = own_experts(network), RoutingReplay(network)
    other = (own.long() + 1) % 8
    with replay.of(RoutedTokens(other, recorded)):
        wanted = answer_and_gradients(network)
    network.gradient_checkpointing_enable({"use_reentrant": False})
    graphs: list[Any] = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    for layer in network.model.layers:
        layer.compile(backend=counting)
    compiled = []
    for routed in (own, own, other):
        with replay.of(RoutedTokens(routed, recorded)):
            found = answer_and_gradients(network)
        compiled.append(len(graphs))

    assert all(distance(found[name], wanted[name]) < 1e-13 for name in wanted)
    assert 0 < compiled[0] == compiled[2]


def test_a_network_without_known_routers_is_refused() -> None:
    network, _ = make_network("qwen3_moe")
    for layer in network.model.layers:
        layer.mlp.chooser = layer.mlp.gate
        del layer.mlp.gate
    with pytest.raises(ConfigError, match=r"training.routing_replay='rollout': expected none for Qwen3Moe"):
        RoutingReplay(network)


def test_a_router_that_chooses_in_another_way_is_refused_at_its_first_pass() -> None:
    network, recorded = make_network("qwen3_moe")
    own = own_experts(network)
    for layer in network.model.layers:
        layer.mlp.gate.forward = sorting(layer.mlp.gate)
    replay = RoutingReplay(network)
    with replay.of(RoutedTokens(own, recorded)), pytest.raises(TrainingError, match="does not choose by one topk"):
        answer_and_gradients(network)


@pytest.mark.parametrize("how", ["padded", "packed", "shared"])
def test_records_follow_the_tokens_of_a_micro_batch(how: Packing) -> None:
    """Rows 0 and 1 begin alike; row 0 has no record of its last token, row 2 has none."""
    tokens, counts = ([1, 2, 3, 4], [1, 2, 3, 5, 6], [7, 8]), (3, 5, 0)
    rows = tuple(
        TrainSequence(
            np.array(row, np.int32),
            np.ones(len(row), np.uint8),
            routed_experts=np.array(row[:count], np.uint16).reshape(-1, 1, 1) + 300 * number if count else None,
        )
        for number, (row, count) in enumerate(zip(tokens, counts, strict=True))
    )
    micro = collate(Batch(rows, (1.0,) * 3), how, torch.device("cpu"))
    assert micro.routed is not None
    flat = micro.tokens_BT.flatten().tolist()
    found = [
        (token, int(expert) if known else None)
        for token, expert, known in zip(
            flat, micro.routed.experts_TLK.flatten().tolist(), micro.routed.recorded_T.tolist(), strict=True
        )
    ]

    first, second, third = [(1, 1), (2, 2), (3, 3), (4, None)], [(5, 305), (6, 306)], [(7, None), (8, None)]
    alone = [(1, 301), (2, 302), (3, 303)]
    assert [pair for pair in found if pair[0]] == [*first, *([] if how == "shared" else alone), *second, *third]
    assert all(expert is None for token, expert in found if not token)  # padding


def test_a_micro_batch_without_records_has_none() -> None:
    row = TrainSequence(np.array([1, 2], np.int32), np.array([0, 1], np.uint8))
    assert collate(Batch((row,), (1.0,)), "packed", torch.device("cpu")).routed is None


def make_network(kind: str) -> tuple[Any, Tensor]:
    """A float64 network with large weights, and a mask of all tokens."""
    torch.manual_seed(0)
    family = kind.partition("-")[0]
    config = tiny_config(model_type=family, initializer_range=0.2, **KINDS[kind])
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager")
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    for name, buffer in network.named_buffers():
        if "correction_bias" in name:
            nn.init.normal_(buffer, std=0.3)
    assert use_grouped_experts(network)
    assert config._experts_implementation == EXPERTS
    return network.train(), torch.ones(TOKENS.numel(), dtype=torch.bool)


def own_experts(network: Any) -> Tensor:
    """uint8 [T, L, K]: what the network's routers choose for `TOKENS`."""
    layers = torch.zeros(TOKENS.numel(), len(network.model.layers), 2, dtype=torch.uint8)

    def noting(layer: int) -> Callable[..., None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            layers[:, layer] = output[2].to(torch.uint8)

        return note

    hooks = [
        module.register_forward_hook(noting(int(name.split(".layers.")[1].partition(".")[0])))
        for name, module in network.named_modules()
        if type(module).__name__.lower().endswith("router")
    ]
    with torch.no_grad():
        network(input_ids=TOKENS, use_cache=False)
    for hook in hooks:
        hook.remove()
    return layers


def answer_and_gradients(network: Any) -> dict[str, Tensor]:
    network.zero_grad()
    logits = network(input_ids=TOKENS, use_cache=False).logits
    logits.log_softmax(-1)[..., 3].sum().backward()
    gradients = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-12))


def sorting(router: Any) -> Callable[..., Any]:
    """A router's forward that sorts all scores in place of a topk."""

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
        weights, chosen = logits.softmax(-1).sort(-1, descending=True)
        return logits, weights[:, :2], chosen[:, :2]

    return forward
