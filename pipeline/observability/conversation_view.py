"""A sample's tokens as the turns of a conversation.

The mask separates the policy's turns from its input. The input is split where the model's chat template starts a
message of a role. Every sample has a conversation: without a readable template the input is one part, and without a
tokenizer tokens are shown as ids.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from jinja2 import TemplateError
from tokenizers import Tokenizer

from pipeline.environments.chat_template import ChatTemplate
from pipeline.errors import ConfigError

log = logging.getLogger(__name__)
POLICY, INPUT = "assistant", "prompt"
"""Roles of a part: the policy's, and that of input whose role the template does not show."""
_ROLES = ("system", "user", "tool", POLICY)
_PROBE = "\ufdd0"


@dataclass(frozen=True)
class Passage:
    """A turn, or a part of one: its `role`, its `text` as the model sees it, and whether the policy `sampled` it."""

    role: str
    text: str
    sampled: bool


class SampleReader:
    """Decodes samples with the tokenizer and the chat template of one model directory."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._tokenizer = directory, _tokenizer(directory / "tokenizer.json")

    def parts(self, tokens: Sequence[int], mask: Sequence[int]) -> list[Passage]:
        """The conversation of one token sequence, in order."""
        passages: list[Passage] = []
        start = 0
        for sampled, run in groupby(mask):
            length = len(list(run))
            text = self.text(tokens[start : start + length])
            start += length
            passages += [Passage(POLICY, text, True)] if sampled else self._input_parts(text)
        return passages

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, including special tokens."""
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _input_parts(self, text: str) -> Iterator[Passage]:
        """Text that was not sampled, split before each message header."""
        if not self._heads:
            yield Passage(INPUT, text, False)
            return
        role, begin = INPUT, 0
        for match in re.finditer("|".join(map(re.escape, sorted(self._heads, key=len, reverse=True))), text):
            if match.start() > begin:
                yield Passage(role, text[begin : match.start()], False)
            role, begin = self._heads[match[0]], match.start()
        if begin < len(text):
            yield Passage(role, text[begin:], False)

    @cached_property
    def _heads(self) -> dict[str, str]:
        """The roles by message header, the text that the template writes before a message.

        Headers of one character, and headers that two roles share, do not identify a role and are omitted.
        """
        try:
            template = ChatTemplate(self._directory)
        except ConfigError:
            return {}
        roles: dict[str, str] = {}
        for role in _ROLES:
            head = _message_header(template, role)
            if len(head) > 1:
                roles[head] = "" if head in roles else role
        return {head: role for head, role in roles.items() if role}


def _tokenizer(file: Path) -> Tokenizer | None:
    """The tokenizer in a file, or None if the file is missing or unreadable."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises plain exceptions
        log.debug("tokens are shown by their ids: %s: %s", file, error)
        return None


def _message_header(template: ChatTemplate, role: str) -> str:
    """The text that the template writes between earlier messages and the content of a message of `role`."""
    before = [{"role": "user", "content": "a"}, {"role": POLICY, "content": "b"}]
    if role == POLICY:
        before = before[:1]
    try:
        plain = template.render(before, asks=False)
        text = template.render([*before, {"role": role, "content": _PROBE}], asks=False)
    except (TemplateError, ValueError, KeyError):
        return ""
    head, probe, _ = text.partition(_PROBE)
    return head.removeprefix(plain) if probe and head.startswith(plain) else ""
