"""Text to tokens and back, by the model's own tokenizer and chat template.

Owns the only place where text is tokenised: prompts, demonstrations and observations, each once. Promises the tokens
that Hugging Face's `apply_chat_template` gives, without importing torch or a model class. Must not know tasks' meaning.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pipeline.errors import ConfigError
from pipeline.tasks.protocol import Demonstration, Message


class Chat:
    """The tokenizer and chat template of a model directory."""

    def __init__(self, directory: Path) -> None:
        """`ConfigError` when the directory has no chat template or no end-of-turn token."""
        self._directory = directory
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._settings = _read(directory / "tokenizer_config.json")
        self._template = self._find_template()
        self.stop_token_ids = self._find_stops()

    @cached_property
    def vocabulary(self) -> int | None:
        """Tokens of the model's vocabulary, or None when its config does not say."""
        size = _read(self._directory / "config.json").get("vocab_size")
        return size if isinstance(size, int) else None

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the policy speaks."""
        return self.encode(self.render(messages))

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as the chat template writes it, up to where the policy speaks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, _ = render_jinja_template(
            conversations=[list(messages)], chat_template=self._template, add_generation_prompt=True, **self._specials
        )
        return str(rendered[0])

    def demonstration(self, shown: Demonstration) -> tuple[list[int], int]:
        """Token ids of a prompt with its answer and the end of the turn, and how many of them are the prompt."""
        prompt = self.prompt(shown.prompt.messages)
        return [*prompt, *self.encode(shown.answer), self.stop_token_ids[0]], len(prompt)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it is, special tokens spelt out in it included."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a turn: everything the policy said, special tokens too, except the token that ended it."""
        said = tokens[:-1] if tokens and tokens[-1] in self.stop_token_ids else tokens
        return str(self._tokenizer.decode(list(said), skip_special_tokens=False))

    @cached_property
    def _specials(self) -> dict[str, str]:
        """The named special tokens that templates write."""
        named = ((name, self._settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token"))
        return {name: token["content"] if isinstance(token, dict) else token for name, token in named if token}

    def _find_template(self) -> str:
        beside = self._directory / "chat_template.jinja"
        template = beside.read_text() if beside.is_file() else self._settings.get("chat_template")
        if not isinstance(template, str):
            mend = "put chat_template.jinja there"
            raise ConfigError("model.path", str(self._directory), "a model with one chat template", mend)
        return template

    def _find_stops(self) -> tuple[int, ...]:
        """Tokens that end a turn: the tokenizer's end of sequence first, then those the model's files add."""
        named = self._tokenizer.token_to_id(self._specials.get("eos_token", ""))
        found: list[Any] = [named]
        for name in ("generation_config.json", "config.json"):
            stated = _read(self._directory / name).get("eos_token_id")
            found += stated if isinstance(stated, list) else [stated]
        stops = tuple(dict.fromkeys(stop for stop in found if isinstance(stop, int)))
        if not stops:
            raise ConfigError("model.path", str(self._directory), "a model with an eos token", "name it in config.json")
        return stops


def _read(path: Path) -> dict[str, Any]:
    """A JSON object, empty when the file is not there."""
    return dict(json.loads(path.read_text())) if path.is_file() else {}
