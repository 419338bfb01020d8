"""The requests and responses of vLLM's `/inference/v1/generate`: tokens in, tokens out.

Owns their format. Promises that a parsed response has a log-probability for each of its tokens and no other. Must not
know connections.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import Literal

import msgspec

from pipeline.config.routing_shape import RoutingShape
from pipeline.inference.engine_protocol import POLICY
from pipeline.transport.turn_times import EngineSeconds

ROUTE = "/inference/v1/generate"
ABORT_ROUTE = "/inference/v1/abort_requests"
_token_id, _logprob = attrgetter("token_id"), attrgetter("logprob")


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


# One object per sampled token: gc=False excludes them from garbage collection.
class _Token(msgspec.Struct, gc=False):
    logprob: float
    token_id: int = -1
    token: str = ""
    """Releases of vLLM without `token_id` write it here, as `token_id:7`."""


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Token] | None = None
    weight_versions: list[_Span] | None = None
    """Written by `pipeline.inference.vllm.token_versions`, for releases of vLLM that do not report versions."""


class Choice(msgspec.Struct):
    """One sample of a response."""

    finish_reason: Literal["stop", "length", "abort"]
    token_ids: tuple[int, ...]
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None

    @property
    def sampled(self) -> list[_Token]:
        """The tokens with their log-probabilities; empty for an abort before the first token."""
        return (self.logprobs and self.logprobs.content) or []

    @property
    def sampled_logprobs(self) -> tuple[float, ...]:
        """The log-probability of each token."""
        return tuple(map(_logprob, self.sampled))

    @property
    def spans(self) -> list[_Span] | None:
        """The ranges of tokens that each policy version sampled; None if not reported."""
        if self.weight_versions is None and self.logprobs is not None:
            return self.logprobs.weight_versions
        return self.weight_versions


class _PromptTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _PromptTokens | None = None
    choice_seconds: list[EngineSeconds | None] = []
    """Written by `pipeline.inference.vllm.request_times`."""


class Answer(msgspec.Struct):
    """A response."""

    choices: list[Choice]
    usage: _Usage | None = None

    @property
    def prompt_tokens(self) -> int:
        """The tokens of the prompt; 0 unless the server reports how many of them were in its prefix cache."""
        return self.usage.prompt_tokens if self.usage and self.usage.prompt_tokens_details else 0

    @property
    def cached_tokens(self) -> int:
        """The prompt's tokens that were in the server's prefix cache."""
        details = self.usage.prompt_tokens_details if self.usage else None
        return (details.cached_tokens or 0) if details else 0

    def timed_choices(self) -> list[tuple[Choice, EngineSeconds | None]]:
        """Each choice with the engine's times of it."""
        seconds = self.usage.choice_seconds if self.usage else []
        return list(zip(self.choices, seconds if len(seconds) == len(self.choices) else repeat(None), strict=False))


FINAL_ONLY = 2
"""vLLM's `RequestOutputKind`: one output, when all samples have ended. With the default, releases up to 0.25 send one
output per step, and their response contains only the samples that ended last."""

_answers = msgspec.json.Decoder(Answer)


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and its sampling parameters; temperature 0 is greedy.

    With `routing` the experts of each token are requested, but of the first tokens, whose records are `known`.
    """

    token_ids: Sequence[int]
    n: int
    temperature: float
    max_tokens: int
    stop_token_ids: Sequence[int]
    top_p: float = 1.0
    top_k: int = 0
    routing: RoutingShape | None = None
    known: tuple[bytes, ...] = ()
    cached_at: int | None = None
    """The version under which the prefix was cached; None: that of the server at the time of the request."""
    repeats: int = 0
    """The first tokens of the prompt that the server computed for an earlier turn or piece."""

    def body(self, version: int) -> bytes:
        """The request as JSON, to a server of this policy version. Requests share cached prefixes only under the same
        version."""
        salt = str(version if self.cached_at is None else self.cached_at)
        sampling = {
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_tokens": self.max_tokens,
            "stop_token_ids": self.stop_token_ids,
            "logprobs": 0,
            "detokenize": False,
            "output_kind": FINAL_ONLY,
        }
        if self.known:
            sampling["routed_experts_prompt_start"] = len(self.known)
        body = {"model": POLICY, "token_ids": self.token_ids, "sampling_params": sampling, "cache_salt": salt}
        return msgspec.json.encode(body)


def abort_body(request: str) -> bytes:
    """The JSON by which a server ends the request of this id (`X-Request-Id`), and responds with its partial result."""
    return msgspec.json.encode({"request_ids": [f"generate-tokens-{request}"]})


def parse_answer(response: bytes, n: int) -> Answer:
    """The response to a request of `n` samples; `ValueError` if it is no response to it."""
    try:
        answer = _answers.decode(response)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    if len(answer.choices) != n or not all(_is_exact(choice) for choice in answer.choices):
        raise ValueError("not the samples that were requested, with the log-probabilities of their tokens")
    return answer


def _is_exact(choice: Choice) -> bool:
    """Whether the log-probabilities belong to the response's tokens."""
    sampled = choice.sampled
    if sampled and sampled[0].token:
        return [token.token for token in sampled] == [f"token_id:{token}" for token in choice.token_ids]
    return tuple(map(_token_id, sampled)) == choice.token_ids
