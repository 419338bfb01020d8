"""Requests and responses of Anthropic's Messages API.

Owns the formats of `/v1/messages` and `/v1/messages/count_tokens`: how their blocks become messages of a chat, and how
a reply is written, whole or as a stream of events. Promises that the blocks of a reply, sent back by the agent, become
the same message again, so that the conversation continues; and that content that the policy cannot read is refused by
its type. Must not know conversations or servers.

    user: [tool_result, text]              tool, user
    assistant: [text, tool_use, tool_use]  one assistant message with two tool calls

Reasoning that the policy writes stays in the text, as in a chat completion, so `thinking` is ignored, and a `thinking`
block is refused: no reply has one. `temperature`, `top_p`, `top_k`, `cache_control`, `is_error`, `metadata`, and
`tool_choice` other than `none` are ignored. Source: docs.anthropic.com, API reference, Messages.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from pipeline.rollout.agent_endpoint.agent_call import (
    ChatReply,
    CheckedRequest,
    RequestRefused,
    max_tokens_of,
    read_body,
    read_chat_messages,
)

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
}
_FOREIGN = {
    "image": "text alone can be trained",
    "document": "text alone can be trained",
    "thinking": "the policy's reasoning is part of its text, so no reply has such a block",
    "redacted_thinking": "the policy's reasoning is part of its text, so no reply has such a block",
}


class _RequestBody(msgspec.Struct):
    messages: list[dict[str, Any]]
    model: str = ""
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    mcp_servers: list[Any] | None = None


_request_adapter = msgspec.json.Decoder(_RequestBody)


def error_body(refused: RequestRefused) -> dict[str, Any]:
    """The body of an error response."""
    error = {"type": _ERROR_TYPES.get(refused.status, "api_error"), "message": refused.why}
    return {"type": "error", "error": error}


def read_request(body: bytes, *, counts: bool = False) -> CheckedRequest:
    """Parse a request for a message. With `counts` it is for the number of its tokens, and needs no `max_tokens`."""
    request = read_body(body, _request_adapter)
    if request.max_tokens is None and not counts:
        raise RequestRefused("max_tokens: field required")
    if request.mcp_servers:
        raise RequestRefused("mcp_servers: the endpoint runs no tools; the agent must run them")
    if request.messages and request.messages[-1].get("role") == "assistant":
        raise RequestRefused("messages: the last is the assistant's; the policy cannot continue a given beginning")
    system = [{"role": "system", "content": _text("system", request.system)}] if request.system else []
    chat = [message for index, turn in enumerate(request.messages) for message in _messages(index, turn)]
    messages, tools = read_chat_messages([*system, *chat], [_tool(tool) for tool in request.tools or ()])
    return CheckedRequest(
        model=request.model,
        messages=messages,
        tools=tools,
        max_tokens=max_tokens_of(request.max_tokens, "max_tokens"),
        stop=tuple(filter(None, request.stop_sequences or ())),
        stream=bool(request.stream),
        parses=bool(tools) and (request.tool_choice or {}).get("type") != "none",
    )


def message_answer(request: CheckedRequest, reply: ChatReply, prompt_tokens: int) -> dict[str, Any]:
    """The body of a message. A reply without tool calls has exactly one block of text, even if that is empty."""
    text = str(reply.reply["content"])
    blocks: list[dict[str, Any]] = (
        [{"type": "text", "text": text, "citations": None}] if text or not reply.calls else []
    )
    for call in reply.calls:
        function = call["function"]
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": dict(function["arguments"])}
        )
    return {
        "id": f"msg_{uuid4().hex[:24]}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": blocks,
        "stop_reason": _stop_reason(reply),
        "stop_sequence": reply.stop or None,
        "usage": _usage(prompt_tokens, len(reply.tokens)),
    }


def message_events(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A message as a stream of events, each block with one delta."""
    end = {key: answer[key] for key in ("stop_reason", "stop_sequence")}
    usage = answer["usage"]
    begun = {**answer, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(answer["content"]):
        if block["type"] == "text":
            empty: dict[str, Any] = {"text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": block | empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": end, "usage": usage}
    yield {"type": "message_stop"}


def _messages(index: int, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The chat messages of one message. In order: each tool result is a message, as is the text between."""
    role, content, where = message.get("role"), message.get("content"), f"messages.{index}"
    if role not in ("user", "assistant", "system"):
        raise RequestRefused(f"{where}: the role {role!r}; expected user or assistant")
    if role == "assistant":
        yield _assistant(where, content)
        return
    texts: list[Any] = []
    for block in _blocks(where, content):
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        if texts:
            yield {"role": role, "content": _text(where, texts)}
            texts = []
        result = _text(f"{where}: tool_result", block.get("content") or "")
        yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": result}
    if texts or not content:
        yield {"role": role, "content": _text(where, texts)}


def _assistant(where: str, content: Any) -> dict[str, Any]:
    blocks = _blocks(where, content)
    calls = [
        {
            "id": str(block.get("id", "")),
            "type": "function",
            "function": {"name": block.get("name"), "arguments": block.get("input") or {}},
        }
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    text = _text(where, [block for block in blocks if block.get("type") != "tool_use"])
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def _blocks(where: str, content: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RequestRefused(f"{where}: expected a text or a list of blocks")
    return content


def _text(where: str, content: Any) -> str:
    """The joined text of blocks; any other block is refused by its type."""
    texts = []
    for block in _blocks(where, content):
        kind = block.get("type")
        if kind != "text" or not isinstance(block.get("text"), str):
            why = _FOREIGN.get(str(kind), "expected a block of type 'text' with a text")
            raise RequestRefused(f"{where}: a block of type {kind!r}: {why}")
        texts.append(block["text"])
    return "".join(texts)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's chat format."""
    if tool.get("type") not in (None, "custom") or not isinstance(tool.get("input_schema"), Mapping):
        kind = tool.get("type") or tool.get("name")
        raise RequestRefused(f"tools: {kind!r}: only tools with an input_schema, which the agent runs")
    if not isinstance(tool.get("name"), str):
        raise RequestRefused("tools: a tool without a name")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _stop_reason(reply: ChatReply) -> str:
    if reply.calls:
        return "tool_use"
    if reply.stop:
        return "stop_sequence"
    return "end_turn" if reply.finish == "stop" else "max_tokens"


def _usage(prompt_tokens: int, sampled: int) -> dict[str, Any]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt_tokens, "output_tokens": sampled} | cached
