"""One call of an agent, in the representation that all protocols share.

Owns a parsed request (`CheckedRequest`), a sampled reply before it is written (`ChatReply`), and the message that a
sampled text becomes. Promises that a request that cannot be served is one `RequestRefused`,
with a status and a one-line reason. Must not know the format of any protocol. Pure.

    openai_wire, responses_wire, anthropic_wire:   body → CheckedRequest → … → ChatReply → body or events
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from pipeline.data.chat_messages import Message, MessageError, read_messages, read_tools
from pipeline.environments.tool_call_syntax import ToolCallSyntax, parameter_types, parse_calls

Body = TypeVar("Body")


class RequestRefused(Exception):
    """A request that cannot be served: a status, a code in OpenAI's terms, and the reason."""

    def __init__(self, why: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(why)
        self.why, self.status, self.code = why, status, code


@dataclass(frozen=True, kw_only=True)
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
    """One reply: its text, the message for the client, and the sampled tokens, each with its text.

    `stop` is the text of `CheckedRequest.stop` at which the reply ended; empty if it did not end at one.
    """

    text: str
    reply: Message
    finish: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    pieces: Sequence[str]
    stop: str = ""

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls of the reply."""
        return self.reply.get("tool_calls") or ()


def read_body(body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """Decode the body of a request."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(f"the request cannot be read: {error}") from None


def read_chat_messages(messages: Any, tools: Any) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]:
    """The messages and tools of a chat, both in OpenAI's chat format, in the form of the chat template."""
    try:
        read = read_messages(messages), read_tools(tools)
    except MessageError as error:
        raise RequestRefused(str(error)) from None
    except RecursionError as error:
        raise RequestRefused(f"the messages are nested too deeply: {error}") from None
    for index, tool in enumerate(read[1]):
        _check_tool(index, tool)
    return read


def _check_tool(index: int, tool: Mapping[str, Any]) -> None:
    """A tool must have a name, by which the policy calls it. Checked before a reply is sampled, whose calls need it."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not name or not isinstance(name, str):
        why = f"a tool of type {tool.get('type')!r} without a function's name; this endpoint has no built-in tools"
        raise RequestRefused(f"tools[{index}]: {why}", code="unsupported_tool")
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise RequestRefused(f"tools[{index}]: the parameters of {name} are no JSON schema")


def max_tokens_of(limit: int | None, name: str) -> int | None:
    """A limit of a reply in tokens; `name` is the field that a refusal names."""
    if limit is not None and limit < 1:
        raise RequestRefused(f"{name}={limit}: expected at least 1")
    return limit


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


def text_before(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """The text up to the first of `stops`, and that stop; the whole text and "" if it has none."""
    begin, stop = min(((index, stop) for stop in stops if (index := text.find(stop)) >= 0), default=(len(text), ""))
    return text[:begin], stop
