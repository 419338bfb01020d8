"""Requests and responses of OpenAI's API.

Owns the formats of `/v1/chat/completions` and `/v1/completions`: which fields of a request are read, and how a response
is written, whole or as a stream of events. Promises that any malformed request is one `RequestRefused` with a status
and a one-line reason. Must not know conversations or servers.

Some fields of a request are ignored, because the policy is trained as it samples: `temperature`, `top_p` and penalties,
for which the run's values apply; `response_format`; and `tool_choice`, except `none`, which leaves tool calls in the
text.
"""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from pipeline.data.chat_messages import Message
from pipeline.rollout.agent_endpoint.agent_call import (
    ChatReply,
    CheckedRequest,
    RequestRefused,
    max_tokens_of,
    read_body,
    read_chat_messages,
)

MAX_CHOICES = 128


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _RequestBody(msgspec.Struct):
    model: str = ""
    messages: Any = None
    prompt: Any = None
    tools: Any = None
    tool_choice: Any = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | int | None = None
    echo: bool | None = None


_request_adapter = msgspec.json.Decoder(_RequestBody)


def error_body(refused: RequestRefused) -> dict[str, Any]:
    """The body of an error response."""
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    error = {"message": refused.why, "type": kind, "code": refused.code, "param": None}
    return {"error": error}


def read_chat(body: bytes) -> CheckedRequest:
    """Parse a request for a chat completion."""
    request = read_body(body, _request_adapter)
    messages, tools = read_chat_messages(request.messages, request.tools)
    return _checked(request, messages=messages, tools=tools, parses=bool(tools) and request.tool_choice != "none")


def read_completion(body: bytes) -> CheckedRequest:
    """Parse a request for the completion of a plain prompt."""
    request = read_body(body, _request_adapter)
    prompt = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        prompt = tuple(prompt)
    if not prompt or not isinstance(prompt, str | tuple):
        raise RequestRefused("prompt: expected one text, or one list of token ids")
    if request.echo:
        raise RequestRefused("echo: only sampled tokens are returned")
    return _checked(request, prompt=prompt)


def chat_answer(request: CheckedRequest, replies: Sequence[ChatReply], prompt_tokens: int) -> dict[str, Any]:
    """The body of a chat completion."""
    choices = [
        {
            "index": index,
            "message": _message_json(reply.reply),
            "finish_reason": _finish(reply),
            "logprobs": {"content": logprobs_of(reply), "refusal": None} if request.logprobs else None,
        }
        for index, reply in enumerate(replies)
    ]
    return _head("chat.completion", request) | {"choices": choices, "usage": _usage(replies, prompt_tokens)}


def chat_events(request: CheckedRequest, replies: Sequence[ChatReply], prompt_tokens: int) -> Iterator[dict[str, Any]]:
    """A chat completion as a stream of events: role, content, finish reason; and the usage if requested."""
    head = _head("chat.completion.chunk", request)
    for index, reply in enumerate(replies):
        sent = _message_json(reply.reply)
        calls = [{"index": number, **call} for number, call in enumerate(sent.get("tool_calls", ()))]
        logprobs = {"content": logprobs_of(reply), "refusal": None} if request.logprobs else None
        deltas = [{"role": "assistant", "content": ""}, {"content": sent["content"]}, {"tool_calls": calls}]
        for delta in deltas:
            if any(delta.values()):
                choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
                yield head | {"choices": [choice]}
        yield head | {"choices": [{"index": index, "delta": {}, "finish_reason": _finish(reply), "logprobs": logprobs}]}
    if request.usage:
        yield head | {"choices": [], "usage": _usage(replies, prompt_tokens)}


def completion_answer(request: CheckedRequest, replies: Sequence[ChatReply], prompt_tokens: int) -> dict[str, Any]:
    """The body of a completion."""
    choices = [_completion(index, request, reply) for index, reply in enumerate(replies)]
    return _head("text_completion", request) | {"choices": choices, "usage": _usage(replies, prompt_tokens)}


def completion_events(
    request: CheckedRequest, replies: Sequence[ChatReply], prompt_tokens: int
) -> Iterator[dict[str, Any]]:
    """A completion as a stream, one event per reply."""
    head = _head("text_completion", request)
    for index, reply in enumerate(replies):
        yield head | {"choices": [_completion(index, request, reply)]}
    if request.usage:
        yield head | {"choices": [], "usage": _usage(replies, prompt_tokens)}


def _checked(request: _RequestBody, **fields: Any) -> CheckedRequest:
    count = 1 if request.n is None else request.n
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if not 1 <= count <= MAX_CHOICES:
        raise RequestRefused(f"n={count}: expected 1 to {MAX_CHOICES}")
    return CheckedRequest(
        model=request.model,
        n=count,
        max_tokens=max_tokens_of(request.max_completion_tokens or request.max_tokens, "max_tokens"),
        stop=tuple(filter(None, stop)),
        stream=bool(request.stream),
        usage=request.stream_options is not None and request.stream_options.include_usage,
        logprobs=request.logprobs is not None and request.logprobs is not False,
        **fields,
    )


def _message_json(reply: Message) -> dict[str, Any]:
    """A reply in OpenAI's format: arguments are a string of JSON, and the text is null if there are only calls."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in reply.get("tool_calls", ())
    ]
    if not calls:
        return {"role": "assistant", "content": reply["content"]}
    return {"role": "assistant", "content": reply["content"] or None, "tool_calls": calls}


def _finish(reply: ChatReply) -> str:
    return "tool_calls" if reply.calls else reply.finish


def logprobs_of(reply: ChatReply) -> list[dict[str, Any]]:
    """The log-probability of each sampled token, with the token's text and id."""
    return [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": [], "token_id": token}
        for piece, logprob, token in zip(reply.pieces, reply.logprobs, reply.tokens, strict=True)
    ]


def _completion(index: int, request: CheckedRequest, reply: ChatReply) -> dict[str, Any]:
    logprobs = {
        "tokens": list(reply.pieces),
        "token_logprobs": list(reply.logprobs),
        "token_ids": list(reply.tokens),
        "top_logprobs": None,
        "text_offset": [sum(map(len, reply.pieces[:index])) for index in range(len(reply.pieces))],
    }
    included = logprobs if request.logprobs else None
    return {"index": index, "text": reply.text, "finish_reason": reply.finish, "logprobs": included}


def _head(kind: str, request: CheckedRequest) -> dict[str, Any]:
    return {"id": uuid4().hex, "object": kind, "created": int(time.time()), "model": request.model}


def _usage(replies: Sequence[ChatReply], prompt_tokens: int) -> dict[str, int]:
    sampled = sum(len(reply.tokens) for reply in replies)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
    }
