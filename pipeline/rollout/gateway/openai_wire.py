"""What OpenAI's clients send, and what they are sent.

Owns the forms of `/v1/chat/completions` and `/v1/completions`: what of a request is read, and how an answer is written,
whole or as a stream of events. Promises that whatever cannot be read is one `RequestRefused` with a status and a line
that says why. Must not know tokens' history or servers.

Some of what a client may ask for is ignored, since the policy is trained as it samples: `temperature`, `top_p` and
penalties, for which those of the run apply; `response_format`; and `tool_choice`, except `none`, which leaves calls in
the text.
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
    """A request that cannot be answered, as OpenAI tells it: a status, a code and why."""

    def __init__(self, why: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(why)
        self.why, self.status, self.code = why, status, code

    def body(self) -> dict[str, Any]:
        """The answer."""
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
    """A request, checked.

    Attributes:
        model: as the client calls it.
        messages: of a chat; empty for a plain prompt.
        prompt: a text, or token ids.
        n: how many answers.
        max_tokens: most tokens of each; None: as many as the run allows.
        stop: texts at which an answer ends.
        parses: whether calls of tools are taken out of the text.
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
    """One answer: its text, the reply that the client is given, and what was sampled, each token with its text."""

    text: str
    reply: Message
    finish: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    pieces: Sequence[str]


def read_chat(body: bytes) -> CheckedRequest:
    """A request for a chat completion."""
    asked = _read(body)
    try:
        messages, tools = read_messages(asked.messages), read_tools(asked.tools)
    except MessageError as error:
        raise RequestRefused(str(error)) from None
    return _checked(asked, messages=messages, tools=tools, parses=bool(tools) and asked.tool_choice != "none")


def read_completion(body: bytes) -> CheckedRequest:
    """A request for the completion of a plain prompt."""
    asked = _read(body)
    prompt = asked.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        prompt = tuple(prompt)
    if not prompt or not isinstance(prompt, str | tuple):
        raise RequestRefused("prompt: expected one text, or one list of token ids")
    if asked.echo:
        raise RequestRefused("echo: only what was sampled is answered")
    return _checked(asked, prompt=prompt)


def reply_of(text: str, form: ToolCallSyntax | None, tools: Sequence[Mapping[str, Any]]) -> Message:
    """What was said as a message, with calls of tools taken out of the text; if one cannot be read, all stays text."""
    calls = list(parse_calls(text, form, parameter_types(tools))) if form else []
    if not calls or any(call.wrong for call in calls):
        return {"role": "assistant", "content": text}
    made = [
        {
            "id": f"call_{uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": dict(call.arguments)},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": text[: calls[0].begin].strip(), "tool_calls": made}


def chat_answer(asked: CheckedRequest, said: Sequence[ChatReply], prompt_tokens: int) -> dict[str, Any]:
    """The body of a chat completion."""
    choices = [
        {
            "index": index,
            "message": _message_json(each.reply),
            "finish_reason": _finish(each),
            "logprobs": {"content": _logprobs(each), "refusal": None} if asked.logprobs else None,
        }
        for index, each in enumerate(said)
    ]
    return _head("chat.completion", asked) | {"choices": choices, "usage": _usage(said, prompt_tokens)}


def chat_events(asked: CheckedRequest, said: Sequence[ChatReply], prompt_tokens: int) -> Iterator[dict[str, Any]]:
    """The same as a stream: who speaks, what is said, how it ended; and the usage, where it is asked for."""
    head = _head("chat.completion.chunk", asked)
    for index, each in enumerate(said):
        sent = _message_json(each.reply)
        calls = [{"index": number, **call} for number, call in enumerate(sent.get("tool_calls", ()))]
        logprobs = {"content": _logprobs(each), "refusal": None} if asked.logprobs else None
        deltas = [{"role": "assistant", "content": ""}, {"content": sent["content"]}, {"tool_calls": calls}]
        for delta in deltas:
            if any(delta.values()):
                choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
                yield head | {"choices": [choice]}
        yield head | {"choices": [{"index": index, "delta": {}, "finish_reason": _finish(each), "logprobs": logprobs}]}
    if asked.usage:
        yield head | {"choices": [], "usage": _usage(said, prompt_tokens)}


def completion_answer(asked: CheckedRequest, said: Sequence[ChatReply], prompt_tokens: int) -> dict[str, Any]:
    """The body of a completion."""
    choices = [_completion(index, asked, each) for index, each in enumerate(said)]
    return _head("text_completion", asked) | {"choices": choices, "usage": _usage(said, prompt_tokens)}


def completion_events(asked: CheckedRequest, said: Sequence[ChatReply], prompt_tokens: int) -> Iterator[dict[str, Any]]:
    """The same as a stream, one event an answer."""
    head = _head("text_completion", asked)
    for index, each in enumerate(said):
        yield head | {"choices": [_completion(index, asked, each)]}
    if asked.usage:
        yield head | {"choices": [], "usage": _usage(said, prompt_tokens)}


def text_before(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of `stops`."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def _read(body: bytes) -> _RequestBody:
    try:
        return _request_adapter.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestRefused(f"the request cannot be read: {error}") from None


def _checked(asked: _RequestBody, **what: Any) -> CheckedRequest:
    count = asked.n or 1
    most = asked.max_completion_tokens or asked.max_tokens
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    if not 1 <= count <= MAX_CHOICES:
        raise RequestRefused(f"n={count}: expected 1 to {MAX_CHOICES}")
    if most is not None and most < 1:
        raise RequestRefused(f"max_tokens={most}: expected at least 1")
    return CheckedRequest(
        asked.model,
        n=count,
        max_tokens=most,
        stop=tuple(filter(None, stop)),
        stream=bool(asked.stream),
        usage=asked.stream_options is not None and asked.stream_options.include_usage,
        logprobs=asked.logprobs is not None and asked.logprobs is not False,
        **what,
    )


def _message_json(reply: Message) -> dict[str, Any]:
    """A reply as clients expect it: arguments are a string of JSON, and with nothing but calls the text is null."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in reply.get("tool_calls", ())
    ]
    if not calls:
        return {"role": "assistant", "content": reply["content"]}
    return {"role": "assistant", "content": reply["content"] or None, "tool_calls": calls}


def _finish(said: ChatReply) -> str:
    return "tool_calls" if said.reply.get("tool_calls") else said.finish


def _logprobs(said: ChatReply) -> list[dict[str, Any]]:
    return [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": [], "token_id": token}
        for piece, logprob, token in zip(said.pieces, said.logprobs, said.tokens, strict=True)
    ]


def _completion(index: int, asked: CheckedRequest, said: ChatReply) -> dict[str, Any]:
    logprobs = {
        "tokens": list(said.pieces),
        "token_logprobs": list(said.logprobs),
        "token_ids": list(said.tokens),
        "top_logprobs": None,
        "text_offset": [sum(map(len, said.pieces[:place])) for place in range(len(said.pieces))],
    }
    kept = logprobs if asked.logprobs else None
    return {"index": index, "text": said.text, "finish_reason": said.finish, "logprobs": kept}


def _head(kind: str, asked: CheckedRequest) -> dict[str, Any]:
    return {"id": uuid4().hex, "object": kind, "created": int(time.time()), "model": asked.model}


def _usage(said: Sequence[ChatReply], prompt_tokens: int) -> dict[str, int]:
    sampled = sum(len(each.tokens) for each in said)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
    }
