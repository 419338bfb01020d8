"""The rows of requests inside a server on CPUs: chunked prompts, preemption, and the response of vLLM's own classes."""

import base64
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.inference.vllm.routing_capture import RequestRouting, RoutingCollector, step_rows


def tokens(first: int, end: int, mark: int = 0) -> Any:
    """One number for each token, as its row."""
    return np.arange(first, end) + mark


def sent(rows: Any) -> list[int]:
    return [] if rows is None else rows.tolist()


def test_the_rows_of_a_step_go_to_their_requests() -> None:
    rows = tokens(0, 6)
    found = step_rows(["a", "b", "c"], np.array([4, 0, 7, 99]), {"a": 1, "c": 5}, rows)
    assert {name: (first, part.tolist()) for name, (first, part) in found.items()} == {
        "a": (4, [0]),
        "c": (7, [1, 2, 3, 4, 5]),
    }


def test_a_prompt_in_chunks_is_sent_with_the_first_token_and_each_row_once() -> None:
    routing = RequestRouting(start=1)
    routing.note(0, tokens(0, 3))
    routing.note(3, tokens(3, 5))
    assert sent(routing.take(5)) == [1, 2, 3, 4]
    routing.note(5, tokens(5, 6))
    assert sent(routing.take(6)) == [5]
    assert routing.take(6) is None


def test_no_row_follows_a_gap() -> None:
    routing = RequestRouting(start=0)
    routing.note(2, tokens(2, 4))
    assert routing.take(4) is None
    routing.note(0, tokens(0, 1))
    routing.note(3, tokens(3, 4))
    assert sent(routing.take(4)) == [0]


def test_a_preempted_request_goes_on_after_the_rows_that_were_sent() -> None:
    collector, request = RoutingCollector(), a_request(prompt=3)
    step(collector, request, 0, tokens(0, 3))
    request.num_tokens, request.num_output_tokens = 4, 1
    assert sent(collector.take_output(request, None)) == [0, 1, 2]

    collector.request_finished(request)
    step(collector, request, 0, tokens(0, 4, mark=100))
    request.num_tokens, request.num_output_tokens = 5, 2
    assert sent(collector.take_output(request, None)) == [103]


def test_the_known_part_of_a_prompt_is_left_out_and_aborted_requests_are_forgotten() -> None:
    collector, request = RoutingCollector(), a_request(prompt=3, start=2)
    step(collector, request, 0, tokens(0, 3))
    request.num_tokens, request.num_output_tokens = 4, 1
    assert sent(collector.take_output(request, None)) == [2]
    collector.request_finished(request)
    collector.note({"r": (3, tokens(3, 4))})
    assert collector._requests == {}


def test_vllm_responds_with_the_array_that_the_client_reads() -> None:
    """vLLM's own class of a choice and its encoding of arrays."""
    protocol = pytest.importorskip("vllm.entrypoints.scale_out.token_in_token_out.protocol")
    serial = pytest.importorskip("vllm.entrypoints.scale_out.token_in_token_out.serving")
    rows = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    choice = protocol.GenerateTokensChoice(index=0, token_ids=[7], routed_experts=serial.numpy2base64(rows))
    text = choice.model_dump(mode="json")["routed_experts"]
    assert np.array_equal(np.load(BytesIO(base64.b64decode(text))), rows)


def a_request(prompt: int, start: int = 0) -> Any:
    sampling = SimpleNamespace(routed_experts_prompt_start=start)
    return SimpleNamespace(
        request_id="r", sampling_params=sampling, num_prompt_tokens=prompt, num_tokens=prompt, num_output_tokens=0
    )


def step(collector: RoutingCollector, request: Any, first: int, rows: Any) -> None:
    """One step of the scheduler, and what the worker adds."""
    collector.build_connector_meta(SimpleNamespace(num_scheduled_tokens={"r": len(rows)}), {"r": request})
    collector.note({"r": (first, rows)})
