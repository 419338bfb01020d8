"""One rollout of a prompt.

Owns the run of a task's episode with a policy (`pipeline.rollout.rollout_policy`), and the conversion of
an episode to a wire record, or to a failure reason. Promises that a task which raises, returns nonsense or
exceeds its time costs one sample, with its reason, and nothing else; that an episode has a record that can be sent,
read and trained; that an abandoned rollout is cancelled at once, also on its server; and that an episode which ended
before the actor was lost is not run again.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from typing import Any

import numpy as np
from msgspec import structs

from pipeline.environments import Completion, Episode, Prompt, Task
from pipeline.environments.chat_tokenizer import LONG_TEXT, ChatTokenizer
from pipeline.environments.episode import EpisodeBranch
from pipeline.environments.guarded_call import encodable, failure_reason, is_cancelled, reason_line
from pipeline.environments.reward_functions import number
from pipeline.environments.rewards import Score
from pipeline.environments.task_calls import RenderedPrompt, TaskCalls
from pipeline.errors import DeadlineError, EpisodeError, RolloutError
from pipeline.rollout.episode_record import EpisodeRecord
from pipeline.rollout.pausable_timeout import PausableTimeout
from pipeline.rollout.rollout_policy import Sampler, Sampling
from pipeline.rollout.server_pool import InferenceClient
from pipeline.transport.record_wire import decode_record, encode_record
from pipeline.transport.sample_records import MAX_VERSION_OFFSET, Branch, Sample
from pipeline.transport.turn_times import TurnTimes

UNSCORED = Score(0.0)


@dataclass(frozen=True)
class Rollout:
    """The result of a rollout: its `episode` with the `sample` of it, which has no reward yet; or the failure `reason`;
    or that it was `abandoned`. `seconds`: the time that it ran."""

    episode: Episode | None = None
    sample: Sample | None = None
    reason: str = ""
    seconds: float = 0.0
    abandoned: bool = False

    def scored(self, score: Score | str) -> Sample | str:
        """The sample with its reward; or the reason why there is none."""
        if isinstance(score, str):
            return score
        if self.sample is None:
            return self.reason
        metrics = {**self.sample.metrics, **score.metrics}
        return structs.replace(self.sample, reward=score.reward, metrics=metrics)


async def roll_out(
    task: Task,
    calls: TaskCalls,
    chat: ChatTokenizer,
    servers: InferenceClient,
    sampling: Sampling,
    rendered: RenderedPrompt,
    count: int,
    extra: int = 0,
    records: Sequence[EpisodeRecord] = (),
) -> list[Rollout]:
    """`count` concurrent rollouts of a prompt, as one `Rollout` each, in order. `calls` executes their tools.

    `records` has the record of each rollout; by default nothing is recorded.

    With `extra`, that many more are started and reported. Once `count` have an episode, the others are abandoned.
    """
    try:
        tokens = await _tokens(chat, rendered.text)
    except Exception as error:  # noqa: BLE001 a tokenizer may fail on a task's text: any error is the reason
        return [Rollout(reason=failure_reason("prompt could not be tokenised", error))] * count
    # A shared request completes with its longest sample, so rollouts that may be abandoned use separate requests.
    shares = count > 1 and not extra
    records = records or [EpisodeRecord() for _ in range(count + extra)]
    sampler = Sampler(servers, calls, chat, sampling, tokens, records, shares)
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
            await asyncio.wait(running)  # each ends within `CLEAN_UP_SECONDS` (`PausableTimeout.limit`)
    return [ended.get(task, abandoned) for task in tasks]


async def _tokens(chat: ChatTokenizer, text: str) -> list[int]:
    """The tokens of a prompt. A long prompt is tokenized in a thread, off the event loop."""
    return chat.encode(text) if len(text) < LONG_TEXT else await asyncio.to_thread(chat.encode, text)


async def _episode(task: Task, prompt: Prompt, sampler: Sampler, index: int) -> Rollout:
    started, record = time.monotonic(), sampler.records[index]
    if (ended := record.ended) is not None:
        return _recorded(ended.episode, sampler, ended.seconds, lambda _: ended.turn_times)
    own_time = PausableTimeout(sampler.sampling.seconds)
    policy = sampler.policy(index, own_time)
    try:
        episode = await own_time.limit(task.rollout(prompt, policy))
    except DeadlineError as error:
        return Rollout(reason=failure_reason("rollout took too long", error))
    except EpisodeError as error:
        return Rollout(reason=reason_line(str(error)))
    except RolloutError as error:
        return Rollout(reason=failure_reason("request refused", error))
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        # The task is foreign code: any error is its sample's reason, also the `CancelledError` of a future that it
        # awaits. If that passed, it would end the work on the whole group, whose position would never be issued again.
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        return Rollout(reason=failure_reason("rollout raised", error))
    rollout = _recorded(episode, sampler, time.monotonic() - started, policy.timer.turns_of)
    if rollout.episode is not None and rollout.sample is not None:
        record.end(rollout.episode, rollout.seconds, rollout.sample.turn_times)
    return rollout


def _recorded(
    episode: Any, sampler: Sampler, seconds: float, turns_of: Callable[[Episode], tuple[TurnTimes, ...]]
) -> Rollout:
    """The rollout of an episode, which is a task's: of any types and values. Its sample is encoded and decoded once,
    since a record that its readers cannot decode would be lost with its whole group."""
    try:
        if wrong := _unusable(episode, sampler.sampling.max_length, sampler.vocabulary):
            return Rollout(reason=reason_line(wrong))
        episode = replace(episode, metrics=_numbers(episode.metrics))
        sample = to_sample(episode, UNSCORED, seconds, turns_of(episode))
        # Bytes need no check, and those of routed experts are long.
        decode_record(encode_record(structs.replace(sample, routed_experts=b"")), Sample).check()
    except EpisodeError as error:
        return Rollout(reason=reason_line(str(error)))
    except Exception as error:  # noqa: BLE001 the episode is foreign data: any error is the sample's reason
        return Rollout(reason=failure_reason("rollout cannot be recorded", error))
    return Rollout(episode, sample, seconds=seconds)


def _numbers(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """The metrics of an episode by name; `EpisodeError` for a value that is no finite number."""
    values = {encodable(str(name)): number(f"metric {name}", value) for name, value in metrics.items()}
    if wrong := next((value for value in values.values() if isinstance(value, str)), ""):
        raise EpisodeError(f"rollout has a wrong metric: {wrong}")
    return {name: float(value) for name, value in values.items()}


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


def to_sample(episode: Episode, score: Score, seconds: float, turn_times: tuple[TurnTimes, ...] = ()) -> Sample:
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
        turn_times=turn_times,
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
