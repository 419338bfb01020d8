"""One attempt at a prompt.

Owns how an episode of a task meets the servers: the policy that the task samples from, and what becomes of an
episode: a reward and a wire record, or a reason. Promises that a task which raises, returns nonsense or overruns costs
one sample, with its reason, and nothing else; and that the attempts of a group share one request for their first turn.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import numpy as np

from pipeline.errors import DeadlineError, RolloutError
from pipeline.records import Sample
from pipeline.tasks import Episode, Prompt, Task, Turn
from pipeline.tasks.chat import Chat
from pipeline.waiting import within

REASON_LENGTH = 200


class Servers(Protocol):
    """The inference client, as far as a rollout uses it."""

    async def generate(
        self, token_ids: Sequence[int], *, n: int, temperature: float, max_tokens: int, stop_token_ids: Sequence[int]
    ) -> Sequence[Turn]:
        """`n` continuations of `token_ids`; `RolloutError` for a request that can never work."""


@dataclass(frozen=True)
class Sampling:
    """How to sample: temperature 0 is greedy. Most tokens of a turn; most tokens and seconds of an episode."""

    temperature: float
    max_tokens: int
    max_length: int
    seconds: float


@dataclass(frozen=True)
class Attempted:
    """An attempt's end: its `episode` and how long it took (seconds), or the `reason` why there is none."""

    episode: Episode | None = None
    reason: str = ""
    seconds: float = 0.0


class Sampler:
    """Samples turns for the attempts at one prompt."""

    def __init__(self, servers: Servers, chat: Chat, sampling: Sampling, prompt: Sequence[int], attempts: int) -> None:
        self._servers, self._chat, self._sampling = servers, chat, sampling
        self._prompt, self._attempts = prompt, attempts
        self._opening: asyncio.Task[Sequence[Turn]] | None = None

    async def opening(self, index: int) -> Turn:
        """The first turn of attempt `index`; one request brings those of all attempts."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._generate(self._prompt, self._attempts))
        turns = await asyncio.shield(self._opening)
        return turns[index]

    async def continuation(self, tokens: Sequence[int]) -> Turn:
        """A turn after `tokens`."""
        return (await self._generate(tokens, 1))[0]

    def close(self) -> None:
        """Give up a request that nobody waits for."""
        if self._opening is not None:
            self._opening.cancel()

    async def _generate(self, tokens: Sequence[int], n: int) -> Sequence[Turn]:
        sampling = self._sampling
        room = sampling.max_length - len(tokens)
        if room < 1:
            raise RolloutError(f"{len(tokens)} tokens leave no room below model.max_length={sampling.max_length}")
        return await self._servers.generate(
            tokens,
            n=n,
            temperature=sampling.temperature,
            max_tokens=min(sampling.max_tokens, room),
            stop_token_ids=self._chat.stop_token_ids,
        )


class AttemptPolicy:
    """The `Policy` of one attempt."""

    def __init__(self, sampler: Sampler, chat: Chat, prompt: Sequence[int], index: int) -> None:
        self._sampler, self._chat, self._index = sampler, chat, index
        self._opened = False
        self.prompt = prompt

    async def sample(self, tokens: Sequence[int]) -> Turn:
        """The next turn after `tokens`."""
        if not self._opened and list(tokens) == list(self.prompt):
            self._opened = True
            return await self._sampler.opening(self._index)
        return await self._sampler.continuation(tokens)

    def encode(self, text: str) -> list[int]:
        return self._chat.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._chat.decode(tokens)


async def attempt(
    task: Task, chat: Chat, servers: Servers, sampling: Sampling, prompt: Prompt, count: int
) -> list[Attempted]:
    """`count` attempts at a prompt, all at once; one `Attempted` each, in order."""
    try:
        tokens = chat.prompt(prompt.messages)
    except Exception as error:  # noqa: BLE001 a task's messages meet a model's template: whatever they raise is the reason
        return [Attempted(reason=reason("prompt could not be rendered", error))] * count
    sampler = Sampler(servers, chat, sampling, tokens, count)
    try:
        policies = [AttemptPolicy(sampler, chat, tokens, index) for index in range(count)]
        return await asyncio.gather(*(_episode(task, prompt, policy, sampling) for policy in policies))
    finally:
        sampler.close()


async def _episode(task: Task, prompt: Prompt, policy: AttemptPolicy, sampling: Sampling) -> Attempted:
    started = time.monotonic()
    try:
        episode = await within("an episode of the task", task.rollout(prompt, policy), sampling.seconds)
    except DeadlineError as error:
        return Attempted(reason=reason("rollout took too long", error))
    except RolloutError as error:
        return Attempted(reason=reason("request refused", error))
    except Exception as error:  # noqa: BLE001 the task is foreign code: whatever it raises is this sample's reason
        return Attempted(reason=reason("rollout raised", error))
    wrong = _unusable(episode, sampling.max_length)
    return Attempted(reason=wrong) if wrong else Attempted(episode, seconds=time.monotonic() - started)


def _unusable(episode: Any, max_length: int) -> str:
    """Why an episode cannot be trained; empty if it can."""
    if not isinstance(episode, Episode):
        return f"rollout returned no episode: {type(episode).__name__}"
    if not any(episode.sampled):
        return "rollout sampled nothing"
    if len(episode.tokens) > max_length:
        return f"rollout too long: {len(episode.tokens)} tokens, model.max_length={max_length}"
    return ""


def score(task: Task, prompt: Prompt, text: str) -> float | str:
    """The reward of a text, or the reason why it has none."""
    try:
        value: Any = task.reward(prompt, text)
    except Exception as error:  # noqa: BLE001 the task is foreign code: whatever it raises is this sample's reason
        return reason("reward raised", error)
    if not isinstance(value, Real):
        return f"reward is no number: {type(value).__name__} {value!r}"[:REASON_LENGTH]
    return float(value) if math.isfinite(value) else f"reward is not finite: {float(value)}"


def reason(what: str, error: Exception) -> str:
    """`what ErrorName: text` on one line."""
    text = " ".join(str(error).split())
    return f"{what} {type(error).__name__}: {text}"[:REASON_LENGTH]


def kind_of(reason: str) -> str:
    """The part of a reason that is counted: without the detail behind its first colon."""
    return reason.partition(":")[0]


def sample_of(episode: Episode, reward: float, seconds: float) -> Sample:
    """The wire record of an episode."""
    return Sample(
        tokens=np.asarray(episode.tokens, dtype="<i4").tobytes(),
        sampled=np.asarray(episode.sampled, dtype="<u1").tobytes(),
        logprobs=np.asarray(episode.logprobs, dtype="<f4").tobytes(),
        reward=reward,
        version_min=episode.version_min,
        version_max=episode.version_max,
        finish=episode.finish,
        turns=episode.turns,
        seconds=seconds,
        server=episode.server,
    )
