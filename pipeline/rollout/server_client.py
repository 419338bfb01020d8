"""The client of one inference server: requests, responses, and their cost.

Owns the exchange (`generate_wire` has the format) and the classification of failures: a `TransientError` is worth a
retry on another server, a `RolloutError` is permanent. Promises exact token ids, with the log-probabilities and the
policy versions that sampled them; and that a request which reaches its time limit is asked for its partial result
(`/inference/v1/abort_requests`) before it is abandoned. Decides nothing about retries.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from uuid import uuid4

import aiohttp

from pipeline.errors import RolloutError
from pipeline.rollout.generate_wire import (
    ABORT_ROUTE,
    ROUTE,
    Answer,
    Choice,
    GenerationRequest,
    abort_body,
    parse_answer,
)
from pipeline.rollout.routed_experts import parse_routed_experts
from pipeline.rollout.time_fractions import TimeFraction
from pipeline.transport.turn_times import EngineSeconds, sum_of
from pipeline.utils.backoff import HasBackoff
from pipeline.utils.http_errors import error_text

INTERRUPTION_SECONDS = 10.0
"""Timeout of a server's partial result after the request to end."""
BUSY_STATUS = (408, 429)


class TransientError(Exception):
    """A request that failed here and now; `reason` is its name in metrics. `at_work`: the server had accepted the
    request, so a crash of the server may be its fault. `answered`: the server itself responded with an error, a
    status of 500 or above or a malformed answer; `detail` is the response's text."""

    def __init__(self, reason: str, *, at_work: bool = False, answered: bool = False, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.at_work, self.answered, self.detail = reason, at_work, answered, detail


@dataclass(frozen=True, slots=True)
class Completion:
    """One continuation.

    Attributes:
        tokens, logprobs: the sampled tokens, with the stop token if there is one; natural logarithms, at the sampling
            temperature.
        finish: `stop` at a stop token, `length` at the limit, `abort` if it must continue: the server was paused for
            new weights, or the request was interrupted.
        version_min, version_max: oldest and newest policy version that sampled a token.
        server: the server of the last response.
        seconds: from the first request to the last response.
        versions: the policy version that sampled each token; where unknown, the oldest possible one.
        routed_experts: the experts that the server chose for each token that it read: the prompt, and the sampled
            tokens but the last; empty without routing replay.
        engine_seconds: the engine's times; None if the server reports none.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length", "abort"]
    version_min: int
    version_max: int
    server: str
    seconds: float
    versions: tuple[int, ...]
    routed_experts: tuple[bytes, ...] = ()
    engine_seconds: EngineSeconds | None = None

    @property
    def complete(self) -> bool:
        """False when the policy has not finished."""
        return self.finish != "abort"

    def followed_by(self, then: "Completion") -> "Completion":
        """This part of a completion and the next one, as one. The routed experts of `then` begin with those of this
        part."""
        return replace(
            then,
            tokens=self.tokens + then.tokens,
            logprobs=self.logprobs + then.logprobs,
            # An abort before the first token has sampled with no version.
            version_min=min(self.version_min, then.version_min) if self.tokens else then.version_min,
            version_max=max(self.version_max, then.version_max),
            seconds=self.seconds + then.seconds,
            versions=self.versions + then.versions,
            engine_seconds=sum_of(self.engine_seconds, then.engine_seconds),
        )


@dataclass
class PromptTokens:
    """Counts: samples of the responses, prompt tokens, and those of them that were in the server's prefix cache. A
    response without a report of its cached tokens counts only its samples."""

    samples: int = 0
    tokens: int = 0
    cached: int = 0

    def add(self, answer: Answer) -> None:
        self.samples += len(answer.choices)
        self.tokens += answer.prompt_tokens
        self.cached += answer.cached_tokens

    @property
    def hit_rate(self) -> float:
        return self.cached / self.tokens if self.tokens else 0.0


@dataclass(eq=False)
class Server(HasBackoff):
    """The state of one server.

    Attributes:
        version: the policy version that it serves; None while it must not get requests.
        fixed: whether its weights are from disk and never change, so that it reports no versions itself.
        samples: number of samples in progress.
        prompts: the tokens of all prompts so far, and those of them that were in the prefix cache.
        repeated: for each response since the last reading of the load, the first tokens of its prompt that the server
            computed for an earlier turn or piece; empty unless the load is read.
    """

    endpoint: str
    version: int | None = None
    fixed: bool = False
    samples: int = 0
    prompts: PromptTokens = field(default_factory=PromptTokens)
    repeated: list[PromptTokens] = field(default_factory=list)
    busy: TimeFraction = field(default_factory=TimeFraction)
    running: set[asyncio.Task[bytes]] = field(default_factory=set)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)

    def leave(self) -> None:
        """Evict the server: its running requests fail with `TransientError`, and are retried elsewhere."""
        self.version = None
        for task in self.running:
            task.cancel()

    def drain(self) -> None:
        """Stop requests to a server that leaves: it is asked for the partial results of those that it runs."""
        self.version = None
        self.leaving.set()

    async def ask(self, http: aiohttp.ClientSession, request: GenerationRequest, seconds: float) -> list[Completion]:
        """The server's completions, after `seconds` with a partial result; raises `TransientError` or
        `RolloutError`."""
        version = self.version
        if version is None:
            raise TransientError("evicted")
        with self._counted(request.n):
            started = asyncio.get_running_loop().time()
            response = await self._guarded(self._post(http, request.body(version), seconds))
            elapsed = asyncio.get_running_loop().time() - started
        try:
            answer = parse_answer(response, request.n)
        except ValueError:
            raise TransientError("malformed answer", answered=True) from None
        self.prompts.add(answer)
        if request.repeats:
            tokens = min(request.repeats, answer.prompt_tokens)
            self.repeated.append(PromptTokens(len(answer.choices), tokens, answer.cached_tokens))
        return [
            replace(self._completion(choice, request, version, elapsed), engine_seconds=seconds)
            for choice, seconds in answer.timed_choices()
        ]

    @contextmanager
    def _counted(self, samples: int) -> Iterator[None]:
        self.samples += samples
        try:
            with self.busy:
                yield
        finally:
            self.samples -= samples

    async def _guarded(self, work: Any) -> bytes:
        """`work` as a task that `leave` can cancel without cancelling the caller."""
        task: asyncio.Task[bytes] = asyncio.ensure_future(work)
        self.running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise TransientError("evicted", at_work=True) from None
        finally:
            self.running.discard(task)

    async def _post(self, http: aiohttp.ClientSession, body: bytes, seconds: float) -> bytes:
        name = uuid4().hex
        limit = aiohttp.ClientTimeout(total=seconds + INTERRUPTION_SECONDS)
        interruption = asyncio.create_task(self._interrupt(http, name, seconds))
        url, headers = f"http://{self.endpoint}{ROUTE}", {"X-Request-Id": name}
        try:
            async with http.post(url, data=body, headers=headers, timeout=limit) as response:
                answer = await response.read()
        except TimeoutError:
            raise TransientError("timed out") from None
        except (aiohttp.ClientError, OSError) as error:
            raise TransientError("disconnected", at_work=not isinstance(error, aiohttp.ClientConnectorError)) from None
        finally:
            interruption.cancel()
        if response.status in BUSY_STATUS:
            raise TransientError(f"status {response.status}")
        if response.status >= 500:
            raise TransientError(f"status {response.status}", at_work=True, answered=True, detail=error_text(answer))
        if response.status != 200:
            raise RolloutError(f"{self.endpoint} refused with status {response.status}: {error_text(answer)}")
        return answer

    async def _interrupt(self, http: aiohttp.ClientSession, name: str, seconds: float) -> None:
        """After `seconds`, or once the server leaves, make it end a request and respond with the tokens sampled so
        far."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.leaving.wait()
        limit = aiohttp.ClientTimeout(total=INTERRUPTION_SECONDS)
        # If the server does not receive this, it does not respond to the request either, and that failure is reported.
        with suppress(aiohttp.ClientError, OSError):
            async with http.post(
                f"http://{self.endpoint}{ABORT_ROUTE}", data=abort_body(name), timeout=limit
            ) as response:
                await response.read()

    def _completion(self, choice: Choice, request: GenerationRequest, oldest: int, seconds: float) -> Completion:
        latest = oldest if self.version is None else self.version
        versions = [oldest] if self.fixed else _versions(choice, oldest, latest)
        return Completion(
            tokens=choice.token_ids,
            logprobs=choice.sampled_logprobs,
            finish=choice.finish_reason,
            version_min=min(versions),
            version_max=max(versions),
            server=self.endpoint,
            seconds=seconds,
            versions=_token_versions(choice, min(versions), reported=not self.fixed),
            routed_experts=_routed_experts(choice, request),
        )


def _versions(choice: Choice, oldest: int, latest: int) -> list[int]:
    """The policy versions that sampled a choice; `TransientError` if one is older than `oldest`, the version at the
    time of the request: the server lost its weights, for example by a restart.

    If neither vLLM nor the plugin reports versions, any version between the request and the response is possible.
    """
    if choice.spans is None and choice.sampled and choice.sampled[0].token:
        return [oldest, latest]
    try:
        versions = [int(span.version) for span in choice.spans or ()]
    except ValueError:
        raise TransientError("stale weights") from None
    if not choice.token_ids:
        return versions or [oldest]
    if not versions or min(versions) < oldest:
        raise TransientError("stale weights")
    return versions


def _routed_experts(choice: Choice, request: GenerationRequest) -> tuple[bytes, ...]:
    """The records of all tokens that the server read; empty unless they were requested."""
    if request.routing is None:
        return ()
    read = max(0, len(request.token_ids) + len(choice.token_ids) - 1 - len(request.known))
    try:
        return request.known + parse_routed_experts(choice.routed_experts, request.routing, read)
    except ValueError:
        raise TransientError("malformed answer", answered=True) from None


def _token_versions(choice: Choice, oldest: int, *, reported: bool) -> tuple[int, ...]:
    """The policy version of each token: the response's if `reported`, else the `oldest` of the choice."""
    versions = [oldest] * len(choice.token_ids)
    for span in (choice.spans or ()) if reported else ():
        indices = range(len(versions))[span.start : span.end]
        versions[indices.start : indices.stop] = [int(span.version)] * len(indices)
    return tuple(versions)
