"""Whole answers of servers that should say the same: which requests, and what of an answer is compared."""

import json
from contextlib import closing
from http.client import HTTPConnection
from typing import Any
from urllib.request import urlopen

from pipeline.rollout.cache_load import METRICS
from pipeline.rollout.draft_acceptance import counts_in
from pipeline.rollout.generate_wire import ROUTE
from tests.support.servers.vllm import SECRET, Served

ASKED: list[dict[str, Any]] = [
    {"logprobs": 0},
    {"logprobs": 0, "n": 3},
    {"logprobs": 0, "temperature": 0},
    {"logprobs": 0, "max_tokens": 1},
    {"logprobs": 3},
    {"logprobs": 0, "prompt_logprobs": 1},
    {"logprobs": 0, "stop_token_ids": [3, 4, 5, 6, 7]},
    {"logprobs": 0, "flat_logprobs": True},
    {},
]


def answers_of(served: Served) -> list[Any]:
    """What a server says to `ASKED`, without its names and times."""
    address, _, port = served.endpoint.rpartition(":")
    link, answers = HTTPConnection(address, int(port), timeout=60), []
    for asked in ASKED:
        sampling = {"seed": 11, "max_tokens": 40, "temperature": 1.0, "detokenize": False, **asked}
        body = json.dumps({"model": "policy", "token_ids": [1, 5, 6, 7], "sampling_params": sampling})
        link.request("POST", ROUTE, body, {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"})
        answer = json.loads(link.getresponse().read())
        if not asked.get("logprobs"):
            forget_repetition(answer)
        answers.append({key: answer[key] for key in ("choices", "prompt_logprobs")})
    link.close()
    return answers


def forget_repetition(answer: Any) -> None:
    """Who asks for no alternatives is told by vLLM the sampled token once more."""
    for choice in answer["choices"]:
        for entry in (choice["logprobs"] or {}).get("content") or ():
            entry["top_logprobs"] = []


def versions_told(answers: list[Any]) -> list[tuple[Any, Any]]:
    """What our plugin adds to the answers, taken out of them, of each choice with log-probabilities; and what this
    release says itself."""
    choices = [choice for answer in answers for choice in answer["choices"] if choice["logprobs"]]
    return [(choice["logprobs"].pop("weight_versions", None), choice["weight_versions"]) for choice in choices]


def status_of(endpoint: str, route: str, key: str, body: dict[str, Any] | None = None) -> int:
    link = HTTPConnection(endpoint, timeout=30)
    with closing(link):
        link.request("POST", route, json.dumps(body or {}), {"Authorization": f"Bearer {key}"})
        return link.getresponse().status


def drafts_of(endpoint: str) -> tuple[float, float]:
    """How many tokens a server has drafted so far, and how many of them it has accepted."""
    with urlopen(f"http://{endpoint}{METRICS}", timeout=30) as response:
        text = response.read().decode()
    return counts_in(text)
