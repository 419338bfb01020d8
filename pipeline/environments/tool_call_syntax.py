"""The syntax of tool calls in a policy's text.

Owns the two forms of a call, and parsing them from a text. Promises time linear in the length of any text, and that a
malformed call is reported as such. Must not know what executes the calls.

A call has the form that models are trained on, `<tool_call>{"name": "calculator", "arguments": {"expression": "37*52"}}
</tool_call>`, or, for tiny models, `[calculator:37*52]`, whose text is the tool's first argument.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

ToolCallSyntax = Literal["tagged", "short"]
ParameterTypes = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by the tool's name."""

_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_SHORT = re.compile(r"\[(\w+):([^\]]*)\]")
_SURROGATE = re.compile(r"\\u[dD]")
_CLOSES = {"tagged": "</tool_call>", "short": "]"}


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the policy.

    Attributes:
        wrong: why the call cannot be executed; empty if it can.
        begin: the index in the text where the call begins.
    """

    name: str
    arguments: Mapping[str, Any]
    wrong: str = ""
    begin: int = field(default=0, compare=False)


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> ParameterTypes:
    """The parameter schemas of tools, which are JSON schemas as chat templates take them."""
    functions = (tool.get("function", tool) for tool in tools)
    return {function["name"]: function.get("parameters") or {} for function in functions}


def parse_calls(text: str, form: ToolCallSyntax, takes: ParameterTypes) -> Iterator[ToolCall]:
    """The calls in a text, in order. A malformed call has the name `unknown`, and the reason in `wrong`."""
    until = _before_last(_CLOSES[form], text)
    if form == "short":
        for match in _SHORT.finditer(until):
            name, argument = match.groups()
            first = next(iter(takes.get(name, {}).get("properties", ())), "")
            yield ToolCall(name, {first: argument} if first or argument else {}, begin=match.start())
        return
    for match in _TAGGED.finditer(until):
        try:
            call = json.loads(match[1])
            name, arguments = str(call["name"]), call.get("arguments") or {}
            if not isinstance(arguments, dict):
                raise TypeError(f"its arguments are no object, but {type(arguments).__name__}")
            if _SURROGATE.search(match[1]) and not _is_encodable(call):
                raise ValueError("half of a surrogate pair is no character")
            yield ToolCall(name, arguments, begin=match.start())
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            yield ToolCall("unknown", {}, f"error: no tool call: {error}", match.start())


def _is_encodable(call: Any) -> bool:
    """Whether all texts of a call can be encoded. JSON may escape half of a surrogate pair, as in `\\ud83d`: tokenizers
    refuse such a text, and many JSON parsers refuse it when an agent sends it back."""
    try:
        json.dumps(call, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _before_last(close: str, text: str) -> str:
    """The text up to its last `close`. Every opening mark in it is then followed by a `close`, which keeps the search
    linear: without one, each of n openings would be searched to the end of the text."""
    before, separator, _ = text.rpartition(close)
    return before + separator
