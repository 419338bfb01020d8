"""Samples in the form of the servers, and back.

Owns how a request of the SDK becomes one of vLLM, and vLLM's answer the SDK's. Pure.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from pipeline.rollout.generate_wire import FINAL_ONLY
from pipeline.tinker import tinker_wire
from pipeline.tinker.sampling_limits import Limits, checked_request, prompt_tokens
from pipeline.tinker.target_logprobs import Cell, read_targets

_NO_TOKEN = -99999.0
_GREEDY = 1e-5
"""Below this temperature vLLM takes the likeliest token, and refuses to do so more than once for a prompt."""


def request_body(body: Mapping[str, Any], model: str, limits: Limits) -> dict[str, Any]:
    """The request in vLLM's form."""
    tokens = checked_request(body, limits)
    params = body.get("sampling_params") or {}
    stop = params.get("stop")
    top, top_prompt = int(body.get("topk_sample_logprobs") or 0), int(body.get("topk_prompt_logprobs") or 0)
    temperature = params.get("temperature", 1.0)
    sampling: dict[str, Any] = {
        "n": 1 if temperature < _GREEDY else body.get("num_samples", 1),
        "temperature": temperature,
        "top_p": params.get("top_p", 1.0),
        "top_k": max(0, params.get("top_k", -1)),
        "max_tokens": min(params.get("max_tokens") or limits.length, limits.length - len(tokens)),
        "logprobs": top,
        "ignore_eos": False,
        "output_kind": FINAL_ONLY,
    }
    if params.get("seed") is not None:
        sampling["seed"] = params["seed"]
    if body.get("prompt_logprobs") or top_prompt:
        sampling["prompt_logprobs"] = top_prompt
    stops = [stop] if isinstance(stop, str) else list(stop or [])
    if stops and isinstance(stops[0], str):
        sampling |= {"stop": stops, "detokenize": True, "include_stop_str_in_output": True}
        sampling |= {"skip_special_tokens": False, "spaces_between_special_tokens": False}  # they may be what stops
    else:  # named tokens, also none, replace the model's own last token; texts are in addition to it
        sampling |= {"stop_token_ids": stops, "detokenize": False, "ignore_eos": stop is not None}
    return {"model": model, "token_ids": tokens, "sampling_params": sampling}


def score_body(prompt: Sequence[int], model: str) -> dict[str, Any]:
    """The request for the log-probability of a prompt's last token; a server makes one token at least."""
    sampling = {"n": 1, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False, "output_kind": FINAL_ONLY}
    return {"model": model, "token_ids": list(prompt), "sampling_params": sampling}


def score_of(answer: Mapping[str, Any], prompt: Sequence[int]) -> float:
    """The log-probability of a prompt's last token in the answer to `score_body`."""
    return float(answer["prompt_logprobs"][-1][str(prompt[-1])]["logprob"])


def sample_json(
    answer: Mapping[str, Any], body: Mapping[str, Any], scores: Mapping[Cell, float] = MappingProxyType({})
) -> bytes:
    """The protobuf that the SDK reads, from vLLM's answer, and the log-probabilities of named tokens."""
    proto = tinker_wire.protocol()
    message = proto.SampleResponse()
    top, top_prompt = int(body.get("topk_sample_logprobs") or 0), int(body.get("topk_prompt_logprobs") or 0)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for choice in choices if len(choices) > 1 else choices * int(body.get("num_samples", 1)):
        content = (choice.get("logprobs") or {}).get("content") or []
        sequence = message.sequences.add(
            stop_reason=proto.STOP_REASON_LENGTH if choice["finish_reason"] == "length" else proto.STOP_REASON_STOP,
            tokens=np.array(choice["token_ids"], "<i4").tobytes(),
            logprobs=np.array([token["logprob"] for token in content], "<f4").tobytes(),
        )
        if top:
            ranked = [
                {_id(candidate): candidate["logprob"] for candidate in token.get("top_logprobs") or []}
                for token in content
            ]
            sequence.topk_sampled_logprobs.CopyFrom(_top(ranked, top))
    prompt = answer.get("prompt_logprobs")
    if prompt is not None:
        tokens = prompt_tokens(body)
        rows = [
            {int(id): candidate["logprob"] for id, candidate in (candidates or {}).items()} for candidates in prompt
        ]
        own = [float("nan"), *(row[token] for row, token in zip(rows[1:], tokens[1:], strict=True))]
        if last := body.get("prompt_logprobs_last_n"):
            rows[:-last], own[:-last] = [{}] * (len(rows) - last), [float("nan")] * (len(own) - last)
        if body.get("prompt_logprobs"):
            message.prompt_logprobs = np.array(own, "<f4").tobytes()
        if top_prompt:
            message.topk_prompt_logprobs.CopyFrom(_top(rows, top_prompt))
    if (targets := read_targets(body, len(prompt_tokens(body)))) is not None:
        message.target_prompt_logprobs.CopyFrom(targets.tensor(scores))
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    message.prompt_cache_hit_tokens = int(details.get("cached_tokens") or 0)
    return bytes(message.SerializeToString())


def _top(rows: Sequence[Mapping[int, float]], k: int) -> Any:
    """The k likeliest of each row; where there are none, token 0 with a log-probability that none has."""
    ids = np.zeros((len(rows), k), "<i4")
    logprobs = np.full((len(rows), k), _NO_TOKEN, "<f4")
    for number, row in enumerate(rows):
        for rank, (token, logprob) in enumerate(sorted(row.items(), key=lambda item: -item[1])[:k]):
            ids[number, rank], logprobs[number, rank] = token, logprob
    proto = tinker_wire.protocol()
    return proto.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=len(rows))


def _id(token: Mapping[str, Any]) -> int:
    return int(token["token_id"]) if "token_id" in token else int(str(token["token"]).removeprefix("token_id:"))
