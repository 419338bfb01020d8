"""The calls of one episode, as rows of tokens.

Owns which call goes on from which: a tree, whose leaves are the rows. Promises that every sampled token counts in one
row, with the log-probability and versions that it was sampled with; that each row is, token by token, what the policy
saw; and that nothing that was sampled is tokenised again. Pure: no I/O.

A call continues an earlier one if its messages begin with that call's messages and the unchanged reply, or if its
tokens begin with all tokens of that call and its reply. Then only what is new is tokenised. Any other call begins a
conversation of its own, rendered anew: the agent shortened its context, dropped a thought or edited a reply. It makes a
new row, which shares the longest common beginning with an earlier one.

    dialogue = ConversationTree(chat)
    place = dialogue.after(messages, tools)         # what the policy is to see: place.tokens
    dialogue.add(place, turn, text, reply)          # what it said, and the message that the agent was given
    dialogue.episode()

Notation: N calls, of which each is a node; T tokens of a row.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from typing import Any

from pipeline.data.chat_messages import Message
from pipeline.environments import Episode, Turn
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.episode import EpisodeBranch

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class PrefixMatch:
    """Where a call stands.

    Attributes:
        tokens: all that the policy sees.
        parent: the call that it goes on from.
        digests: one for the tools, and one more after each message; none for a call of plain text.
        messages: those of the call.
        text: the prompt, of a call of plain text.
    """

    tokens: tuple[int, ...]
    parent: "Node | None" = None
    digests: tuple[bytes, ...] = ()
    messages: tuple[Message, ...] = ()
    text: str = ""


@dataclass(frozen=True, eq=False)
class Node:
    """A call that was answered.

    Attributes:
        place: where it stood.
        turn: what was sampled.
        tokens: all tokens up to and with those.
        text: what was said.
        reply: the message that the agent was given; None for plain text.
        order: how many calls were answered before.
    """

    place: PrefixMatch
    turn: Turn
    text: str
    reply: Message | None
    order: int
    tokens: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", (*self.place.tokens, *self.turn.tokens))

    @property
    def path(self) -> "list[Node]":
        """The calls from the first of its conversation to this one."""
        before = self.place.parent.path if self.place.parent else []
        return [*before, self]


class ConversationTree:
    """All calls of one episode."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat
        self._nodes: list[Node] = []
        self._by_digest: dict[bytes, Node] = {}

    def match_prefix(self, messages: Sequence[Message], tools: Tools = ()) -> PrefixMatch:
        """The place of a call with these messages. Raises what the chat template does."""
        messages, digests = tuple(messages), tuple(_digests(messages, tools))
        parent, tokens = self._known(messages, digests, tools) or (None, None)
        if tokens is None:
            tokens = tuple(self._chat.prompt(messages, tools))
            parent = self._begun(tokens)
        return PrefixMatch(tokens, parent, digests, messages)

    def match_text(self, text: str) -> PrefixMatch:
        """The place of a call with a plain text: what follows the text of an earlier call is read as it is."""
        for node in reversed(self._nodes):
            whole = node.place.text + node.text
            if node.place.text and text.startswith(whole) and text != whole and not self._ended(node):
                return PrefixMatch((*node.tokens, *self._chat.encode(text[len(whole) :])), node, text=text)
        return self.match_tokens(self._chat.encode(text), text)

    def match_tokens(self, tokens: Sequence[int], text: str = "") -> PrefixMatch:
        """The place of a call with these tokens."""
        return PrefixMatch(tuple(tokens), self._begun(tuple(tokens)), text=text)

    def add(self, place: PrefixMatch, turn: Turn, text: str, reply: Message | None = None) -> Node:
        """Note what was sampled at a place."""
        node = Node(place, turn, text, reply, len(self._nodes))
        self._nodes.append(node)
        if reply is not None and place.digests:
            self._by_digest[_next_digest(place.digests[-1], reply)] = node
        return node

    def episode(self) -> Episode:
        """The rows of all calls, the first call's row first; an episode without tokens if there was none."""
        if not self._nodes:
            return Episode.begin(())
        first, *others = self._rows()
        turns, last = [node.turn for node in self._nodes], self._nodes[-1]
        return Episode(
            tokens=first.tokens,
            sampled=first.sampled,
            logprobs=first.logprobs,
            text=last.text,
            finish="stop" if last.turn.finish == "stop" else "length",
            version_min=min(turn.version_min for turn in turns),
            version_max=max(turn.version_max for turn in turns),
            turns=len(turns),
            server=last.turn.server,
            conversation=_message_digest(last),
            versions=first.versions,
            metrics={"agent/calls": float(len(turns)), "agent/rows": float(1 + len(others))},
            branches=tuple(others),
        )

    def _known(
        self, messages: tuple[Message, ...], digests: tuple[bytes, ...], tools: Tools
    ) -> tuple[Node, tuple[int, ...]] | None:
        """The call whose messages and reply these begin with, and all tokens; None if there is none."""
        for count in range(len(messages) - 1, 0, -1):
            node = self._by_digest.get(digests[count])
            if node is None:
                continue
            try:
                told = self._chat.encode_observation(
                    messages[: count - 1], messages[count:], tools, ended=self._ended(node)
                )
            except ValueError:
                return None  # the template writes no turn as it was said: what it writes is read instead
            return node, (*node.tokens, *told)
        return None

    def _begun(self, tokens: tuple[int, ...]) -> Node | None:
        """The longest call that these tokens go on from."""
        begun = [node for node in self._nodes if len(node.tokens) < len(tokens) and _starts(tokens, node.tokens)]
        return max(begun, key=lambda node: len(node.tokens), default=None)

    def _ended(self, node: Node) -> bool:
        return bool(node.turn.tokens) and node.turn.tokens[-1] in self._chat.stop_token_ids

    def _rows(self) -> Iterator[EpisodeBranch]:
        """A row for each call that none goes on from, in the order in which their conversations began."""
        parents = {id(node.place.parent) for node in self._nodes}
        paths = [node.path for node in self._nodes if id(node) not in parents]
        paths.sort(key=lambda path: [node.order for node in path])
        for number, path in enumerate(paths):
            of, shared = self._shared(path, paths[:number])
            tokens = path[-1].tokens
            sampled, logprobs, versions = [0] * len(tokens), [0.0] * len(tokens), [0] * len(tokens)
            for node in path:
                begin, end = len(node.place.tokens), len(node.tokens)
                sampled[begin:end], logprobs[begin:end] = [1] * (end - begin), node.turn.logprobs
                versions[begin:end] = node.turn.versions
            own = tuple(sampled[shared:]), tuple(logprobs[shared:]), tuple(versions[shared:])
            yield EpisodeBranch(of, shared, tokens[shared:], *own)

    def _shared(self, path: list[Node], earlier: list[list[Node]]) -> tuple[int, int]:
        """The earlier row that shares most tokens with this one, and how many: at most those before the first call that
        this row has alone."""
        best = (0, 0)
        for number, other in enumerate(earlier):
            own = next(node for node in path if node not in other)
            alike = _same_messages(path[-1].tokens, other[-1].tokens)
            best = max(best, (min(alike, len(own.place.tokens)), -number))
        return -best[1], best[0]


def _message_digest(last: Node) -> tuple[Message, ...]:
    """The last conversation from the policy's first turn on."""
    messages = last.place.messages
    asked = sum(1 for _ in takewhile(lambda message: message["role"] != "assistant", messages))
    return (*messages[asked:], last.reply or {"role": "assistant", "content": last.text})


def _starts(tokens: tuple[int, ...], start: tuple[int, ...]) -> bool:
    return tokens[: len(start)] == start


def _same_messages(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The length of their common beginning, in tokens."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(place for place in range(most) if one[place] != other[place])


def _digests(messages: Sequence[Message], tools: Tools) -> Iterator[bytes]:
    digest = blake2b(_text(list(tools))).digest()
    yield digest
    for message in messages:
        digest = _next_digest(digest, message)
        yield digest


def _next_digest(digest: bytes, message: Message) -> bytes:
    """The digest with one more message. It ignores what clients add to a reply, or leave out."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    kept = {key: message[key] for key in ("role", "name", "tool_call_id") if message.get(key)}
    content = str(message.get("content") or "")
    kept |= {"content": content.strip() if message["role"] == "assistant" else content, "tool_calls": calls}
    return blake2b(digest + _text(kept)).digest()


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
