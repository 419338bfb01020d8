"""A model's chat template: messages to text.

Owns the text of a conversation, from the template and the named special tokens of a model directory, and which of its
characters the template itself marks as the assistant's. Promises the text that Hugging Face's `apply_chat_template`
gives, by the same rules (sandboxed, whitespace of blocks trimmed), without importing transformers: workers of a task
render with it and must stay small. Must not know tokens.
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
"""Noncharacters of Unicode, which no text contains: placeholders for both ends of a marked block during rendering."""


@dataclass(frozen=True)
class MarkedText:
    """A rendered conversation.

    Attributes:
        text: as `ChatTemplate.render` gives it.
        spans: [begin, end) of each `{% generation %}` block, in characters of the text.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """The chat template of a model directory."""

    def __init__(self, directory: Path) -> None:
        """`ConfigError` when the directory has no chat template."""
        self._settings = read(directory / "tokenizer_config.json")
        self._older_settings = read(directory / "special_tokens_map.json")
        self.source = self._find(directory)

    @cached_property
    def marks_turns(self) -> bool:
        """Whether the template has `{% generation %}` blocks, which mark the assistant's text."""
        self._compiled  # noqa: B018 compiling sets the flag
        return self._marks

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, asks: bool = True) -> str:
        """The conversation as the template writes it. With `asks`, the text ends where the policy's turn begins.

        `TemplateError` for any failure of the template, such as a text joined with an object.
        """
        return self._render(messages, tools, asks, {})

    def marked(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> MarkedText:
        """The whole conversation, with the spans that the template marks.

        `TemplateError` if the marks are ambiguous or change the text, as with a filter around a marked block.
        """
        # Render without and with marks: equal texts prove that the marks change nothing.
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
        except Exception as error:  # expressions of the template raise any Python error
            raise TemplateError(f"{type(error).__name__}: {error}") from error

    def render_observation(
        self, messages: Sequence[Message], new_messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> str:
        """The text that follows a turn of the policy after `messages`: the end of the turn, then `new_messages`, up to
        the policy's next turn. `ValueError` when the template does not write the content of a turn exactly once."""
        turn = _TURN_MARKS[-1]  # a placeholder: the turn's real tokens are known and must not be encoded again
        assistant: Message = {"role": "assistant", "content": turn}
        _, separator, after = self.render([*messages, assistant, *new_messages], tools).partition(turn)
        if not separator or turn in after:
            raise ValueError("the chat template does not write each turn once")
        return after

    @cached_property
    def specials(self) -> dict[str, str]:
        """The named special tokens that templates write, as transformers passes them."""
        listed = "added_tokens_decoder" in self._settings  # the settings are complete: the older file is not read
        named = self._settings if listed else self._settings | self._older_settings
        tokens = {name: token for name, token in named.items() if name.endswith("_token")}
        for key in ("extra_special_tokens", "model_specific_special_tokens"):  # the first is a list in some files
            tokens |= extra if isinstance(extra := named.get(key), dict) else {}
        texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str) and text}

    @cached_property
    def _compiled(self) -> Compiled:
        extensions = ("jinja2.ext.loopcontrols", _Generation)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        compiled = environment.from_string(self.source)
        self._marks = bool(environment.extensions[_Generation.identifier].blocks)  # type: ignore[attr-defined]
        return compiled

    def _find(self, directory: Path) -> str:
        template_file = directory / "chat_template.jinja"
        template = template_file.read_text() if template_file.is_file() else self._settings.get("chat_template")
        if not isinstance(template, str):
            hint = "put chat_template.jinja there"
            raise ConfigError("model.path", str(directory), "a model with one chat template", hint)
        return template


class _Generation(Extension):
    """The `{% generation %}` block, which marks the assistant's text. The content is rendered unchanged, between two
    variables that are empty except in `ChatTemplate.marked`."""

    tags = {"generation"}  # noqa: RUF012 jinja's own declaration
    blocks = 0

    def parse(self, parser: Parser) -> nodes.Node:
        self.blocks += 1
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
    """A JSON object, empty when the file does not exist."""
    return dict(json.loads(path.read_text())) if path.is_file() else {}
