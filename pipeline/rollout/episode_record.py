"""The record of a group in flight, and its replay by the next actor.

Owns the events of an episode, and their use after the actor was lost. Promises that recorded tokens are
neither sampled again nor changed: a sample that continues has them with their log-probabilities and policy versions.
Must not know where events are written (`pipeline.rollout.episode_journal`).

- A task that `can_replay`: the responses of the servers and the results of tools are recorded. Its `rollout` runs
  again, and gets each recorded turn instead of a request with the same input, and each recorded result instead of a
  call with the same arguments. A turn with only a part recorded continues after this part. From the first
  request that differs on, it samples as usual.
- Any other task: only whole episodes are recorded. An episode that had not ended is sampled from the start.

Recorded tokens that are too old to be trained (`pipeline.transport.staleness.is_usable`) are sampled again too.

    record = GroupRecord(position=112, journal, oldest=4, stale="refuse")
    record.begin(replays=True)
    turn = record.samples[0].turn(tokens)       # turn.begun: what is recorded of it; turn.add: its next response
    record.samples[0].end(episode, seconds)
"""

import json
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Protocol

import msgspec
import numpy as np

from pipeline.environments import Episode
from pipeline.environments.task_calls import ToolResult
from pipeline.rollout.server_client import Completion
from pipeline.transport.staleness import Stale, is_usable
from pipeline.transport.turn_times import TurnTimes

log = logging.getLogger(__name__)

DIGEST_BYTES = 16


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """A response of a server: a turn, or the next part of one.

    Attributes:
        turn, input: the number of the episode's turn, in the order of requests; the digest of its input.
        start: number of the turn's tokens before this piece.
        known: number of tokens before it whose routed experts its request did not ask for.
        completion: the response, with the routed experts of further tokens.
    """

    turn: int
    input: bytes
    start: int
    known: int
    completion: Completion


class ToolCalled(msgspec.Struct, frozen=True, tag="tool"):
    """The result of a tool, or the reason why it has none; `call` is the digest of its name and arguments."""

    call: bytes
    text: str
    failed: bool


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """An episode that has ended, the seconds that it took, and the times of its turns."""

    episode: Episode
    seconds: float
    turn_times: tuple[TurnTimes, ...] = ()


class Sampled(msgspec.Struct, frozen=True, tag="sampled"):
    """A number of sampled tokens, of a task that cannot replay them."""

    tokens: int


Event = Piece | ToolCalled | Ended | Sampled
Write = Callable[[Event], None]
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Event).decode


class Journal(Protocol):
    """Where events are written, see `pipeline.rollout.episode_journal.EpisodeJournal`."""

    @property
    def is_open(self) -> bool: ...
    def entries(self, position: int) -> Mapping[tuple[int, int], bytes]: ...
    def add(self, position: int, sample: int, number: int, event: bytes) -> None: ...
    def drop(self, position: int, sample: int = -1) -> None: ...


class TurnRecord:
    """The record of one turn: `begun` is what is recorded of it already."""

    def __init__(self, begun: Completion | None, known: int, add: Callable[[int, int, Completion], None]) -> None:
        self.begun, self._known, self._add = begun, known, add
        self._start = len(begun.tokens) if begun else 0
        if begun is not None:
            self._known = len(begun.routed_experts)

    def add(self, piece: Completion) -> None:
        """Record the turn's next response."""
        if piece.tokens:
            self._add(self._start, self._known, piece)
            self._start, self._known = self._start + len(piece.tokens), len(piece.routed_experts)


class EpisodeRecord:
    """The record of one sample."""

    def __init__(self, events: Sequence[Event] = (), write: Write = lambda event: None, replays: bool = False) -> None:
        """`events` that an earlier actor wrote; `write` records further ones."""
        self._write, self._replays = write, replays
        self.ended = next((event for event in events if isinstance(event, Ended)), None)
        self.reused = 0 if self.ended is None else sampled_tokens([self.ended])
        self._turns, self._results = (
            defaultdict[bytes, deque[list[Piece]]](deque),
            defaultdict[bytes, deque[ToolCalled]](deque),
        )
        by_number: dict[int, list[Piece]] = {}
        for event in events:
            if isinstance(event, Piece):
                if event.turn not in by_number:
                    self._turns[event.input].append(by_number.setdefault(event.turn, []))
                by_number[event.turn].append(event)
            elif isinstance(event, ToolCalled):
                self._results[event.call].append(event)
        self._next_turn = max(by_number, default=-1) + 1

    def turn(self, tokens: Sequence[int], known: tuple[bytes, ...] = (), max_tokens: int | None = None) -> TurnRecord:
        """The record of the next turn after `tokens`, whose first ones have the `known` routed experts."""
        digest = _digest_of_tokens(tokens, max_tokens) if self._replays else b""
        recorded = self._turns[digest].popleft() if self._turns[digest] else []
        begun = _joined(recorded, known)
        if begun is not None:
            self.reused += len(begun.tokens)
        number = recorded[0].turn if begun is not None else self._next_turn
        self._next_turn += begun is None

        def add(start: int, known_before: int, piece: Completion) -> None:
            if not self._replays:
                self._write(Sampled(len(piece.tokens)))
                return
            own = replace(piece, routed_experts=piece.routed_experts[known_before:])
            self._write(Piece(number, digest, start, known_before, own))

        return TurnRecord(begun, len(known), add)

    def result(self, name: str, arguments: Any) -> ToolCalled | None:
        """The recorded result of the next call of a tool with these arguments."""
        results = self._results[_digest_of_call(name, arguments)] if self._replays else None
        return results.popleft() if results else None

    def add_result(self, name: str, arguments: Any, result: ToolResult | str) -> ToolCalled:
        """Record the result of a tool, or the reason of its failure."""
        failed = isinstance(result, str)
        call = _digest_of_call(name, arguments) if self._replays else b""
        called = ToolCalled(call, result if isinstance(result, str) else result.text, failed)
        if self._replays:
            self._write(called)
        return called

    def end(self, episode: Episode, seconds: float, turn_times: tuple[TurnTimes, ...] = ()) -> None:
        """Record an episode that has ended; of a task that can replay, its turns are recorded already."""
        if not self._replays:
            self._write(Ended(episode, seconds, turn_times))


class GroupRecord:
    """The records of a group's samples.

    `reused` and `resampled` count recorded tokens: those that the samples have, and those that are sampled again.
    """

    def __init__(self, position: int, journal: Journal, size: int, oldest: int = 0, stale: Stale = "refuse") -> None:
        """`oldest`: the oldest policy version whose tokens can be trained; `stale`: see `is_usable`."""
        self._position, self._journal, self._size = position, journal, size
        self._oldest, self._stale = oldest, stale
        self._recorded = 0
        self.samples: list[EpisodeRecord] = []

    @property
    def reused(self) -> int:
        return sum(sample.reused for sample in self.samples)

    @property
    def resampled(self) -> int:
        return self._recorded - self.reused

    def begin(self, replays: bool) -> list[EpisodeRecord]:
        """The record of each sample. `replays`: whether the task can replay an episode of this prompt."""
        replays &= self._journal.is_open
        entries: dict[int, dict[int, bytes]] = {}
        for (sample, number), event in self._journal.entries(self._position).items():
            entries.setdefault(sample, {})[number] = event
        earlier = {sample: self._decoded(sample, events) for sample, events in entries.items()}
        self.samples = [self._sample(index, earlier.get(index, {}), replays) for index in range(self._size)]
        return self.samples

    def _decoded(self, index: int, entries: dict[int, bytes]) -> dict[int, Event]:
        """The events of a sample; none if one of them cannot be read, and the sample then begins again."""
        try:
            return {number: _decode(entry) for number, entry in entries.items()}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            where = f"sample {index} of position {self._position}"
            log.warning("%s is sampled again, since its recorded episode cannot be read: %s", where, error)
            self._journal.drop(self._position, index)
            return {}

    def _sample(self, index: int, events: dict[int, Event], replays: bool) -> EpisodeRecord:
        recorded = list(events.values())
        self._recorded += sampled_tokens(recorded)
        has_ended = any(isinstance(event, Ended) for event in recorded)
        if recorded and not ((has_ended or replays) and self._is_usable(recorded)):
            self._journal.drop(self._position, index)
            recorded, events = [], {}
        return EpisodeRecord(recorded, self._writer(index, max(events, default=-1) + 1), replays)

    def _is_usable(self, events: Sequence[Event]) -> bool:
        sources = [
            event.episode if isinstance(event, Ended) else event.completion
            for event in events
            if isinstance(event, Ended | Piece)
        ]
        oldest = min((source.version_min for source in sources), default=self._oldest)
        newest = max((source.version_max for source in sources), default=self._oldest)
        return is_usable(oldest, newest, self._oldest, self._stale)

    def _writer(self, index: int, number: int) -> Write:
        if not self._journal.is_open:
            return lambda event: None

        def write(event: Event) -> None:
            nonlocal number
            try:
                data = _encode(event)
            except (TypeError, ValueError, OverflowError):
                return  # a task's messages may hold objects that have no form outside of this process
            self._journal.add(self._position, index, number, data)
            number += 1

        return write


def sampled_tokens(events: Sequence[Event]) -> int:
    """The number of sampled tokens in the events of a sample."""
    for event in events:
        if isinstance(event, Ended):
            episode = event.episode
            return sum(episode.sampled) + sum(sum(branch.sampled) for branch in episode.branches)
    counts = (
        len(e.completion.tokens) if isinstance(e, Piece) else e.tokens for e in events if isinstance(e, Piece | Sampled)
    )
    return sum(counts)


def _joined(pieces: Sequence[Piece], known: tuple[bytes, ...]) -> Completion | None:
    """The recorded part of a turn, up to the first missing piece; None if nothing is recorded."""
    whole: Completion | None = None
    for piece in pieces:
        records = known if whole is None else whole.routed_experts
        if piece.start != (len(whole.tokens) if whole else 0) or piece.known > len(records):
            continue  # an entry before it is missing
        routed = (*records[: piece.known], *piece.completion.routed_experts)
        part = replace(piece.completion, routed_experts=routed)
        whole = part if whole is None else whole.followed_by(part)
    return whole


def _digest_of_tokens(tokens: Sequence[int], max_tokens: int | None) -> bytes:
    data = np.asarray(tokens, dtype="<i4").tobytes()
    return blake2b(data, digest_size=DIGEST_BYTES, key=str(max_tokens or "").encode()).digest()


def _digest_of_call(name: str, arguments: Any) -> bytes:
    text = json.dumps([name, arguments], sort_keys=True, default=repr)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
