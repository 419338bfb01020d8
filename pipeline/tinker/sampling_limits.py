"""What a client may ask of a sample.

Owns the limits of each field. Promises that a field which no server takes raises `ApiError` with its name, before the
request is accepted. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from pipeline.algorithms.summed_losses import OTHER_LOSSES
from pipeline.tinker.api_errors import ApiError

MAX_TEMPERATURE = 2.0
"""vLLM refuses what is hotter."""
_MOST_ID, _MOST_NUMBER, _MAX_DIGITS = (1 << 31) - 1, (1 << 62) - 1, 18
_NOT_SERVED = {
    "prompt_alt_tokens_k": "leave it out",
    "record_stability_info": f"only stable_reinforce needs it, which is not served either; take {OTHER_LOSSES}",
}


@dataclass(frozen=True)
class Limits:
    """What servers were started with, as far as they refuse what has more.

    Attributes:
        length: tokens of a prompt with its sample, `model.max_length`.
        samples: sequences of one request, `inference.max_sequences`: vLLM takes no more than it runs at once.
    """

    length: int
    samples: int


def is_whole(value: Any, least: int, most: int = _MOST_NUMBER) -> TypeGuard[int]:
    """Whether it is a whole number in these bounds; JSON's true is none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_decimal(text: str) -> bool:
    """Whether it is a whole number in decimal digits, 18 at most: `int` raises for a number of thousands of digits."""
    return text.isdecimal() and len(text) <= _MAX_DIGITS


def is_number(value: Any, least: float, most: float) -> bool:
    """Whether it is a number in these bounds; JSON's true is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def checked_request(body: Mapping[str, Any], limits: Limits) -> list[int]:
    """The prompt's tokens; `ApiError` for what no server could do."""
    tokens = prompt_tokens(body)
    if not tokens:
        raise ApiError("the prompt has no tokens")
    if len(tokens) >= limits.length:
        raise ApiError(f"the prompt has {len(tokens)} tokens; expected fewer than {limits.length} (model.max_length)")
    _check_counts(body, len(tokens), limits.samples)
    params = body.get("sampling_params")
    if params is not None and not isinstance(params, dict):
        raise ApiError(f"sampling_params={_short(params)}; expected an object")
    _check_params(params or {})
    for name, hint in _NOT_SERVED.items():
        if body.get(name):
            raise ApiError(f"{name} is not served; {hint}")
    return tokens


def prompt_tokens(body: Mapping[str, Any]) -> list[int]:
    """The tokens of all chunks of the prompt; `ApiError` for chunks of another kind."""
    prompt = body.get("prompt")
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    if not isinstance(chunks, list):
        raise ApiError(f"prompt={_short(prompt)}; expected an object with a list of chunks")
    tokens: list[int] = []
    for chunk in chunks:
        if not isinstance(chunk, dict):
            raise ApiError(f"prompt: the chunk {_short(chunk)}; expected an object")
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise ApiError(f"a prompt chunk of kind {_short(chunk.get('type'))}; only encoded_text is served")
        part = chunk.get("tokens")
        if not isinstance(part, list) or not all(is_whole(token, 0, _MOST_ID) for token in part):
            raise ApiError(f"prompt: tokens={_short(part)}; expected a list of token ids")
        tokens.extend(part)
    return tokens


def _check_counts(body: Mapping[str, Any], length: int, most: int) -> None:
    """Check the numbers outside the sampling parameters, for a prompt of `length` tokens and at most `most` samples."""
    count = body.get("num_samples", 1)
    if not is_whole(count, 1, most):
        expected = f"expected 1 to {most} (inference.max_sequences), ask again for more"
        raise ApiError(f"num_samples={_short(count)}; {expected}")
    for name in ("topk_sample_logprobs", "topk_prompt_logprobs"):
        if not is_whole(body.get(name) or 0, 0):
            raise ApiError(f"{name}={_short(body[name])}; expected a number of 0 or more")
    scored, last = body.get("prompt_logprobs"), body.get("prompt_logprobs_last_n")
    if scored is not None and not isinstance(scored, bool):
        raise ApiError(f"prompt_logprobs={_short(scored)}; expected true or false")
    if last is not None and not is_whole(last, 1, length - 1):
        expected = f"1 to {length - 1}, one less than the prompt's tokens"
        raise ApiError(f"prompt_logprobs_last_n={_short(last)}; expected {expected}")
    if last is not None and not scored:
        raise ApiError("prompt_logprobs_last_n without prompt_logprobs; set prompt_logprobs to true")


def _check_params(params: Mapping[str, Any]) -> None:
    temperature, top_p, top_k = params.get("temperature", 1.0), params.get("top_p", 1.0), params.get("top_k", -1)
    if not is_number(temperature, 0.0, MAX_TEMPERATURE):
        raise _wrong("temperature", temperature, f"a number from 0 to {MAX_TEMPERATURE:g}")
    if not is_number(top_p, 0.0, 1.0) or top_p == 0:
        raise _wrong("top_p", top_p, "a number above 0, 1 at most")
    if not is_whole(top_k, -1):
        raise _wrong("top_k", top_k, "-1 (all tokens), or a number of tokens")
    longest, seed = params.get("max_tokens"), params.get("seed")
    if longest is not None and not is_whole(longest, 1):
        raise _wrong("max_tokens", longest, "a number of 1 or more, or null: up to model.max_length")
    if seed is not None and not is_whole(seed, -_MOST_NUMBER):
        raise _wrong("seed", seed, "a whole number, or null")
    stop = params.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    texts = isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
    ids = isinstance(stops, list) and all(is_whole(id, 0, _MOST_ID) for id in stops)
    if not (texts or ids) or stop in ("", 0, False):
        raise _wrong("stop", stop, "a text, a list of texts, a list of token ids, or null; no text may be empty")


def _wrong(name: str, value: Any, expected: str) -> ApiError:
    return ApiError(f"sampling_params.{name}={_short(value)}; expected {expected}")


def _short(value: Any) -> str:
    return repr(value)[:80]
