"""What a server of a mixture returns of its experts, compared with the routers of the model that it serves."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config import RunConfig
from pipeline.config.routing_shape import RoutingShape, routing_shape
from pipeline.rollout.server_client import Completion
from tests.support.servers.traffic import PROBE, client_of
from tests.support.servers.vllm import Model, Served

SAMPLES, TOKENS, PIECE = 3, 24, 10
"""Requests of several pieces: each piece but the first asks for the rest of the experts."""


def check_routed_experts(served: Served, config: RunConfig, model: Model, version: int) -> None:
    """Assert that a server with this model returns the experts that its routers choose, of all tokens but the last."""
    shape = routing_shape(config)
    assert shape is not None
    for completion in asyncio.run(_in_pieces(served, shape, version)):
        tokens = [*PROBE, *completion.tokens]
        returned = np.frombuffer(b"".join(completion.routed_experts), shape.dtype)
        returned = returned.reshape(-1, shape.layers, shape.per_token)
        assert len(returned) == len(tokens) - 1
        for layer, chosen in experts_of(model, tokens).items():
            assert np.array_equal(np.sort(returned[:, layer]), np.sort(chosen[:-1]))


async def _in_pieces(served: Served, shape: RoutingShape, version: int) -> list[Completion]:
    async with client_of([served], routing=shape, max_tokens_per_request=PIECE) as client:
        client.update(served.endpoint, version)
        return await client.generate(PROBE, n=SAMPLES, temperature=1.0, max_tokens=TOKENS, stop_token_ids=[])


@torch.no_grad()
def experts_of(model: Any, tokens: Sequence[int]) -> dict[int, NDArray[Any]]:
    """[T, K] by layer: the experts that transformers' routers choose for a row."""
    chosen: dict[int, NDArray[Any]] = {}

    def noting(layer: int) -> Callable[..., None]:
        def note(module: object, inputs: object, output: Any) -> None:
            chosen[layer] = output[2].numpy()

        return note

    layers = [(layer, getattr(module.mlp, "gate", None)) for layer, module in enumerate(model.model.layers)]
    hooks = [gate.register_forward_hook(noting(layer)) for layer, gate in layers if gate is not None]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    assert chosen
    return chosen
