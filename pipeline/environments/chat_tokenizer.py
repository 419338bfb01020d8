"""Text to tokens and back, by the model's own tokenizer and chat template.

Owns the only place where text is tokenized: prompts, demonstrations and observations, each once. Promises the tokens
of Hugging Face's `apply_chat_template`, without importing torch or a model class; and that other threads run while a
text of `LONG_TEXT` characters or more is tokenized. Must not know the meaning of a task.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer
from tokenizers.processors import ByteLevel

from pipeline.data.chat_messages import Message
from pipeline.environments.chat_template import ChatTemplate, read
from pipeline.environments.task_protocol import Demonstration
from pipeline.errors import ConfigError

LONG_TEXT = 2000
"""Characters of a text from which on tokenizing takes longer than the hand-over to a thread."""


class ChatTokenizer:
    """The tokenizer and chat template of a model directory."""

    def __init__(self, directory: Path) -> None:
        """`ConfigError` when the directory has no chat template or no end-of-turn token."""
        self._directory = directory
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        # A file may have the truncation and padding of its last use, which transformers replaces with each call's.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Disable the post-processor: it may add tokens, and a byte-level one would trim the offsets.
        self._tokenizer.post_processor = ByteLevel(trim_offsets=False)
        self.template = ChatTemplate(directory)
        self.stop_token_ids = self._find_stops()

    @cached_property
    def vocabulary(self) -> int | None:
        """Tokens of the model's vocabulary, or None when its config does not name the size."""
        size = read(self._directory / "config.json").get("vocab_size")
        return size if isinstance(size, int) else None

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of a conversation, up to the beginning of the policy's turn."""
        return self.encode(self.render(messages, tools))

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The conversation as the chat template writes it, up to the beginning of the policy's turn."""
        return self.template.render(messages, tools)

    def demonstration(self, shown: Demonstration) -> tuple[list[int], int]:
        """Token ids of a prompt with its answer and the end of the turn, and the length of the prompt in tokens."""
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
        """Token ids that follow the end-of-turn token of the policy's turn after `messages`: the rest of the turn's
        end, `new_messages`, and the head of the next turn. A truncated turn (`ended` is False) has no end-of-turn
        token, so the ids begin with it."""
        after = self.template.render_observation(messages, new_messages, tools)
        for end in self.stops if ended else ():
            if after.lstrip().startswith(end):
                after = after.lstrip().removeprefix(end)
                break
        return self.encode(after)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text without any addition; special tokens written in the text are recognized."""
        return list(self._encoding(text).ids)

    def _encoding(self, text: str) -> Encoding:
        if len(text) < LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=False)
        # `encode` holds Python's lock throughout, so that a thread would not help an event loop; `encode_batch` does
        # not.
        return self._tokenizer.encode_batch([text], add_special_tokens=False)[0]

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """The tokens that end a turn, as texts."""
        return tuple(str(self._tokenizer.id_to_token(stop)) for stop in self.stop_token_ids)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text as `encode` gives them, each with the characters [begin, end) that it covers.

        Each token with a byte of a character covers the whole character. White space that a tokenizer omits from its
        offsets, as some do before a word, belongs to the following token.
        """
        encoding = self._encoding(text)
        offsets, reached = [], 0
        for begin, end in encoding.offsets:
            # `reached` is the end of the text covered so far: a gap belongs to the token after it.
            offsets.append((min(begin, reached), end))
            reached = max(reached, end)
        return list(encoding.ids), offsets

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a turn, special tokens included, without its end-of-turn token."""
        content = tokens[:-1] if tokens and tokens[-1] in self.stop_token_ids else tokens
        return str(self._tokenizer.decode(list(content), skip_special_tokens=False))

    def piece(self, token: int) -> str:
        """The text of one token, special ones included; part of a character is shown as the tokenizer shows it."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def _find_stops(self) -> tuple[int, ...]:
        """Tokens that end a turn: the tokenizer's end of sequence first, then those the model's files add."""
        named = self._tokenizer.token_to_id(self.template.specials.get("eos_token", ""))
        ids: list[Any] = [named]
        for name in ("generation_config.json", "config.json"):
            stated = read(self._directory / name).get("eos_token_id")
            ids += stated if isinstance(stated, list) else [stated]
        stops = tuple(dict.fromkeys(stop for stop in ids if isinstance(stop, int)))
        if not stops:
            raise ConfigError("model.path", str(self._directory), "a model with an eos token", "name it in config.json")
        return stops
