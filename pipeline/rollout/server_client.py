"""One inference server as its client sees it: a request, its answer, and what they cost.

Owns the form of vLLM's `/inference/v1/generate` (tokens in, tokens out) and the sorting of what can go wrong:
`TransientError` is worth another try elsewhere, `RolloutError` never works. Promises exact token ids, with the
log-probabilities and the weight versions that sampled them; and that a request which runs into its time limit is asked
for what it has (`/inference/v1/abort_requests`) before it is given up. Decides nothing about retries.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal
from uuid import uuid4

import aiohttp
import msgspec

from pipeline.errors import RolloutError
from pipeline.inference.vllm.plugin import MODEL
from pipeline.rollout.time_fractions import TimeFraction
from pipeline.utils.backoff import HasBackoff
from pipeline.utils.http_errors import error_text

ROUTE = "/inference/v1/generate"
ABORT_ROUTE = "/inference/v1/abort_requests"
INTERRUPTION_SECONDS = 10.0
"""What a server may take to answer a request with what it has, once it is told to end it."""
BUSY_STATUS = (408, 429)


class TransientError(Exception):
    """A request that did not work here and now; `reason` is what is counted. `at_work`: the server had taken it, so if
    it died, it may have died of it."""

    def __init__(self, reason: str, *, at_work: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.at_work = reason, at_work


@dataclass(frozen=True, slots=True)
class Completion:
    """One continuation.

    Attributes:
        tokens, logprobs: what was sampled, with the stop token if there is one; natural logarithms, at the sampling
            temperature.
        finish: `stop` at a stop token, `length` at the limit, `abort` when it is to go on: the server was paused for
            new weights, or the request was interrupted.
        version_min, version_max: oldest and newest weight version that sampled a token.
        server: who answered last.
        seconds: from the first request to the last answer.
        versions: the weight version that sampled each token; where nobody says, the oldest that it may have been.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length", "abort"]
    version_min: int
    version_max: int
    server: str
    seconds: float
    versions: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """False when the policy had not finished."""
        return self.finish != "abort"


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


# One is made for each token of every answer: the garbage collector need not look at them.
class _Token(msgspec.Struct, gc=False):
    logprob: float
    token_id: int = -1
    token: str = ""
    """Before vLLM had `token_id`: `token_id:7`."""


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Token] | None = None
    weight_versions: list[_Span] | None = None
    """As `pipeline.inference.vllm.token_versions` says them, where vLLM itself does not."""


class _Choice(msgspec.Struct):
    finish_reason: Literal["stop", "length", "abort"]
    token_ids: tuple[int, ...]
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None

    @property
    def sampled(self) -> list[_Token]:
        """The tokens with their log-probabilities; an abort before the first has none."""
        return (self.logprobs and self.logprobs.content) or []

    @property
    def spans(self) -> list[_Span] | None:
        """From where to where which weights sampled; None if nobody says."""
        if self.weight_versions is None and self.logprobs is not None:
            return self.logprobs.weight_versions
        return self.weight_versions


class _Answer(msgspec.Struct):
    choices: list[_Choice]


FINAL_ONLY = 2
"""vLLM's `RequestOutputKind`: one output, when all samples have ended. Releases up to 0.25 send one at each step unless
they are told, and answer with whichever samples ended last."""

_token_id, _logprob = attrgetter("token_id"), attrgetter("logprob")
_answers = msgspec.json.Decoder(_Answer)
_bodies = msgspec.json.Encoder()


@dataclass(frozen=True)
class GenerationRequest:
    """What to continue and how; temperature 0 is greedy."""

    token_ids: Sequence[int]
    n: int
    temperature: float
    max_tokens: int
    stop_token_ids: Sequence[int]
    top_p: float = 1.0
    top_k: int = 0

    def body(self, salt: str) -> bytes:
        """The request as JSON. Prompts share a cache of their prefixes only under the same `salt`."""
        sampling = {
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_tokens": self.max_tokens,
            "stop_token_ids": self.stop_token_ids,
            "logprobs": 0,
            "detokenize": False,
            "output_kind": FINAL_ONLY,
        }
        body = {"model": MODEL, "token_ids": self.token_ids, "sampling_params": sampling, "cache_salt": salt}
        return _bodies.encode(body)


@dataclass(eq=False)
class Server(HasBackoff):
    """The state of one server.

    Attributes:
        version: what it serves; None while it must not be asked.
        fixed: whether its weights are from disk and never change, so that it counts no versions itself.
        samples: those it is working on.
    """

    endpoint: str
    version: int | None = None
    fixed: bool = False
    samples: int = 0
    busy: TimeFraction = field(default_factory=TimeFraction)
    running: set[asyncio.Task[bytes]] = field(default_factory=set)

    def leave(self) -> None:
        """Give up on the server: what runs there ends as `TransientError`, to be tried elsewhere."""
        self.version = None
        for task in self.running:
            task.cancel()

    async def ask(self, http: aiohttp.ClientSession, request: GenerationRequest, seconds: float) -> list[Completion]:
        """The answer of this server, after `seconds` with what it has by then; raises `TransientError` or
        `RolloutError`."""
        version = self.version
        if version is None:
            raise TransientError("evicted")
        # Weights change the cached prefixes, so every version has its own.
        body = request.body(salt=str(version))
        with self._counted(request.n):
            started = asyncio.get_running_loop().time()
            answer = await self._guarded(self._post(http, body, seconds))
            elapsed = asyncio.get_running_loop().time() - started
        return [self._completion(choice, version, elapsed) for choice in _parse(answer, request.n)]

    @contextmanager
    def _counted(self, samples: int) -> Iterator[None]:
        self.samples += samples
        try:
            with self.busy:
                yield
        finally:
            self.samples -= samples

    async def _guarded(self, work: Any) -> bytes:
        """`work` as a task that `leave` can end without ending the caller."""
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
        if response.status >= 500 or response.status in BUSY_STATUS:
            raise TransientError(f"status {response.status}", at_work=response.status >= 500)
        if response.status != 200:
            raise RolloutError(f"{self.endpoint} refused with status {response.status}: {error_text(answer)}")
        return answer

    async def _interrupt(self, http: aiohttp.ClientSession, name: str, seconds: float) -> None:
        """After `seconds`, have the server end a request and answer it with what it has sampled."""
        await asyncio.sleep(seconds)
        limit = aiohttp.ClientTimeout(total=INTERRUPTION_SECONDS)
        body = _bodies.encode({"request_ids": [f"generate-tokens-{name}"]})
        # A server that does not hear this does not answer the request either, and that is told.
        with suppress(aiohttp.ClientError, OSError):
            async with http.post(f"http://{self.endpoint}{ABORT_ROUTE}", data=body, timeout=limit) as response:
                await response.read()

    def _completion(self, choice: _Choice, asked: int, seconds: float) -> Completion:
        latest = asked if self.version is None else self.version
        versions = [asked] if self.fixed else _versions(choice, asked, latest)
        return Completion(
            tokens=choice.token_ids,
            logprobs=tuple(map(_logprob, choice.sampled)),
            finish=choice.finish_reason,
            version_min=min(versions),
            version_max=max(versions),
            server=self.endpoint,
            seconds=seconds,
            versions=_token_versions(choice, min(versions), told=not self.fixed),
        )


def _parse(answer: bytes, n: int) -> list[_Choice]:
    try:
        choices = _answers.decode(answer).choices
    except msgspec.DecodeError:
        raise TransientError("malformed answer") from None
    if len(choices) != n or not all(_is_exact(choice) for choice in choices):
        raise TransientError("malformed answer")
    return choices


def _is_exact(choice: _Choice) -> bool:
    """Whether the log-probabilities are those of the tokens."""
    sampled = choice.sampled
    if sampled and sampled[0].token:
        return [token.token for token in sampled] == [f"token_id:{token}" for token in choice.token_ids]
    return tuple(map(_token_id, sampled)) == choice.token_ids


def _versions(choice: _Choice, asked: int, latest: int) -> list[int]:
    """The weight versions of a choice, of which a server that lost its weights, by a restart say, has older ones.

    A release of vLLM that says none, nor has our plugin say any, has sampled with what it had from when it was asked
    until it answered.
    """
    if choice.spans is None and choice.sampled and choice.sampled[0].token:
        return [asked, latest]
    try:
        versions = [int(span.version) for span in choice.spans or ()]
    except ValueError:
        raise TransientError("stale weights") from None
    if not choice.token_ids:
        return versions or [asked]
    if not versions or min(versions) < asked:
        raise TransientError("stale weights")
    return versions


def _token_versions(choice: _Choice, oldest: int, *, told: bool) -> tuple[int, ...]:
    """The weight version of each token: what the answer says if it is `told`, else the `oldest` of the choice."""
    versions = [oldest] * len(choice.token_ids)
    for span in (choice.spans or ()) if told else ():
        places = range(len(versions))[span.start : span.end]
        versions[places.start : places.stop] = [int(span.version)] * len(places)
    return tuple(versions)
