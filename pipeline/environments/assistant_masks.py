"""Conversations as tokens, with a mask of the assistant's turns.

Owns the choice of the tokens of a conversation that are trained. The model's own template determines them, in one of
two ways:

- The template marks the assistant's text (`{% generation %}`). The marked spans are trained.
- The template has no marks. A turn is then the difference between the text with the turn, `render(messages[:i + 1])`,
  and the text of the prompt before it, `render(messages[:i])` with the head of an answer. The difference is valid only
  if the prompt's text is a prefix of the turn's text, and both are prefixes of the whole. This is verified for every
  turn of every row. A template that writes earlier turns differently from the last one is refused.

Promises that the tokens are those of Hugging Face's `apply_chat_template`, that a mask never counts no token or every
token, and that each chosen turn counts. A token that contains both the end of a prompt and the beginning of an answer
counts. Pure except for reading the model directory; must not know datasets.

    masker = Masker(Chat(directory), "all")
    for text in masker.rows(conversation): ...         # one row; with "each" one row per turn
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jinja2 import TemplateError

from pipeline.data.chat_messages import Conversation
from pipeline.environments.chat_tokenizer import ChatTokenizer

Choice = Literal["all", "last", "each"]
Span = tuple[int, int]
_PREFIX_NOTE = "set data.train_on=each, or "
_HINT = "put a chat_template.jinja with {% generation %} blocks into the model's directory"


class MaskError(ValueError):
    """The reason why a conversation has no mask, on one line that names the fix."""


@dataclass(frozen=True)
class MaskedText:
    """A conversation, and the part of it that is trained.

    Attributes:
        text: as the template writes it.
        spans: [begin, end) of each trained part, in characters of the text.
        tokens: ids of the whole text.
        mask: 1 for each token that is trained, else 0; as long as `tokens`.
    """

    text: str
    spans: tuple[Span, ...]
    tokens: tuple[int, ...]
    mask: tuple[int, ...]


class AssistantMasker:
    """Makes training rows from conversations with one model's template and tokenizer."""

    def __init__(self, chat: ChatTokenizer, choice: Choice) -> None:
        self._chat, self._choice = chat, choice

    @property
    def method(self) -> str:
        """The method that determines the mask, in words."""
        marks = self._chat.template.marks_turns
        return "the template's {% generation %} blocks" if marks else "the template with and without each turn"

    @property
    def template(self) -> str:
        """The template's source, which determines the text of every row."""
        return self._chat.template.source

    def rows(self, conversation: Conversation) -> Iterator[MaskedText]:
        """Yield the conversation's training rows: one, or with `each` one per turn; `MaskError` if it has none."""
        turns = conversation.turns
        if not turns:
            raise MaskError("no turn of an assistant to train; remove the row, or set data.invalid=drop")
        if self._choice == "each":
            for turn in turns:
                upto = replace(conversation, messages=conversation.messages[: turn + 1], prompt_length=turn)
                yield self._row(upto, upto.turns)
        else:
            yield self._row(conversation, turns if self._choice == "all" else turns[-1:])

    def teaches_end(self, row: MaskedText) -> bool:
        """Whether the last trained turn ends with an end-of-turn token; otherwise the model never learns to stop."""
        return row.text[slice(*row.spans[-1])].rstrip().endswith(self._chat.stops)

    def _row(self, conversation: Conversation, turns: Sequence[int]) -> MaskedText:
        try:
            text, spans = self._spans(conversation, turns)
        except TemplateError as error:
            raise MaskError(f"the chat template refuses it: {' '.join(str(error).split())}") from None
        try:
            tokens, offsets = self._chat.encode_with_offsets(text)
        except Exception as error:  # noqa: BLE001 the library raises no narrower one
            raise MaskError(f"the tokenizer cannot encode it: {' '.join(str(error).split())}") from None
        mask = tuple(int(any(_overlap(offset, span) for span in spans)) for offset in offsets)
        _check(mask, spans)
        # The first token is never trained, since nothing predicts it.
        return MaskedText(text, tuple(spans), tuple(tokens), (0, *mask[1:]))

    def _spans(self, conversation: Conversation, turns: Sequence[int]) -> tuple[str, list[Span]]:
        if self._chat.template.marks_turns:
            return self._marked(conversation, turns)
        text = self._chat.template.render(conversation.messages, conversation.tools, asks=False)
        return text, [self._prefixed(conversation, text, turn) for turn in turns]

    def _marked(self, conversation: Conversation, turns: Sequence[int]) -> tuple[str, list[Span]]:
        """The text and the spans that the template marks, in the order of the turns (those of the prompt included)."""
        marked = self._chat.template.marked(conversation.messages, conversation.tools)
        assistant = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if len(marked.spans) != len(assistant):
            if list(turns) == assistant and marked.spans:
                return marked.text, list(marked.spans)
            raise MaskError(f"the template marks {len(marked.spans)} spans for {len(assistant)} turns of the assistant")
        return marked.text, [marked.spans[assistant.index(turn)] for turn in turns]

    def _prefixed(self, conversation: Conversation, text: str, turn: int) -> Span:
        """The span that message `turn` adds to the text, up to its end-of-turn token."""
        template, messages, tools = self._chat.template, conversation.messages, conversation.tools
        before = template.render(messages[:turn], tools, asks=True)
        upto = template.render(messages[: turn + 1], tools, asks=False)
        if not upto.startswith(before):
            what = "asks for an answer in another way than it writes one, perhaps with the reasoning that it lacks"
            raise MaskError(f"the template {what}, so message {turn} is found nowhere; {_HINT}")
        if not text.startswith(upto):
            what = "drops reasoning of" if "</think>" in upto else "does not keep"
            raise MaskError(
                f"the template {what} earlier turns, so message {turn} is found nowhere; {_PREFIX_NOTE}{_HINT}"
            )
        return len(before), len(before) + _turn_text(text[len(before) : len(upto)], self._chat.stops)


def _turn_text(turn: str, stops: Sequence[str]) -> int:
    """The length of a turn without the white space that a template writes after the end-of-turn token."""
    ends = [end for stop in stops if (end := turn.rfind(stop) + len(stop)) >= len(stop) and not turn[end:].strip()]
    return max(ends, default=len(turn))


def _overlap(offset: Span, span: Span) -> bool:
    return offset[0] < span[1] and offset[1] > span[0]


def _check(mask: Sequence[int], spans: Sequence[Span]) -> None:
    if not any(mask[1:]):
        raise MaskError(f"no token of it would be trained: its turns are empty, or left out by the template; {_HINT}")
    if all(mask):
        raise MaskError(f"every token of it would be trained, its prompt too; {_HINT}")
    if any(begin >= end for begin, end in spans):
        raise MaskError("a turn of the assistant is empty in the template's text; remove the row or the turn")
