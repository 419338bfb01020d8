"""The calls of one episode, as rows of tokens.

Owns which call continues which: a tree, whose leaves are the rows. Promises that every sampled token counts in exactly
one row, with the log-probability and version that sampled it; that each row equals, token by token, what the policy
read and sampled; and that no sampled token is encoded again. Pure: no I/O.

A call continues an earlier call if its messages begin with that call's messages and the unchanged reply, or if its
tokens begin with all tokens of that call and its reply. Only the new part is then tokenized. Any other call begins a
separate conversation, rendered from the start: the agent shortened its context, dropped a thought or edited a reply.
Such a call makes a new row, which shares the longest common prefix with an earlier row.

    dialogue = ConversationTree(chat)
    match = dialogue.match_prefix(messages, tools)  # match.tokens are the policy's input
    dialogue.add(match, turn, text, reply)          # the sampled turn, and the message that the agent received
    dialogue.episode()

Notation: N calls, each a node; T tokens of a row.
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
from pipeline.environments.episode import EpisodeBranch, extended

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class PrefixMatch:
    """The position of a call in the tree.

    Attributes:
        tokens: the policy's input.
        parent: the call that this one continues.
        digests: one for the tools, and one more after each message; empty for a call of plain text.
        messages: the call's messages.
        text: the prompt of a call of plain text.
    """

    tokens: tuple[int, ...]
    parent: "Node | None" = None
    digests: tuple[bytes, ...] = ()
    messages: tuple[Message, ...] = ()
    text: str = ""


@dataclass(frozen=True, eq=False)
class Node:
    """A completed call.

    Attributes:
        match: its position in the tree.
        turn: the sampled turn.
        tokens: the input tokens followed by the sampled tokens.
        text: the text of the turn.
        reply: the message that the agent received; None for plain text.
        order: the number of calls completed before.
    """

    match: PrefixMatch
    turn: Turn
    text: str
    reply: Message | None
    order: int
    tokens: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", (*self.match.tokens, *self.turn.tokens))

    @property
    def path(self) -> "list[Node]":
        """The calls from the first of its conversation to this one."""
        before = self.match.parent.path if self.match.parent else []
        return [*before, self]


class ConversationTree:
    """All calls of one episode."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat
        self._nodes: list[Node] = []
        self._by_digest: dict[bytes, Node] = {}

    def match_prefix(self, messages: Sequence[Message], tools: Tools = ()) -> PrefixMatch:
        """The position of a call with these messages. Raises the errors of the chat template."""
        messages, digests = tuple(messages), tuple(_digests(messages, tools))
        parent, tokens = self._known(messages, digests, tools) or (None, None)
        if tokens is None:
            tokens = tuple(self._chat.prompt(messages, tools))
            parent = self._begun(tokens)
        return PrefixMatch(tokens, parent, digests, messages)

    def match_text(self, text: str) -> PrefixMatch:
        """The position of a call with a plain text. If the text continues an earlier call, only the rest is encoded."""
        for node in reversed(self._nodes):
            whole = node.match.text + node.text
            if node.match.text and text.startswith(whole) and text != whole and not self._ended(node):
                return PrefixMatch((*node.tokens, *self._chat.encode(text[len(whole) :])), node, text=text)
        return self.match_tokens(self._chat.encode(text), text)

    def match_tokens(self, tokens: Sequence[int], text: str = "") -> PrefixMatch:
        """The position of a call with these tokens."""
        return PrefixMatch(tuple(tokens), self._begun(tuple(tokens)), text=text)

    def add(self, match: PrefixMatch, turn: Turn, text: str, reply: Message | None = None) -> Node:
        """Add the turn that was sampled at a position."""
        node = Node(match, turn, text, reply, len(self._nodes))
        self._nodes.append(node)
        if reply is not None and match.digests:
            self._by_digest[_next_digest(match.digests[-1], reply)] = node
        return node

    def episode(self) -> Episode:
        """The rows of all calls, the first call's row first; an episode without tokens if there were no calls."""
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
            routed_experts=first.routed_experts,
            metrics={"agent/calls": float(len(turns)), "agent/rows": float(1 + len(others))},
            branches=tuple(others),
        )

    def _known(
        self, messages: tuple[Message, ...], digests: tuple[bytes, ...], tools: Tools
    ) -> tuple[Node, tuple[int, ...]] | None:
        """The call whose messages and reply are a prefix of these messages, and all tokens; None if there is none."""
        # The longest match first.
        for count in range(len(messages) - 1, 0, -1):
            node = self._by_digest.get(digests[count])
            if node is None:
                continue
            try:
                observation = self._chat.encode_observation(
                    messages[: count - 1], messages[count:], tools, ended=self._ended(node)
                )
            except ValueError:
                return None  # the template does not write each turn once, so the conversation must be rendered whole
            return node, (*node.tokens, *observation)
        return None

    def _begun(self, tokens: tuple[int, ...]) -> Node | None:
        """The longest call whose tokens are a prefix of these tokens."""
        begun = [node for node in self._nodes if len(node.tokens) < len(tokens) and _starts(tokens, node.tokens)]
        return max(begun, key=lambda node: len(node.tokens), default=None)

    def _ended(self, node: Node) -> bool:
        return bool(node.turn.tokens) and node.turn.tokens[-1] in self._chat.stop_token_ids

    def _rows(self) -> Iterator[EpisodeBranch]:
        """A row for each call that no call continues, in the order in which their conversations began."""
        parents = {id(node.match.parent) for node in self._nodes}
        paths = [node.path for node in self._nodes if id(node) not in parents]
        paths.sort(key=lambda path: [node.order for node in path])
        for number, path in enumerate(paths):
            of, shared = self._shared(path, paths[:number])
            tokens = path[-1].tokens
            sampled, logprobs, versions = [0] * len(tokens), [0.0] * len(tokens), [0] * len(tokens)
            routed: tuple[bytes, ...] = ()
            # Arrays of T entries: the sampled span of each call on the path is filled in, the rest stays 0.
            for node in path:
                begin, end = len(node.match.tokens), len(node.tokens)
                sampled[begin:end], logprobs[begin:end] = [1] * (end - begin), node.turn.logprobs
                versions[begin:end] = node.turn.versions
                routed = extended(routed, node.turn.routed_experts)
            own = tuple(sampled[shared:]), tuple(logprobs[shared:]), tuple(versions[shared:]), routed[shared:]
            yield EpisodeBranch(of, shared, tokens[shared:], *own)

    def _shared(self, path: list[Node], earlier: list[list[Node]]) -> tuple[int, int]:
        """The earlier row with the longest shared prefix, and its length in tokens. The prefix ends before the
        first call that belongs to this row only, so that the call's sampled tokens count here."""
        best = (0, 0)
        for number, other in enumerate(earlier):
            own = next(node for node in path if node not in other)
            alike = _same_messages(path[-1].tokens, other[-1].tokens)
            best = max(best, (min(alike, len(own.match.tokens)), -number))
        return -best[1], best[0]


def _message_digest(last: Node) -> tuple[Message, ...]:
    """The messages of the last conversation from the policy's first turn on."""
    messages = last.match.messages
    prompt_length = sum(1 for _ in takewhile(lambda message: message["role"] != "assistant", messages))
    return (*messages[prompt_length:], last.reply or {"role": "assistant", "content": last.text})


def _starts(tokens: tuple[int, ...], start: tuple[int, ...]) -> bool:
    return tokens[: len(start)] == start


def _same_messages(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The length of the common prefix, in tokens."""
    limit = min(len(one), len(other))
    if one[:limit] == other[:limit]:
        return limit
    return next(index for index in range(limit) if one[index] != other[index])


def _digests(messages: Sequence[Message], tools: Tools) -> Iterator[bytes]:
    digest = blake2b(_text(list(tools))).digest()
    yield digest
    for message in messages:
        digest = _next_digest(digest, message)
        yield digest


def _next_digest(digest: bytes, message: Message) -> bytes:
    """The digest with one more message. Fields that clients add to a reply, or drop from it, do not count."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    fields = {key: message[key] for key in ("role", "name", "tool_call_id") if message.get(key)}
    content = str(message.get("content") or "")
    fields |= {"content": content.strip() if message["role"] == "assistant" else content, "tool_calls": calls}
    return blake2b(digest + _text(fields)).digest()


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
