"""One rollout of a prompt.

Owns how an episode of a task meets the servers: the policy that the task samples from, and what becomes of an
episode: a reward and a wire record, or a reason. Promises that a task which raises, returns nonsense or overruns costs
one sample, with its reason, and nothing else; that no wait for the servers, however long, costs a sample; that the
rollouts of a group share one request for their first turn, unless some of them may be abandoned; and that one which is
abandoned is ended at once, on its server too.
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
from pipeline.rollout.gateway.episode_endpoint import LOOPBACK, Endpoint
from pipeline.rollout.pausable_timeout import PausableTimeout
from pipeline.rollout.server_pool import InferenceClient
from pipeline.transport.sample_records import MAX_VERSION_OFFSET, Branch, Sample

LONG_PROMPT = 2000
"""Characters that take longer to tokenise than to hand to a thread."""
CLEAN_UP_SECONDS = 5.0
"""For what a task still does in a sample that is abandoned; after that its group no longer waits for it."""
MAX_IDS = 1 << 31
"""Token ids that a record can hold: the bound where a model's config does not say its vocabulary."""


@dataclass(frozen=True)
class Sampling:
    """How to sample: temperature 0 is greedy. Most tokens of a turn; most tokens of an episode, and most `seconds` that
    the task takes for itself in it, 0 for no bound. `top_p` and `top_k` (0: all) bound what is sampled from."""

    temperature: float
    max_tokens: int
    max_length: int
    seconds: float
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class Rollout:
    """A rollout's end: its `episode`, or the `failure_reason` why there is none, or that it was `abandoned`; and the
    `seconds` that it took, or ran until then."""

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
        """The policy of rollout `index`, which stops the task's `own_time` while it is asked."""
        return RolloutPolicy(self, self._chat, self._prompt, index, own_time)

    async def opening(self, index: int) -> Turn:
        """The first turn of rollout `index`. One request brings those of all; who asks alone ends it with itself."""
        if self._count == 1:
            return await self.continuation(self._prompt)
        if self._opening is None:
            self._opening = asyncio.create_task(self._generate(self._prompt, self._count))
        turns = await asyncio.shield(self._opening)
        return turns[index]

    async def continuation(self, tokens: Sequence[int]) -> Turn:
        """A turn after `tokens`."""
        return (await self._generate(tokens, 1))[0]

    async def continuations(self, tokens: Sequence[int], n: int, max_tokens: int | None) -> Sequence[Turn]:
        """`n` turns after `tokens`, of at most `max_tokens` if that is less than the run allows."""
        return await self._generate(tokens, n, max_tokens)

    def close(self) -> None:
        """Give up a request that nobody waits for."""
        if self._opening is not None:
            self._opening.cancel()

    async def _generate(self, tokens: Sequence[int], n: int, max_tokens: int | None = None) -> Sequence[Turn]:
        sampling = self.sampling
        room = sampling.max_length - len(tokens)
        if room < 1:
            raise RolloutError(f"{len(tokens)} tokens leave no room below model.max_length={sampling.max_length}")
        return await self._servers.generate(
            tokens,
            n=n,
            temperature=sampling.temperature,
            max_tokens=min(sampling.max_tokens, room, max_tokens or room),
            stop_token_ids=self._chat.stop_token_ids,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )


class RolloutPolicy:
    """The `Policy` of one rollout."""

    def __init__(
        self, sampler: Sampler, chat: ChatTokenizer, prompt: Sequence[int], index: int, own_time: PausableTimeout
    ) -> None:
        self._sampler, self._chat, self._index, self._own_time = sampler, chat, index, own_time
        self._opened = False
        self.prompt = prompt

    async def sample(self, tokens: Sequence[int]) -> Turn:
        """The next turn after `tokens`."""
        with self._own_time.pause():
            if not self._opened and list(tokens) == list(self.prompt):
                self._opened = True
                return await self._sampler.opening(self._index)
            return await self._sampler.continuation(tokens)

    def endpoint(self, form: ToolCallSyntax = "tagged", address: str = LOOPBACK) -> Endpoint:
        return Endpoint(self._chat, self._asked, self._sampler.sampling.max_length, form, address)

    async def _asked(self, tokens: Sequence[int], n: int, max_tokens: int | None) -> Sequence[Turn]:
        with self._own_time.pause():
            return await self._sampler.continuations(tokens, n, max_tokens)

    def remaining_tokens(self, tokens: Sequence[int]) -> int:
        return max(0, self._sampler.sampling.max_length - len(tokens))

    def encode(self, text: str) -> list[int]:
        return self._chat.encode(text)

    def encode_observation(
        self, prompt: Prompt, history: Sequence[Message], new_messages: Sequence[Message]
    ) -> list[int]:
        return self._chat.encode_observation([*prompt.messages, *history[:-1]], new_messages, prompt.tools)

    async def use(self, prompt: Prompt, name: str, arguments: Any) -> str:
        with self._own_time.pause():  # the pool has a deadline of its own, and others may be before us there
            # An abandoned sample leaves its call to end by itself: a worker whose call is cancelled would be killed.
            used = await asyncio.shield(self._sampler.calls.use(prompt, name, arguments))
        if isinstance(used, str):
            raise RolloutError(used)
        return used.text

    async def run(self, prompt: Prompt, name: str, arguments: Any) -> str:
        with self._own_time.pause():
            used = await self._sampler.calls.run(prompt, name, arguments, self._own_time.resume())
        if isinstance(used, str):
            raise RolloutError(used)
        return used.text

    def decode(self, tokens: Sequence[int]) -> str:
        return self._chat.decode(tokens)


async def roll_out(
    task: Task,
    calls: TaskCalls,
    chat: ChatTokenizer,
    servers: InferenceClient,
    sampling: Sampling,
    asked: RenderedPrompt,
    count: int,
    extra: int = 0,
) -> list[Rollout]:
    """`count` rollouts of a prompt, all at once; one `Rollout` each, in order. Their tools are asked by `calls`.

    With `extra`, as many more are begun, and told of; once `count` have an episode, the others are abandoned.
    """
    try:
        tokens = await _tokens(chat, asked.text)
    except Exception as error:  # noqa: BLE001 a task's text meets a model's tokenizer: whatever they raise is the reason
        return [Rollout(reason=failure_reason("prompt could not be tokenised", error))] * count
    # The answer to a shared request comes when its longest sample has ended, so who may be abandoned asks alone.
    sampler = Sampler(servers, calls, chat, sampling, tokens, 1 if extra else count)
    try:
        episodes = [_episode(task, asked.prompt, sampler, index) for index in range(count + extra)]
        return await (_first(episodes, count) if extra else asyncio.gather(*episodes))
    finally:
        sampler.close()


async def _first(episodes: Sequence[Coroutine[Any, Any, Rollout]], count: int) -> list[Rollout]:
    """What each came to, in order: the first `count` that end with an episode, all that end without one before that,
    and the others abandoned."""
    began = time.monotonic()
    tasks = [asyncio.create_task(episode) for episode in episodes]
    running, ended, whole = set(tasks), dict[asyncio.Task[Rollout], Rollout](), 0
    try:
        while running and whole < count:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=tasks.index):
                if whole < count or task.result().episode is None:
                    ended[task] = task.result()
                    whole += ended[task].episode is not None
    finally:
        left = Rollout(seconds=time.monotonic() - began, abandoned=True)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CLEAN_UP_SECONDS)
    return [ended.get(task, left) for task in tasks]


async def _tokens(chat: ChatTokenizer, text: str) -> list[int]:
    """The tokens of a prompt; of a long one in a thread, for the event loop is not to wait for it."""
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
    except Exception as error:  # noqa: BLE001 the task is foreign code: whatever it raises is this sample's reason
        return Rollout(reason=failure_reason("rollout raised", error))
    wrong = _unusable(episode, sampler.sampling.max_length, sampler.vocabulary)
    return Rollout(reason=wrong) if wrong else Rollout(episode, seconds=time.monotonic() - started)


def _unusable(episode: Any, max_length: int, vocabulary: int) -> str:
    """Why an episode cannot be trained; empty if it can."""
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
    """The part of a reason that is counted: without the detail behind its first colon."""
    return reason.partition(":")[0]


def completion_of(episode: Episode, whole: bool = True) -> Completion:
    """An episode as rewards see it; what is not `whole` has the last turn alone, which is all that a task reads."""
    if not whole:
        return Completion(episode.text, reward=episode.reward)
    said = episode.conversation or ({"role": "assistant", "content": episode.text},)
    tokens = list(compress(episode.tokens, episode.sampled))
    for branch in episode.branches:
        tokens += compress(branch.tokens, branch.sampled)
    return Completion(episode.text, said, tuple(tokens), episode.reward)


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
    )


def _branch(branch: EpisodeBranch, oldest: int) -> Branch:
    tokens, sampled, logprobs = _bytes(branch)
    newer = _version_offsets(branch, oldest)
    return Branch(
        of=branch.of, shared=branch.shared, tokens=tokens, sampled=sampled, logprobs=logprobs, version_offsets=newer
    )


def _bytes(row: Episode | EpisodeBranch) -> tuple[bytes, bytes, bytes]:
    """Tokens, sampled and log-probabilities, as they travel."""
    arrays = zip((row.tokens, row.sampled, row.logprobs), ("<i4", "<u1", "<f4"), strict=True)
    tokens, sampled, logprobs = (np.asarray(values, dtype=kind).tobytes() for values, kind in arrays)
    return tokens, sampled, logprobs


def _version_offsets(row: Episode | EpisodeBranch, oldest: int) -> bytes:
    """`Sample.version_offsets` of a row, where `oldest` is the sample's `version_min`."""
    if len(row.versions) != len(row.tokens):
        return b""
    newer = (np.asarray(row.versions) - oldest).clip(0, MAX_VERSION_OFFSET)
    return newer.astype("<u1").tobytes() if newer.any() else b""
