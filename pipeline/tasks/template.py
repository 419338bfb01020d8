"""A model's chat template: messages to text.

Owns how a conversation is written, by the template and the named special tokens of a model directory. Promises the text
that Hugging Face's `apply_chat_template` gives, by the same rules (sandboxed, whitespace of blocks trimmed), without
importing transformers: workers of a task render with it, and are to stay small. Must not know tokens.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template as Compiled
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.errors import ConfigError
from pipeline.tasks.protocol import Message

_TURN = "\N{PILCROW SIGN}turn\N{PILCROW SIGN}"
"""Stands for what the policy said, whose tokens are known and not to be made again."""


class Template:
    """The chat template of a model directory."""

    def __init__(self, directory: Path) -> None:
        """`ConfigError` when the directory has no chat template."""
        self._settings = read(directory / "tokenizer_config.json")
        self._text = self._find(directory)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The conversation as the template writes it, up to where the policy speaks; with the tools it may call."""
        rest = {"tools": list(tools) or None, "documents": None, "add_generation_prompt": True}
        return self._compiled.render(messages=list(messages), **rest, **self.specials)

    def reply(self, messages: Sequence[Message], told: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """What the template writes after a turn of the policy that follows `messages`: the end of the turn, then
        `told`, up to where the policy speaks again. `ValueError` when it does not write what a turn says."""
        said: Message = {"role": "assistant", "content": _TURN}
        _, turn, after = self.render([*messages, said, *told], tools).partition(_TURN)
        if not turn or _TURN in after:
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
        return environment.from_string(self._text)

    def _find(self, directory: Path) -> str:
        beside = directory / "chat_template.jinja"
        template = beside.read_text() if beside.is_file() else self._settings.get("chat_template")
        if not isinstance(template, str):
            mend = "put chat_template.jinja there"
            raise ConfigError("model.path", str(directory), "a model with one chat template", mend)
        return template


class _Generation(Extension):
    """Templates mark what an assistant said with `{% generation %}`; what is inside is written as it is."""

    tags = {"generation"}  # noqa: RUF012 jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def read(path: Path) -> dict[str, Any]:
    """A JSON object, empty when the file is not there."""
    return dict(json.loads(path.read_text())) if path.is_file() else {}
