"""The policy, as the rollouts of one prompt see it.

Owns the requests of a task's episodes to the servers. Promises that waiting for the servers never costs a sample,
however long; that the rollouts of a group share one request for their first turn, unless some may be abandoned; and
that what is recorded of a turn (`pipeline.rollout.episode_record`) is not requested.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pipeline.environments import Message, Prompt, Turn
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.task_calls import TaskCalls
from pipeline.environments.tool_call_syntax import ToolCallSyntax
from pipeline.errors import RolloutError
from pipeline.rollout.agent_endpoint.episode_endpoint import LOOPBACK, Endpoint
from pipeline.rollout.episode_record import EpisodeRecord, TurnRecord
from pipeline.rollout.pausable_timeout import PausableTimeout
from pipeline.rollout.routed_experts import known_records
from pipeline.rollout.server_client import Completion
from pipeline.rollout.server_pool import InferenceClient
from pipeline.rollout.turn_timer import TurnTimer

MAX_IDS = 1 << 31
"""Upper bound of token ids in a record, used when a model's config does not name the vocabulary size."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters and limits.

    Attributes:
        temperature: 0 is greedy.
        max_tokens: limit of a turn in tokens.
        max_length: limit of an episode in tokens.
        seconds: limit of the task's own time in an episode; 0: none.
        top_p, top_k: truncation of the sampled distribution; top_k 0: all tokens.
    """

    temperature: float
    max_tokens: int
    max_length: int
    seconds: float
    top_p: float = 1.0
    top_k: int = 0


class Sampler:
    """Samples turns for the rollouts of one prompt."""

    def __init__(
        self,
        servers: InferenceClient,
        calls: TaskCalls,
        chat: ChatTokenizer,
        sampling: Sampling,
        prompt: Sequence[int],
        records: Sequence[EpisodeRecord],
        shares: bool,
    ) -> None:
        """`records` of the rollouts; `shares`: whether one request samples the first turns of all."""
        self._servers, self.calls, self._chat, self.sampling = servers, calls, chat, sampling
        self.vocabulary = chat.vocabulary or MAX_IDS
        self._prompt, self.records, self._shares = prompt, records, shares
        self._openings = {index: record.turn(prompt) for index, record in enumerate(records) if record.ended is None}
        self._opening: asyncio.Task[Mapping[int, Turn]] | None = None

    def policy(self, index: int, own_time: PausableTimeout) -> "RolloutPolicy":
        """The policy of rollout `index`. Sampling pauses the task's `own_time`."""
        return RolloutPolicy(self, self._chat, self._prompt, index, own_time)

    async def opening(self, index: int) -> Turn:
        """The first turn of rollout `index`. If the rollouts share a request, cancelling one does not cancel it."""
        if not self._shares:
            return (await self.turns(self._prompt, [self._openings[index]]))[0]
        if self._opening is None:
            self._opening = asyncio.create_task(self._all_openings())
        return (await asyncio.shield(self._opening))[index]

    async def _all_openings(self) -> Mapping[int, Turn]:
        turns = await self.turns(self._prompt, list(self._openings.values()))
        return dict(zip(self._openings, turns, strict=True))

    async def turns(
        self,
        tokens: Sequence[int],
        records: Sequence[TurnRecord],
        max_tokens: int | None = None,
        known: tuple[bytes, ...] = (),
        cached_on: str = "",
        cached_at: int | None = None,
        earlier: Sequence[int] = (),
        computed_at: int | None = None,
    ) -> list[Turn]:
        """A turn after `tokens` for each of the `records`, of at most `max_tokens` if that is below the run's limit.

        The first tokens have the `known` routed experts. For the others see `InferenceClient.generate`. One request
        samples all turns without a record.
        """
        new = [record for record in records if record.begun is None]
        requests = [*([new] if new else []), *([record] for record in records if record.begun is not None)]
        sampled = await asyncio.gather(
            *(
                self._generate(tokens, part, max_tokens, known, cached_on, cached_at, earlier, computed_at)
                for part in requests
            )
        )
        by_record = dict(zip(chain(*requests), chain(*sampled), strict=True))
        return [by_record[record] for record in records]

    def close(self) -> None:
        """Cancel the shared request, which no rollout awaits any more."""
        if self._opening is not None:
            self._opening.cancel()

    async def _generate(
        self,
        tokens: Sequence[int],
        records: Sequence[TurnRecord],
        max_tokens: int | None,
        known: tuple[bytes, ...],
        cached_on: str,
        cached_at: int | None,
        earlier: Sequence[int],
        computed_at: int | None,
    ) -> Sequence[Turn]:
        """The turns of one request; only a single one may have begun."""
        sampling, begun = self.sampling, records[0].begun
        if begun is not None and begun.complete:
            return [begun]
        remaining = sampling.max_length - len(tokens)
        if remaining < 1:
            raise RolloutError(f"{len(tokens)} tokens leave no room below model.max_length={sampling.max_length}")
        return await self._servers.generate(
            tokens,
            n=len(records),
            temperature=sampling.temperature,
            max_tokens=min(sampling.max_tokens, remaining, max_tokens or remaining),
            stop_token_ids=self._chat.stop_token_ids,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            known=known,
            begun=begun,
            cached_on=cached_on,
            cached_at=cached_at,
            earlier=earlier,
            computed_at=computed_at,
            note=lambda index, piece: records[index].add(piece),
        )


class RolloutPolicy:
    """The `Policy` of one rollout."""

    def __init__(
        self, sampler: Sampler, chat: ChatTokenizer, prompt: Sequence[int], index: int, own_time: PausableTimeout
    ) -> None:
        self._sampler, self._chat, self._index, self._own_time = sampler, chat, index, own_time
        self._record = sampler.records[index]
        self._opened = False
        self._earlier: tuple[tuple[int, ...], tuple[bytes, ...]] = (), ()
        self._conversation: tuple[int, ...] = ()  # the last turn with its input
        self._server = ""  # of the last turn: it has the conversation in its prefix cache
        self._first_version: int | None = None  # of the first turn, under which the conversation is cached
        self._last_version: int | None = None
        self.timer = TurnTimer()
        self.prompt = prompt

    async def sample(self, tokens: Sequence[int]) -> Turn:
        """The next turn after `tokens`."""
        if self._opened or list(tokens) != list(self.prompt):
            return (await self._sample_turns(tokens, 1, None))[0]
        self._opened, began = True, self.timer.now
        with self._own_time.pause():
            turn = await self._sampler.opening(self._index)
        self._note(tokens, [turn], began)
        return turn

    def endpoint(self, form: ToolCallSyntax = "tagged", address: str = LOOPBACK) -> Endpoint:
        return Endpoint(self._chat, self._sample_turns, self._sampler.sampling.max_length, form, address)

    async def _sample_turns(self, tokens: Sequence[int], n: int, max_tokens: int | None) -> Sequence[Turn]:
        known, began = self._known(tokens), self.timer.now
        records = [self._record.turn(tokens, known, max_tokens) for _ in range(n)]
        with self._own_time.pause():
            cached = self._server, self._first_version, self._conversation, self._last_version
            turns = await self._sampler.turns(tokens, records, max_tokens, known, *cached)
        self._note(tokens, turns, began)
        return turns

    def _known(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """The routed experts of the first tokens, if they are those of the previous turn and its input."""
        return known_records(tokens, *self._earlier)

    def _note(self, tokens: Sequence[int], turns: Sequence[Turn], began: float) -> None:
        for turn in turns:
            engine = turn.engine_seconds if isinstance(turn, Completion) else None
            self.timer.add(len(tokens), turn.tokens, turn.server, began, engine)
        turn = turns[0]
        self._server, self._last_version = turn.server, turn.version_min
        self._conversation = (*tokens, *turn.tokens)
        if self._first_version is None:
            self._first_version = turn.version_min
        if turn.routed_experts:
            self._earlier = self._conversation, tuple(turn.routed_experts)

    def remaining_tokens(self, tokens: Sequence[int]) -> int:
        return max(0, self._sampler.sampling.max_length - len(tokens))

    def encode(self, text: str) -> list[int]:
        return self._chat.encode(text)

    def encode_observation(
        self, prompt: Prompt, history: Sequence[Message], new_messages: Sequence[Message]
    ) -> list[int]:
        return self._chat.encode_observation([*prompt.messages, *history[:-1]], new_messages, prompt.tools)

    async def use(self, prompt: Prompt, name: str, arguments: Any) -> str:
        recorded = self._record.result(name, arguments)
        if recorded is None:
            # The pool has a separate deadline, and its queue is not the task's time.
            with self._own_time.pause(), self.timer.tool():
                # The shield lets the call of an abandoned sample end by itself: cancelling it would kill the worker.
                result = await asyncio.shield(self._sampler.calls.use(prompt, name, arguments))
            recorded = self._record.add_result(name, arguments, result)
        if recorded.failed:
            raise RolloutError(recorded.text)
        return recorded.text

    async def run(self, prompt: Prompt, name: str, arguments: Any) -> str:
        with self._own_time.pause():
            result = await self._sampler.calls.run(prompt, name, arguments, self._own_time.resume())
        if isinstance(result, str):
            raise RolloutError(result)
        return result.text

    def decode(self, tokens: Sequence[int]) -> str:
        return self._chat.decode(tokens)
