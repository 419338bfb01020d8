"""A model's chat template: messages to text.

Owns how a conversation is written, by the template and the named special tokens of a model directory, and which of its
characters the template itself marks as an assistant's. Promises the text that Hugging Face's `apply_chat_template`
gives, by the same rules (sandboxed, whitespace of blocks trimmed), without importing transformers: workers of a task
render with it, and are to stay small. Must not know tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template as Compiled
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.data.chat_messages import Message
from pipeline.errors import ConfigError

_BEGIN, _END = "rollcall_generation_begins", "rollcall_generation_ends"
_TURN_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Noncharacters of Unicode, which no text has: what stands for the two ends of a marked block while it is rendered."""


@dataclass(frozen=True)
class MarkedText:
    """A rendered conversation.

    Attributes:
        text: as `ChatTemplate.render` gives it.
        spans: [begin, end) of what the template marks with `{% generation %}`, in characters of the text.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """The chat template of a model directory."""

    def __init__(self, directory: Path) -> None:
        """`ConfigError` when the directory has no chat template."""
        self._settings = read(directory / "tokenizer_config.json")
        self.source = self._find(directory)

    @cached_property
    def marks_turns(self) -> bool:
        """Whether the template has `{% generation %}` blocks, which say what an assistant said."""
        self._compiled  # noqa: B018 the parser tells
        return self._marks

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, asks: bool = True) -> str:
        """The conversation as the template writes it; where it `asks`, up to where the policy speaks.

        `TemplateError` for whatever keeps the template from it, such as a text joined with an object.
        """
        return self._render(messages, tools, asks, {})

    def marked(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> MarkedText:
        """The whole conversation, with the spans that the template marks.

        `TemplateError` where marks cannot be told from the text, or change it: a filter around them then looks at what
        they enclose.
        """
        plain = self._render(messages, tools, False, {})
        begin, end = [mark for mark in _TURN_MARKS if mark not in plain][:2]
        parts = re.split(f"([{begin}{end}])", self._render(messages, tools, False, {_BEGIN: begin, _END: end}))
        text, spans, opened = "", [], 0
        for part in parts:
            if part == begin:
                opened = len(text)
            elif part == end:
                spans.append((opened, len(text)))
            else:
                text += part
        if text != plain:
            raise TemplateError("the text around {% generation %} depends on what is in it")
        return MarkedText(text, tuple(spans))

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], asks: bool, marks: Mapping[str, str]
    ) -> str:
        rest = {"tools": list(tools) or None, "documents": None, "add_generation_prompt": asks}
        try:
            return self._compiled.render(messages=list(messages), **rest, **marks, **self.specials)
        except TemplateError:
            raise
        except Exception as error:  # what Python raises for the template's own expressions
            raise TemplateError(f"{type(error).__name__}: {error}") from error

    def render_observation(
        self, messages: Sequence[Message], new_messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> str:
        """What the template writes after a turn of the policy that follows `messages`: the end of the turn, then
        `told`, up to where the policy speaks again. `ValueError` when it does not write what a turn says."""
        turn = _TURN_MARKS[-1]  # in the place of what was said, whose tokens are known and not to be made again
        said: Message = {"role": "assistant", "content": turn}
        _, found, after = self.render([*messages, said, *new_messages], tools).partition(turn)
        if not found or turn in after:
            raise ValueError("the chat template does not write each turn once")
        return after

    @cached_property
    def specials(self) -> dict[str, str]:
        """The named special tokens that templates write."""
        named = ((name, self._settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token"))
        return {name: token["content"] if isinstance(token, dict) else token for name, token in named if token}

    @cached_property
    def _compiled(self) -> Compiled:
        extensions = ("jinja2.ext.loopcontrols", _Generation)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        compiled = environment.from_string(self.source)
        self._marks = bool(environment.extensions[_Generation.identifier].found)  # type: ignore[attr-defined]
        return compiled

    def _find(self, directory: Path) -> str:
        beside = directory / "chat_template.jinja"
        template = beside.read_text() if beside.is_file() else self._settings.get("chat_template")
        if not isinstance(template, str):
            hint = "put chat_template.jinja there"
            raise ConfigError("model.path", str(directory), "a model with one chat template", hint)
        return template


class _Generation(Extension):
    """Templates mark what an assistant said with `{% generation %}`; what is inside is written as it is, between two
    variables that are empty unless somebody asks for the marks."""

    tags = {"generation"}  # noqa: RUF012 jinja's own declaration
    found = 0

    def parse(self, parser: Parser) -> nodes.Node:
        self.found += 1
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")], lineno=line) for name in (_BEGIN, _END))
        return nodes.Scope([begin, *body, end], lineno=line)


def _to_json(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def read(path: Path) -> dict[str, Any]:
    """A JSON object, empty when the file is not there."""
    return dict(json.loads(path.read_text())) if path.is_file() else {}
