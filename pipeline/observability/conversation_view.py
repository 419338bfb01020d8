"""A sample's tokens as a conversation.

Owns how tokens become text again, and which part of the text is whose turn. What the policy sampled is its own turn, by
the mask; what it was given is cut where the model's chat template begins a message of some role. Promises a
conversation for every sample: where the template cannot be read what was given is one part, and without a tokenizer
tokens are shown by their ids. Must not know how a turn is shown.
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
POLICY, GIVEN = "assistant", "prompt"
"""Whose turn a part is: the policy's; somebody's, where the template does not tell."""
_ROLES = ("system", "user", "tool", POLICY)
_PROBE = "\ufdd0"


@dataclass(frozen=True)
class Passage:
    """A turn, or a piece of one: its `role`, its `text` as the model sees it, and whether the policy `sampled` it."""

    role: str
    text: str
    sampled: bool


class SampleReader:
    """Reads the samples of one model directory."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._tokenizer = directory, _tokenizer(directory / "tokenizer.json")

    def parts(self, tokens: Sequence[int], mask: Sequence[int]) -> list[Passage]:
        """The conversation, in order."""
        found: list[Passage] = []
        place = 0
        for sampled, run in groupby(mask):
            length = len(list(run))
            text = self.text(tokens[place : place + length])
            place += length
            found += [Passage(POLICY, text, True)] if sampled else self._given(text)
        return found

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones too."""
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _given(self, text: str) -> Iterator[Passage]:
        """What was not sampled, cut before each head of a message."""
        if not self._heads:
            yield Passage(GIVEN, text, False)
            return
        role, begin = GIVEN, 0
        for match in re.finditer("|".join(map(re.escape, sorted(self._heads, key=len, reverse=True))), text):
            if match.start() > begin:
                yield Passage(role, text[begin : match.start()], False)
            role, begin = self._heads[match[0]], match.start()
        if begin < len(text):
            yield Passage(role, text[begin:], False)

    @cached_property
    def _heads(self) -> dict[str, str]:
        """What the template writes before a message, with the role that it is of. Only heads that no two roles share
        and that name their role in some way count: a template without any does not tell roles apart."""
        try:
            template = ChatTemplate(self._directory)
        except ConfigError:
            return {}
        found: dict[str, str] = {}
        for role in _ROLES:
            head = _head_of(template, role)
            if len(head) > 1:
                found[head] = "" if head in found else role
        return {head: role for head, role in found.items() if role}


def _tokenizer(file: Path) -> Tokenizer | None:
    """The tokenizer in a file, or None when there is none that can be read."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises plain exceptions
        log.debug("tokens are shown by their ids: %s: %s", file, error)
        return None


def _head_of(template: ChatTemplate, role: str) -> str:
    """What is written right before a message of a role that follows others: what all of them end with is cut off."""
    before = [{"role": "user", "content": "a"}, {"role": POLICY, "content": "b"}]
    if role == POLICY:
        before = before[:1]
    try:
        plain = template.render(before, asks=False)
        text = template.render([*before, {"role": role, "content": _PROBE}], asks=False)
    except (TemplateError, ValueError, KeyError):
        return ""
    head, found, _ = text.partition(_PROBE)
    return head.removeprefix(plain) if found and head.startswith(plain) else ""
