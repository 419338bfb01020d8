"""Requests and responses of OpenAI's Responses API.

Owns the format of `/v1/responses`: how items become messages of a chat, which earlier messages `previous_response_id`
stands for, and how a reply is written, whole or as a stream of events. Promises that the items of a reply, sent back by
the agent or referred to by the id, become the same message again, so that the conversation continues; and that items,
content and tools that the endpoint cannot serve are refused by their type. Must not know the conversation tree or
servers.

    [message, function_call, function_call]   one assistant message with two tool calls
    [function_call_output]                    tool

`instructions` are the system message of this call only: a later call with `previous_response_id` sends its own. Ignored
are the settings of sampling, `reasoning`, `text`, `truncation`, `metadata`, and `tool_choice` other than `none`; the
policy's reasoning stays in its text. Source: platform.openai.com, API reference, Responses.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
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
from pipeline.rollout.agent_endpoint.openai_wire import logprobs_of

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log-probabilities."""
_UNSERVED = {
    "conversation": "use previous_response_id, or send all items",
    "prompt": "templates of prompts are not stored here",
    "background": "a response is ready when its request ends",
}


class _RequestBody(msgspec.Struct):
    input: str | list[dict[str, Any]] | None = None
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    store: bool | None = None
    include: list[str] | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None


_request_adapter = msgspec.json.Decoder(_RequestBody)


@dataclass(frozen=True, kw_only=True)
class ResponsesRequest(CheckedRequest):
    """A validated request.

    Attributes:
        history: the messages without the instructions.
        previous: the id of the response that the call continues; None if it names none.
        stored: whether a later call may continue this one by its id.
        echo: the fields that a response repeats.
    """

    history: tuple[Message, ...]
    previous: str | None
    stored: bool
    echo: Mapping[str, Any]


def read_request(body: bytes, stored: Mapping[str, tuple[Message, ...]]) -> ResponsesRequest:
    """Parse a request. `stored`: the messages of the episode's responses, each with its reply, by their ids."""
    request = read_body(body, _request_adapter)
    for name, hint in _UNSERVED.items():
        if getattr(request, name):
            raise RequestRefused(f"{name} is not served: {hint}", code="unsupported_parameter")
    if not request.input:
        raise RequestRefused("input: expected a text, or a list of items")
    previous = request.previous_response_id
    if previous is not None and previous not in stored:
        why = f"previous_response_id: {previous!r} is no stored response of this episode"
        raise RequestRefused(why, code="previous_response_not_found")
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    new, tools = read_chat_messages(_messages(items), [_tool(tool) for tool in request.tools or ()])
    history = (*(stored[previous] if previous else ()), *new)
    system: tuple[Message, ...] = ({"role": "system", "content": request.instructions},) if request.instructions else ()
    return ResponsesRequest(
        model=request.model,
        messages=(*system, *history),
        tools=tools,
        max_tokens=max_tokens_of(request.max_output_tokens, "max_output_tokens"),
        stream=bool(request.stream),
        logprobs=LOGPROBS in (request.include or ()),
        parses=bool(tools) and request.tool_choice != "none",
        history=history,
        previous=previous,
        stored=request.store is not False,
        echo={
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "tools": request.tools or [],
            "tool_choice": request.tool_choice or "auto",
        },
    )


def response_answer(request: ResponsesRequest, reply: ChatReply, prompt_tokens: int) -> dict[str, Any]:
    """The body of a response. A reply without tool calls has exactly one item of text, even if that is empty."""
    status = "completed" if reply.calls or reply.finish == "stop" else "incomplete"
    sampled = len(reply.tokens)
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
        "model": request.model,
        "output": list(_output(request, reply, status)),
        "previous_response_id": request.previous,
        "store": request.stored,
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "metadata": {},
        **request.echo,
        "usage": {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + sampled,
        },
    }


def response_events(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A response as a stream of numbered events, each text and each list of arguments with one delta."""
    number = count()
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "sequence_number": next(number), "response": begun}
    yield {"type": "response.in_progress", "sequence_number": next(number), "response": begun}
    for index, item in enumerate(answer["output"]):
        for kind, fields in _item_events(item):
            yield {"type": f"response.{kind}", "sequence_number": next(number), "output_index": index, **fields}
    yield {"type": f"response.{answer['status']}", "sequence_number": next(number), "response": answer}


def _item_events(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    at: dict[str, Any] = {"item_id": item["id"]}
    if item["type"] == "message":
        (part,) = item["content"]
        at_part, logprobs = at | {"content_index": 0}, part["logprobs"]
        yield "output_item.added", {"item": {**item, "status": "in_progress", "content": []}}
        yield "content_part.added", {**at_part, "part": part | {"text": "", "logprobs": []}}
        yield "output_text.delta", {**at_part, "delta": part["text"], "logprobs": logprobs}
        yield "output_text.done", {**at_part, "text": part["text"], "logprobs": logprobs}
        yield "content_part.done", {**at_part, "part": part}
    else:
        arguments = item["arguments"]
        yield "output_item.added", {"item": {**item, "status": "in_progress", "arguments": ""}}
        yield "function_call_arguments.delta", {**at, "delta": arguments}
        yield "function_call_arguments.done", {**at, "name": item["name"], "arguments": arguments}
    yield "output_item.done", {"item": item}


def _output(request: ResponsesRequest, reply: ChatReply, status: str) -> Iterator[dict[str, Any]]:
    text = str(reply.reply["content"])
    if text or not reply.calls:
        logprobs = logprobs_of(reply) if request.logprobs else []
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        yield {"type": "message", "id": _id("msg"), "role": "assistant", "status": status, "content": [part]}
    for call in reply.calls:
        yield {
            "type": "function_call",
            "id": _id("fc"),
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": json.dumps(call["function"]["arguments"]),
            "status": status,
        }


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The chat messages of items. Calls join the assistant's message before them, as they were sampled in one turn."""
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        kind = item.get("type") or "message"
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "function_call":
            _add_call(messages, item)
        else:
            why = "expected message, function_call or function_call_output"
            raise RequestRefused(f"input[{index}]: an item of type {kind!r}: {why}", code="unsupported_item")
    return messages


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's chat format."""
    if tool.get("type") != "function":
        why = "only functions, which the agent runs; this endpoint has no built-in tools"
        raise RequestRefused(f"tools: {tool.get('type')!r}: {why}", code="unsupported_tool")
    if not isinstance(tool.get("name"), str):
        raise RequestRefused("tools: a function without a name")
    function = {key: tool.get(key) for key in ("name", "description", "parameters")}
    return {"type": "function", "function": function}


def _id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"
