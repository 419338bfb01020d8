"""One normalized form of a conversation, for every format of a row.

Owns the keys of a message: `role`, `content`, and in addition `tool_calls`, `tool_call_id`, `name`,
`reasoning_content` and any others that a chat template may read. Promises the form that templates expect: content is
text, the arguments of a tool call are an object, and a message, call or tool has no key without a value. Arguments and
schemas of parameters are unchanged, since null is a value there. Content that no text model can read (images, audio,
video) is refused by its type. Pure.

Accepted are messages in the formats of OpenAI (`role`, `content`) and ShareGPT (`from`, `value`), and plain texts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
_NOT_TEXT = ("image", "audio", "video", "file")


class MessageError(ValueError):
    """The reason why a value is no conversation; a caller with more context adds the row."""


@dataclass(frozen=True)
class Conversation:
    """Messages in order.

    Attributes:
        messages: each with `role` and, as text, `content`.
        prompt_length: length of the prompt in messages. The prompt's assistant turns are context, not trained.
        tools: JSON schemas of the available tools.
    """

    messages: tuple[Message, ...]
    prompt_length: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def turns(self) -> tuple[int, ...]:
        """The indices of the assistant's messages after the prompt."""
        indices = range(self.prompt_length, len(self.messages))
        return tuple(index for index in indices if self.messages[index]["role"] == "assistant")


def read_messages(value: Any, role: str = "user") -> tuple[Message, ...]:
    """The messages of a column; a text is one message of `role`. `MessageError` for any other value."""
    if isinstance(value, str):
        return ({"role": role, "content": value},)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or not value:
        raise MessageError(f"a list of messages was expected, found {_shortened(value)}")
    return tuple(_message(index, message) for index, message in enumerate(value))


def read_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The tools of a column, which may be JSON text, as columnar files require; empty for None."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError:
            raise MessageError(f"tools are neither a list nor JSON: {_shortened(value)}") from None
    if value is None:
        return ()
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        raise MessageError(f"a list of tools was expected, each an object; found {_shortened(value)}")
    return tuple(_tool(tool) for tool in value)


def without_keys_of_other_rows(value: Any) -> Any:
    """A value of a columnar file, which gives each object the keys of all rows: without entries that are None."""
    if isinstance(value, Mapping):
        return {key: without_keys_of_other_rows(item) for key, item in value.items() if item is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [without_keys_of_other_rows(item) for item in value]
    return value


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return _valued(tool) | ({"function": _valued(function)} if isinstance(function, Mapping) else {})


def _message(index: int, value: Any) -> Message:
    if not isinstance(value, Mapping):
        raise MessageError(f"message {index} is no object with a role: {_shortened(value)}")
    message = _valued(value)
    if "role" not in message and "from" in message:
        message["role"], message["content"] = message.pop("from"), message.pop("value", None)
    role = message.get("role")
    role = _SHAREGPT.get(role, role) if isinstance(role, str) else None
    if role not in ROLES:
        shown = _shortened(message.get("role"))
        raise MessageError(f"message {index} has the role {shown}; expected one of {', '.join(ROLES)}")
    message |= {"role": role, "content": _text(index, message.get("content"))}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(index, call) for call in _list_of_calls(index, calls)]
    return message


def _text(index: int, content: Any) -> str:
    """The content as text: text parts are joined, any other part is refused by its type."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise MessageError(f"message {index} has no text but {_shortened(content)}")
    return "".join(_part(index, part) for part in content)


def _part(index: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise MessageError(f"message {index} has a part that is no text but {_shortened(part)}")
    kind = str(part.get("type", ""))
    if any(name in kind for name in _NOT_TEXT):
        raise MessageError(f"message {index} has a part of type {kind!r}; text alone can be trained")
    if not isinstance(part.get("text"), str):
        raise MessageError(f"message {index} has a part of type {kind!r} without a text")
    return str(part["text"])


def _list_of_calls(index: int, calls: Any) -> Sequence[Any]:
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        return calls
    raise MessageError(f"message {index} has tool_calls that are no list: {_shortened(calls)}")


def _tool_call(index: int, call: Any) -> Mapping[str, Any]:
    """The call with its arguments as an object, as most templates expect; many datasets store them as JSON text."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise MessageError(f"message {index} has a tool call without a function's name: {_shortened(call)}")
    function = _valued(function)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise MessageError(f"message {index} calls {function['name']} with arguments that are no JSON") from None
    if not isinstance(arguments, Mapping):
        raise MessageError(f"message {index} calls {function['name']} with arguments that are no object")
    called = {**function, "arguments": arguments}
    return {**_valued(call), "function": called} if "function" in call else {"type": "function", "function": called}


def _valued(value: Mapping[str, Any]) -> dict[str, Any]:
    """An object without its keys that are null, which is how many clients write an absent one."""
    return {key: item for key, item in value.items() if item is not None}


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
