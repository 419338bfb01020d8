"""One rollout of a prompt.

Owns the connection of a task's episode with the servers: the policy that the task samples from, and the conversion of
an episode to a reward and a wire record, or to a failure reason. Promises that a task which raises, returns nonsense or
exceeds its time costs one sample, with its reason, and nothing else; that waiting for the servers never costs a sample,
however long; that the rollouts of a group share one request for their first turn, unless some may be abandoned; and
that an abandoned rollout is cancelled at once, also on its server.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import numpy as np

from pipeline.environments import Completion, Episode, Message, Prompt, Task, Turn
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.episode import EpisodeBranch
from pipeline.environments.guarded_call import REASON_LENGTH, failure_reason
from pipeline.environments.rewards import Score
from pipeline.environments.task_calls import RenderedPrompt, TaskCalls
from pipeline.environments.tool_call_syntax import ToolCallSyntax
from pipeline.errors import DeadlineError, EpisodeError, RolloutError
from pipeline.rollout.agent_endpoint.episode_endpoint import LOOPBACK, Endpoint
from pipeline.rollout.pausable_timeout import PausableTimeout
from pipeline.rollout.routed_experts import known_records
from pipeline.rollout.server_pool import InferenceClient
from pipeline.transport.sample_records import MAX_VERSION_OFFSET, Branch, Sample

LONG_PROMPT = 2000
"""Characters of a prompt above which tokenizing takes longer than the hand-over to a thread."""
CLEAN_UP_SECONDS = 5.0
"""Timeout of a task's clean-up after its sample is abandoned; after that the group no longer waits for it."""
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


@dataclass(frozen=True)
class Rollout:
    """The result of a rollout: its `episode`, or the failure `reason`, or that it was `abandoned`; and the `seconds`
    that it ran."""

    episode: Episode | None = None
    reason: str = ""
    seconds: float = 0.0
    abandoned: bool = False


class Sampler:
    """Samples turns for the rollouts of one prompt."""

    def __init__(
        self,
        servers: InferenceClient,
        calls: TaskCalls,
        chat: ChatTokenizer,
        sampling: Sampling,
        prompt: Sequence[int],
        count: int,
    ) -> None:
        self._servers, self.calls, self._chat, self.sampling = servers, calls, chat, sampling
        self.vocabulary = chat.vocabulary or MAX_IDS
        self._prompt, self._count = prompt, count
        self._opening: asyncio.Task[Sequence[Turn]] | None = None

    def policy(self, index: int, own_time: PausableTimeout) -> "RolloutPolicy":
        """The policy of rollout `index`. Sampling pauses the task's `own_time`."""
        return RolloutPolicy(self, self._chat, self._prompt, index, own_time)

    async def opening(self, index: int) -> Turn:
        """The first turn of rollout `index`. One request samples it for all rollouts; with a single rollout, cancelling
        the rollout also cancels the request."""
        if self._count == 1:
            return await self.continuation(self._prompt)
        if self._opening is None:
            self._opening = asyncio.create_task(self._generate(self._prompt, self._count))
        turns = await asyncio.shield(self._opening)
        return turns[index]

    async def continuation(self, tokens: Sequence[int], known: tuple[bytes, ...] = ()) -> Turn:
        """One turn after `tokens`, whose first ones have the `known` routed experts."""
        return (await self._generate(tokens, 1, known=known))[0]

    async def continuations(
        self, tokens: Sequence[int], n: int, max_tokens: int | None, known: tuple[bytes, ...] = ()
    ) -> Sequence[Turn]:
        """`n` turns after `tokens`, of at most `max_tokens` if that is below the run's limit; `known`: see
        `continuation`."""
        return await self._generate(tokens, n, max_tokens, known)

    def close(self) -> None:
        """Cancel the shared request, which no rollout awaits any more."""
        if self._opening is not None:
            self._opening.cancel()

    async def _generate(
        self, tokens: Sequence[int], n: int, max_tokens: int | None = None, known: tuple[bytes, ...] = ()
    ) -> Sequence[Turn]:
        sampling = self.sampling
        remaining = sampling.max_length - len(tokens)
        if remaining < 1:
            raise RolloutError(f"{len(tokens)} tokens leave no room below model.max_length={sampling.max_length}")
        return await self._servers.generate(
            tokens,
            n=n,
            temperature=sampling.temperature,
            max_tokens=min(sampling.max_tokens, remaining, max_tokens or remaining),
            stop_token_ids=self._chat.stop_token_ids,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            known=known,
        )


class RolloutPolicy:
    """The `Policy` of one rollout."""

    def __init__(
        self, sampler: Sampler, chat: ChatTokenizer, prompt: Sequence[int], index: int, own_time: PausableTimeout
    ) -> None:
        self._sampler, self._chat, self._index, self._own_time = sampler, chat, index, own_time
        self._opened = False
        self._earlier: tuple[tuple[int, ...], tuple[bytes, ...]] = (), ()
        self.prompt = prompt

    async def sample(self, tokens: Sequence[int]) -> Turn:
        """The next turn after `tokens`."""
        with self._own_time.pause():
            if not self._opened and list(tokens) == list(self.prompt):
                self._opened = True
                turn = await self._sampler.opening(self._index)
            else:
                turn = await self._sampler.continuation(tokens, self._known(tokens))
            self._note(tokens, turn)
            return turn

    def endpoint(self, form: ToolCallSyntax = "tagged", address: str = LOOPBACK) -> Endpoint:
        return Endpoint(self._chat, self._sample_turns, self._sampler.sampling.max_length, form, address)

    async def _sample_turns(self, tokens: Sequence[int], n: int, max_tokens: int | None) -> Sequence[Turn]:
        with self._own_time.pause():
            turns = await self._sampler.continuations(tokens, n, max_tokens, self._known(tokens))
            self._note(tokens, turns[0])
            return turns

    def _known(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """The routed experts of the first tokens, if they are those of the previous turn and its input."""
        return known_records(tokens, *self._earlier)

    def _note(self, tokens: Sequence[int], turn: Turn) -> None:
        if turn.routed_experts:
            self._earlier = (*tokens, *turn.tokens), tuple(turn.routed_experts)

    def remaining_tokens(self, tokens: Sequence[int]) -> int:
        return max(0, self._sampler.sampling.max_length - len(tokens))

    def encode(self, text: str) -> list[int]:
        return self._chat.encode(text)

    def encode_observation(
        self, prompt: Prompt, history: Sequence[Message], new_messages: Sequence[Message]
    ) -> list[int]:
        return self._chat.encode_observation([*prompt.messages, *history[:-1]], new_messages, prompt.tools)

    async def use(self, prompt: Prompt, name: str, arguments: Any) -> str:
        with self._own_time.pause():  # the pool has a separate deadline, and its queue is not the task's time
            # The shield lets the call of an abandoned sample end by itself: cancelling it would kill the worker.
            result = await asyncio.shield(self._sampler.calls.use(prompt, name, arguments))
        if isinstance(result, str):
            raise RolloutError(result)
        return result.text

    async def run(self, prompt: Prompt, name: str, arguments: Any) -> str:
        with self._own_time.pause():
            result = await self._sampler.calls.run(prompt, name, arguments, self._own_time.resume())
        if isinstance(result, str):
            raise RolloutError(result)
        return result.text

    def decode(self, tokens: Sequence[int]) -> str:
        return self._chat.decode(tokens)


async def roll_out(
    task: Task,
    calls: TaskCalls,
    chat: ChatTokenizer,
    servers: InferenceClient,
    sampling: Sampling,
    rendered: RenderedPrompt,
    count: int,
    extra: int = 0,
) -> list[Rollout]:
    """`count` concurrent rollouts of a prompt, as one `Rollout` each, in order. `calls` executes their tools.

    With `extra`, that many more are started and reported. Once `count` have an episode, the others are abandoned.
    """
    try:
        tokens = await _tokens(chat, rendered.text)
    except Exception as error:  # noqa: BLE001 a tokenizer may fail on a task's text: any error is the reason
        return [Rollout(reason=failure_reason("prompt could not be tokenised", error))] * count
    # A shared request completes with its longest sample, so rollouts that may be abandoned use separate requests.
    sampler = Sampler(servers, calls, chat, sampling, tokens, 1 if extra else count)
    try:
        episodes = [_episode(task, rendered.prompt, sampler, index) for index in range(count + extra)]
        return await (_first(episodes, count) if extra else asyncio.gather(*episodes))
    finally:
        sampler.close()


async def _first(episodes: Sequence[Coroutine[Any, Any, Rollout]], count: int) -> list[Rollout]:
    """The results in order: the first `count` that end with an episode, every failure before that, and the others as
    abandoned."""
    began = time.monotonic()
    tasks = [asyncio.create_task(episode) for episode in episodes]
    running, ended, succeeded = set(tasks), dict[asyncio.Task[Rollout], Rollout](), 0
    try:
        while running and succeeded < count:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=tasks.index):
                if succeeded < count or task.result().episode is None:
                    ended[task] = task.result()
                    succeeded += ended[task].episode is not None
    finally:
        abandoned = Rollout(seconds=time.monotonic() - began, abandoned=True)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CLEAN_UP_SECONDS)
    return [ended.get(task, abandoned) for task in tasks]


async def _tokens(chat: ChatTokenizer, text: str) -> list[int]:
    """The tokens of a prompt. A long prompt is tokenized in a thread, off the event loop."""
    return chat.encode(text) if len(text) < LONG_PROMPT else await asyncio.to_thread(chat.encode, text)


async def _episode(task: Task, prompt: Prompt, sampler: Sampler, index: int) -> Rollout:
    started = time.monotonic()
    own_time = PausableTimeout(sampler.sampling.seconds)
    try:
        episode = await own_time.limit(task.rollout(prompt, sampler.policy(index, own_time)))
    except DeadlineError as error:
        return Rollout(reason=failure_reason("rollout took too long", error))
    except EpisodeError as error:
        return Rollout(reason=" ".join(str(error).split())[:REASON_LENGTH])
    except RolloutError as error:
        return Rollout(reason=failure_reason("request refused", error))
    except Exception as error:  # noqa: BLE001 the task is foreign code: any error is this sample's reason
        return Rollout(reason=failure_reason("rollout raised", error))
    wrong = _unusable(episode, sampler.sampling.max_length, sampler.vocabulary)
    return Rollout(reason=wrong) if wrong else Rollout(episode, seconds=time.monotonic() - started)


def _unusable(episode: Any, max_length: int, vocabulary: int) -> str:
    """The reason why an episode cannot be trained; empty if it can."""
    if not isinstance(episode, Episode):
        return f"rollout returned no episode: {type(episode).__name__}"
    if not any(episode.sampled):
        return "rollout sampled nothing"
    longest = max(len(episode.tokens), *(branch.shared + len(branch.tokens) for branch in episode.branches), 0)
    if longest > max_length:
        return f"rollout too long: {longest} tokens, model.max_length={max_length}"
    every = chain(episode.tokens, *(branch.tokens for branch in episode.branches))
    foreign = next((token for token in every if not 0 <= token < vocabulary), None)
    if foreign is not None:
        return f"rollout has a foreign token: id {foreign} is outside of the vocabulary of {vocabulary} tokens"
    return ""


def failure_kind(reason: str) -> str:
    """The part of a reason before its first colon, by which failures are counted."""
    return reason.partition(":")[0]


def completion_of(episode: Episode, whole: bool = True) -> Completion:
    """An episode as rewards see it. Without `whole` only the last turn, which is all that a task's reward reads."""
    if not whole:
        return Completion(episode.text, reward=episode.reward)
    conversation = episode.conversation or ({"role": "assistant", "content": episode.text},)
    tokens = list(compress(episode.tokens, episode.sampled))
    for branch in episode.branches:
        tokens += compress(branch.tokens, branch.sampled)
    return Completion(episode.text, conversation, tuple(tokens), episode.reward)


def to_sample(episode: Episode, score: Score, seconds: float) -> Sample:
    """The wire record of an episode."""
    tokens, sampled, logprobs = _bytes(episode)
    return Sample(
        tokens=tokens,
        sampled=sampled,
        logprobs=logprobs,
        reward=score.reward,
        version_min=episode.version_min,
        version_max=episode.version_max,
        finish=episode.finish,
        turns=episode.turns,
        seconds=seconds,
        server=episode.server,
        metrics={**episode.metrics, **score.metrics},
        branches=tuple(_branch(branch, episode.version_min) for branch in episode.branches),
        version_offsets=_version_offsets(episode, episode.version_min),
        routed_experts=b"".join(episode.routed_experts),
    )


def _branch(branch: EpisodeBranch, oldest: int) -> Branch:
    tokens, sampled, logprobs = _bytes(branch)
    offsets = _version_offsets(branch, oldest)
    return Branch(
        of=branch.of,
        shared=branch.shared,
        tokens=tokens,
        sampled=sampled,
        logprobs=logprobs,
        version_offsets=offsets,
        routed_experts=b"".join(branch.routed_experts),
    )


def _bytes(row: Episode | EpisodeBranch) -> tuple[bytes, bytes, bytes]:
    """Tokens, mask and log-probabilities as little-endian bytes (int32, uint8, float32)."""
    arrays = zip((row.tokens, row.sampled, row.logprobs), ("<i4", "<u1", "<f4"), strict=True)
    tokens, sampled, logprobs = (np.asarray(values, dtype=kind).tobytes() for values, kind in arrays)
    return tokens, sampled, logprobs


def _version_offsets(row: Episode | EpisodeBranch, oldest: int) -> bytes:
    """`Sample.version_offsets` of a row, where `oldest` is the sample's `version_min`."""
    if len(row.versions) != len(row.tokens):
        return b""
    offsets = (np.asarray(row.versions) - oldest).clip(0, MAX_VERSION_OFFSET)
    return offsets.astype("<u1").tobytes() if offsets.any() else b""
