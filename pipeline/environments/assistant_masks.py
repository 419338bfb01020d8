"""Conversations as tokens, with a mask of what an assistant said.

Owns which tokens of a conversation are trained. The model's own template says it, in one of two ways:

- It marks what an assistant says (`{% generation %}`): those spans.
- It does not: a turn is what the conversation up to it has more than the prompt before it, `render(messages[:i])` with
  the head of an answer. This holds only if the one is the beginning of the other, and both of the whole; it is verified
  for every turn of every row, and a template that writes earlier turns in another way than last ones is refused.

Promises that the tokens are those of the whole text, as Hugging Face's `apply_chat_template` gives them, that a mask
never counts nothing and never all, and that a turn which is chosen counts. A token that holds the end of a prompt and
the beginning of an answer counts. Pure but for the model directory; must not know datasets.

    masker = Masker(Chat(directory), "all")
    for text in masker.rows(conversation): ...         # one, or with "each" one for each turn
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
    """Why a conversation has no mask, in one line that says what to do."""


@dataclass(frozen=True)
class MaskedText:
    """A conversation as it is trained.

    Attributes:
        text: as the template writes it.
        spans: [begin, end) of what is trained, in characters of the text.
        tokens: ids of the whole text.
        mask: 1 for each token that is trained, else 0; as many.
    """

    text: str
    spans: tuple[Span, ...]
    tokens: tuple[int, ...]
    mask: tuple[int, ...]


class AssistantMasker:
    """Makes rows of conversations by one model's template and tokenizer."""

    def __init__(self, chat: ChatTokenizer, choice: Choice) -> None:
        self._chat, self._choice = chat, choice

    @property
    def method(self) -> str:
        """How the mask is found, in words."""
        marks = self._chat.template.marks_turns
        return "the template's {% generation %} blocks" if marks else "the template with and without each turn"

    @property
    def template(self) -> str:
        """The template's source, which the text of every row depends on."""
        return self._chat.template.source

    def rows(self, conversation: Conversation) -> Iterator[MaskedText]:
        """What is trained of a conversation, one row or with `each` one for each turn; `MaskError` if it is nothing."""
        turns = conversation.turns
        if not turns:
            raise MaskError("no turn of an assistant to train; remove the row, or set data.invalid=drop")
        if self._choice == "each":
            for turn in turns:
                upto = replace(conversation, messages=conversation.messages[: turn + 1], asked=turn)
                yield self._row(upto, upto.turns)
        else:
            yield self._row(conversation, turns if self._choice == "all" else turns[-1:])

    def teaches_end(self, row: MaskedText) -> bool:
        """Whether the last turn that is trained ends with a token that ends turns: else the model never learns to."""
        return row.text[slice(*row.spans[-1])].rstrip().endswith(self._chat.stops)

    def _row(self, conversation: Conversation, turns: Sequence[int]) -> MaskedText:
        try:
            text, spans = self._spans(conversation, turns)
        except TemplateError as error:
            raise MaskError(f"the chat template refuses it: {' '.join(str(error).split())}") from None
        try:
            tokens, places = self._chat.encode_with_places(text)
        except Exception as error:  # noqa: BLE001 the library raises no narrower one
            raise MaskError(f"the tokenizer cannot encode it: {' '.join(str(error).split())}") from None
        mask = tuple(int(any(_overlap(place, span) for span in spans)) for place in places)
        _check(mask, spans)
        return MaskedText(text, tuple(spans), tuple(tokens), (0, *mask[1:]))

    def _spans(self, conversation: Conversation, turns: Sequence[int]) -> tuple[str, list[Span]]:
        if self._chat.template.marks_turns:
            return self._marked(conversation, turns)
        text = self._chat.template.render(conversation.messages, conversation.tools, asks=False)
        return text, [self._prefixed(conversation, text, turn) for turn in turns]

    def _marked(self, conversation: Conversation, turns: Sequence[int]) -> tuple[str, list[Span]]:
        """The spans that the template marks; it writes them in the order of the turns, prompt's turns included."""
        marked = self._chat.template.marked(conversation.messages, conversation.tools)
        said = [place for place, each in enumerate(conversation.messages) if each["role"] == "assistant"]
        if len(marked.spans) != len(said):
            if list(turns) == said and marked.spans:
                return marked.text, list(marked.spans)
            raise MaskError(f"the template marks {len(marked.spans)} spans for {len(said)} turns of the assistant")
        return marked.text, [marked.spans[said.index(turn)] for turn in turns]

    def _prefixed(self, conversation: Conversation, text: str, turn: int) -> Span:
        """What message `turn` adds to the text, up to the token that ends it."""
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
    """The length of a turn without the white space that a template writes after the token that ends it."""
    ends = [end for stop in stops if (end := turn.rfind(stop) + len(stop)) >= len(stop) and not turn[end:].strip()]
    return max(ends, default=len(turn))


def _overlap(place: Span, span: Span) -> bool:
    return place[0] < span[1] and place[1] > span[0]


def _check(mask: Sequence[int], spans: Sequence[Span]) -> None:
    if not any(mask[1:]):
        raise MaskError(f"no token of it would be trained: its turns are empty, or left out by the template; {_HINT}")
    if all(mask):
        raise MaskError(f"every token of it would be trained, its prompt too; {_HINT}")
    if any(begin >= end for begin, end in spans):
        raise MaskError("a turn of the assistant is empty in the template's text; remove the row or the turn")
