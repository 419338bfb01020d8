"""Text to tokens and back, by the model's own tokenizer and chat template.

Owns the only place where text is tokenised: prompts, demonstrations and observations, each once. Promises the tokens
that Hugging Face's `apply_chat_template` gives, without importing torch or a model class. Must not know tasks' meaning.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import ByteLevel

from pipeline.data.chat_messages import Message
from pipeline.environments.chat_template import ChatTemplate, read
from pipeline.environments.task_protocol import Demonstration
from pipeline.errors import ConfigError


class ChatTokenizer:
    """The tokenizer and chat template of a model directory."""

    def __init__(self, directory: Path) -> None:
        """`ConfigError` when the directory has no chat template or no end-of-turn token."""
        self._directory = directory
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        # Of a post-processor nothing is wanted: no token is added, and one of bytes would trim what offsets cover.
        self._tokenizer.post_processor = ByteLevel(trim_offsets=False)
        self.template = ChatTemplate(directory)
        self.stop_token_ids = self._find_stops()

    @cached_property
    def vocabulary(self) -> int | None:
        """Tokens of the model's vocabulary, or None when its config does not say."""
        size = read(self._directory / "config.json").get("vocab_size")
        return size if isinstance(size, int) else None

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of a conversation, up to where the policy speaks."""
        return self.encode(self.render(messages, tools))

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The conversation as the chat template writes it, up to where the policy speaks."""
        return self.template.render(messages, tools)

    def demonstration(self, shown: Demonstration) -> tuple[list[int], int]:
        """Token ids of a prompt with its answer and the end of the turn, and how many of them are the prompt."""
        prompt = self.prompt(shown.prompt.messages, shown.prompt.tools)
        return [*prompt, *self.encode(shown.answer), self.stop_token_ids[0]], len(prompt)

    def encode_observation(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        ended: bool = True,
    ) -> list[int]:
        """Token ids that follow the token which ended the policy's turn after `messages`: the rest of the turn's end,
        `told`, and the head of the next turn. A turn that was cut off has not `ended`: then that token comes first."""
        after = self.template.render_observation(messages, new_messages, tools)
        for end in self.stops if ended else ():
            if after.lstrip().startswith(end):
                after = after.lstrip().removeprefix(end)
                break
        return self.encode(after)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it is, special tokens spelt out in it included."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """The tokens that end a turn, as texts."""
        return tuple(str(self._tokenizer.id_to_token(stop)) for stop in self.stop_token_ids)

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text as `encode` gives them, each with the characters [begin, end) that it covers.

        Bytes of one character cover it all. White space that a tokenizer leaves out of what it reports, as some do
        before a word, belongs to the token after it.
        """
        found = self._tokenizer.encode(text, add_special_tokens=False)
        places, reached = [], 0
        for begin, end in found.offsets:
            places.append((min(begin, reached), end))
            reached = max(reached, end)
        return list(found.ids), places

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a turn: everything the policy said, special tokens too, except the token that ended it."""
        said = tokens[:-1] if tokens and tokens[-1] in self.stop_token_ids else tokens
        return str(self._tokenizer.decode(list(said), skip_special_tokens=False))

    def piece(self, token: int) -> str:
        """The text of one token, special ones too; a part of a character is shown as the tokenizer does."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def _find_stops(self) -> tuple[int, ...]:
        """Tokens that end a turn: the tokenizer's end of sequence first, then those the model's files add."""
        named = self._tokenizer.token_to_id(self.template.specials.get("eos_token", ""))
        found: list[Any] = [named]
        for name in ("generation_config.json", "config.json"):
            stated = read(self._directory / name).get("eos_token_id")
            found += stated if isinstance(stated, list) else [stated]
        stops = tuple(dict.fromkeys(stop for stop in found if isinstance(stop, int)))
        if not stops:
            raise ConfigError("model.path", str(self._directory), "a model with an eos token", "name it in config.json")
        return stops
