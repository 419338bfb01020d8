"""What a client may ask of sampling, and what servers are asked then."""

from typing import Any

import pytest

from pipeline.rollout.generate_wire import FINAL_ONLY
from pipeline.tinker.api_errors import ApiError
from pipeline.tinker.generate_requests import request_body
from tests.unit.tinker.sampling_case import LIMITS, LONGEST, PROMPT


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, {"stop_token_ids": [], "ignore_eos": False, "detokenize": False}),
        ([], {"stop_token_ids": [], "ignore_eos": True, "detokenize": False}),
        ([7], {"stop_token_ids": [7], "ignore_eos": True, "detokenize": False}),
        ("a", {"stop": ["a"], "ignore_eos": False, "detokenize": True, "include_stop_str_in_output": True}),
        (["a", "b"], {"stop": ["a", "b"], "ignore_eos": False, "detokenize": True, "include_stop_str_in_output": True}),
    ],
)
def test_stops_mean_what_they_mean_to_the_sdk(stop: Any, expected: dict[str, Any]) -> None:
    body = request_body({"prompt": PROMPT, "sampling_params": {"stop": stop}}, "base", LIMITS)
    sampling = body["sampling_params"]
    assert {name: sampling.get(name) for name in expected} == expected
    assert sampling["max_tokens"] == LONGEST - 3
    assert sampling["output_kind"] == FINAL_ONLY, "else releases up to 0.25 leave samples out"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": {"chunks": []}}, "no tokens"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 16}]}}, "fewer than 16"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "only encoded_text"),
        ({"prompt": PROMPT, "num_samples": 0}, "expected 1 to 8"),
        ({"prompt": PROMPT, "num_samples": 9}, "expected 1 to 8 .inference.max_sequences"),
        ({"prompt": PROMPT, "prompt_alt_tokens_k": 3}, "not served"),
    ],
)
def test_what_no_server_could_do_is_refused_at_once(body: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match=says):
        request_body(body, "base", LIMITS)
