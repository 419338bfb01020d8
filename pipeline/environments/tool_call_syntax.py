"""Calls of tools, as a policy writes them.

Owns the two forms of a call and how it is read from what a policy said. Promises time that is linear in the text,
whatever it says, and that a call which cannot be read is told as such. Must not know who makes the calls.

A call is written as models are trained to, `<tool_call>{"name": "calculator", "arguments": {"expression": "37*52"}}
</tool_call>`, or, for tiny models, as `[calculator:37*52]`, whose text is the tool's first argument.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

ToolCallSyntax = Literal["tagged", "short"]
ParameterTypes = Mapping[str, Mapping[str, Any]]
"""The JSON schema of what each tool takes, by its name."""

_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_SHORT = re.compile(r"\[(\w+):([^\]]*)\]")
_CLOSES = {"tagged": "</tool_call>", "short": "]"}


@dataclass(frozen=True)
class ToolCall:
    """What the policy asks of a tool.

    Attributes:
        wrong: why it cannot be asked; empty if it can.
        begin: the place in the text where the call begins.
    """

    name: str
    arguments: Mapping[str, Any]
    wrong: str = ""
    begin: int = field(default=0, compare=False)


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> ParameterTypes:
    """What each of these tools, JSON schemas as chat templates take them, takes."""
    functions = (tool.get("function", tool) for tool in tools)
    return {function["name"]: function.get("parameters") or {} for function in functions}


def parse_calls(text: str, form: ToolCallSyntax, takes: ParameterTypes) -> Iterator[ToolCall]:
    """The calls in a text, in order; what looks like one and is none has the name `unknown`, and says why."""
    until = _before_last(_CLOSES[form], text)
    if form == "short":
        for found in _SHORT.finditer(until):
            name, argument = found.groups()
            first = next(iter(takes.get(name, {}).get("properties", ())), "")
            yield ToolCall(name, {first: argument} if first or argument else {}, begin=found.start())
        return
    for found in _TAGGED.finditer(until):
        try:
            call = json.loads(found[1])
            name, arguments = str(call["name"]), call.get("arguments") or {}
            if not isinstance(arguments, dict):
                raise TypeError(f"its arguments are no object, but {type(arguments).__name__}")
            yield ToolCall(name, arguments, begin=found.start())
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            yield ToolCall("unknown", {}, f"error: no tool call: {error}", found.start())


def _before_last(close: str, text: str) -> str:
    """The text up to its last `close`, so that whatever opens in it also closes: a search from each of many opens for a
    close that never comes would take the square of their number."""
    before, found, _ = text.rpartition(close)
    return before + found
