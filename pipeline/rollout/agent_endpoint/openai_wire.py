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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec

from pipeline.data.chat_messages import Message, MessageError, read_messages, read_tools
from pipeline.environments.tool_call_syntax import ToolCallSyntax, parameter_types, parse_calls

MAX_CHOICES = 128


class RequestRefused(Exception):
    """A request that cannot be served, as an OpenAI error: a status, a code and the reason."""

    def __init__(self, why: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(why)
        self.why, self.status, self.code = why, status, code

    def body(self) -> dict[str, Any]:
        """The body of the error response."""
        return {"error": {"message": self.why, "type": "invalid_request_error", "code": self.code, "param": None}}


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


@dataclass(frozen=True)
class CheckedRequest:
    """A validated request.

    Attributes:
        model: the client's name for the model.
        messages: of a chat; empty for a plain prompt.
        prompt: a text, or token ids.
        n: number of replies.
        max_tokens: limit of each reply in tokens; None: the run's limit.
        stop: texts at which a reply ends.
        parses: whether tool calls are parsed from the text.
    """

    model: str
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt: str | tuple[int, ...] = ""
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    parses: bool = True


@dataclass(frozen=True)
class ChatReply:
    """One reply: its text, the message for the client, and the sampled tokens, each with its text."""

    text: str
    reply: Message
    finish: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    pieces: Sequence[str]


def read_chat(body: bytes) -> CheckedRequest:
    """Parse a request for a chat completion."""
    request = _read(body)
    try:
        messages, tools = read_messages(request.messages), read_tools(request.tools)
    except MessageError as error:
        raise RequestRefused(str(error)) from None
    return _checked(request, messages=messages, tools=tools, parses=bool(tools) and request.tool_choice != "none")


def read_completion(body: bytes) -> CheckedRequest:
    """Parse a request for the completion of a plain prompt."""
    request = _read(body)
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


def reply_of(text: str, form: ToolCallSyntax | None, tools: Sequence[Mapping[str, Any]]) -> Message:
    """The text as a message, with tool calls parsed from it; if one call is malformed, all remain text."""
    calls = list(parse_calls(text, form, parameter_types(tools))) if form else []
    if not calls or any(call.wrong for call in calls):
        return {"role": "assistant", "content": text}
    tool_calls = [
        {
            "id": f"call_{uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": dict(call.arguments)},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": text[: calls[0].begin].strip(), "tool_calls": tool_calls}


def chat_answer(request: CheckedRequest, replies: Sequence[ChatReply], prompt_tokens: int) -> dict[str, Any]:
    """The body of a chat completion."""
    choices = [
        {
            "index": index,
            "message": _message_json(reply.reply),
            "finish_reason": _finish(reply),
            "logprobs": {"content": _logprobs(reply), "refusal": None} if request.logprobs else None,
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
        logprobs = {"content": _logprobs(reply), "refusal": None} if request.logprobs else None
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


def text_before(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of `stops`."""
    return text[: min((index for stop in stops if (index := text.find(stop)) >= 0), default=len(text))]


def _read(body: bytes) -> _RequestBody:
    try:
        return _request_adapter.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestRefused(f"the request cannot be read: {error}") from None


def _checked(request: _RequestBody, **fields: Any) -> CheckedRequest:
    count = request.n or 1
    limit = request.max_completion_tokens or request.max_tokens
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if not 1 <= count <= MAX_CHOICES:
        raise RequestRefused(f"n={count}: expected 1 to {MAX_CHOICES}")
    if limit is not None and limit < 1:
        raise RequestRefused(f"max_tokens={limit}: expected at least 1")
    return CheckedRequest(
        request.model,
        n=count,
        max_tokens=limit,
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
    return "tool_calls" if reply.reply.get("tool_calls") else reply.finish


def _logprobs(reply: ChatReply) -> list[dict[str, Any]]:
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
