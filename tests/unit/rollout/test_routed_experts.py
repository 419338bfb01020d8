"""Routed experts on their way from a server's response to a sample."""

import asyncio
import base64
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from pipeline.config.routing_shape import RoutingShape
from pipeline.errors import RolloutError
from pipeline.rollout.server_client import Completion
from tests.fakes.scripted_server import Script, answer, ask, choice, client_and, run

SHAPE = RoutingShape(layers=2, per_token=2, experts=300)
PROMPT, SAMPLED = 3, 4


def rows(first: int, end: int) -> np.ndarray[Any, Any]:
    """Rows of tokens `first` … `end` − 1, which name them."""
    return np.arange(first * 4, end * 4).reshape(-1, 2, 2)


def encoded(array: np.ndarray[Any, Any]) -> str:
    """As vLLM writes an array."""
    file = BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


async def recording(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Two tokens at most, with the experts of all tokens that were read, from the requested one on."""
    sampling = body["sampling_params"]
    count = min(2, sampling["max_tokens"])
    end = len(body["token_ids"]) + count - 1
    records = encoded(rows(sampling.get("routed_experts_prompt_start", 0), end).astype(np.uint16))
    finish = "length" if count == sampling["max_tokens"] else "abort"
    return answer(*(choice([7] * count, finish) | {"routed_experts": records} for _ in range(sampling["n"])))


def completed(script: Script, routing: RoutingShape | None = SHAPE, n: int = 1) -> list[Completion]:
    async def story() -> list[Completion]:
        async with client_and(script, routing=routing) as client:
            return await ask(client, n=n, tokens=SAMPLED)

    return run(story())


def test_each_token_that_the_server_read_has_a_record_also_of_a_resumed_request() -> None:
    script = Script([recording])
    for completion in completed(script, n=2):
        assert len(completion.tokens) == SAMPLED
        expected = rows(0, PROMPT + SAMPLED - 1).astype("<u2")
        assert completion.routed_experts == tuple(row.tobytes() for row in expected)
    starts = [body["sampling_params"].get("routed_experts_prompt_start") for body in script.bodies]
    assert starts == [None, PROMPT + 1, PROMPT + 1]  # what is known is not sent again


def test_a_server_that_returns_none_leaves_tokens_without_a_record() -> None:
    (completion,) = completed(Script([with_records(None)]))
    assert completion.routed_experts == ()


def test_nothing_is_read_without_routing_replay() -> None:
    (completion,) = completed(Script([with_records(encoded(rows(0, 6)))]), routing=None)
    assert completion.routed_experts == ()


@pytest.mark.parametrize("records", ["no base64!", encoded(rows(0, 6))[:40], encoded(rows(0, 7))])
def test_a_response_with_damaged_records_is_requested_again(records: str) -> None:
    (completion,) = completed(Script([with_records(records), with_records(encoded(rows(0, 6)))]))
    assert len(completion.routed_experts) == 6


def test_records_of_another_model_are_refused() -> None:
    with pytest.raises(RolloutError, match=r"routed experts \[6, 4\] of int64, expected \[tokens, 2, 2\]"):
        completed(Script([with_records(encoded(rows(0, 6).reshape(6, 4)))]))


def with_records(records: str | None) -> Any:
    async def respond(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0)
        return answer(choice([7] * SAMPLED) | {"routed_experts": records})

    return respond
