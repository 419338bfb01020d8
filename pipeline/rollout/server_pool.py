"""The client of all inference servers.

Owns the choice of a server for each request, and the handling of failures: the server that has the request's prefix in
its cache, unless it is overloaded, else the least loaded one; transient failures retried elsewhere with growing pauses,
and without limit unless servers crash under the request, or live servers answer it with errors for `server_seconds`.
Promises that only servers with recent enough weights get requests, and that cancelling a call ends it at once. Waits
without polling while there is no such server, for at most `server_seconds`. Must not know tasks, streams or how weights
travel.

A sample that was cut off by a weight update or a request's time limit is continued: its tokens, log-probabilities and
versions are retained, and only the rest is requested. Sampling it again would favor short samples, which are cut off
less often. The unreturned tokens of a lost server are lost, so a long sample is requested in pieces of at most
`max_tokens_per_request`: a lost server costs a sample at most one piece.

    async with InferenceClient(["127.0.0.3:8000"], password, request_seconds=120) as client:
        client.update("127.0.0.3:8000", 0)
        completions = await client.generate(tokens, n=8, temperature=1.0, max_tokens=32, stop_token_ids=[2])
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress, count
from operator import ne
from types import TracebackType
from typing import Self

import aiohttp

from pipeline.config.routing_shape import RoutingShape
from pipeline.errors import RolloutError
from pipeline.rollout.cache_load import CacheLoad, CacheWatch
from pipeline.rollout.draft_acceptance import DraftCounts
from pipeline.rollout.generate_wire import GenerationRequest
from pipeline.rollout.server_client import Completion, Server, TransientError
from pipeline.transport.sample_records import SAMPLED_TOKENS
from pipeline.utils.authenticated_connector import AuthenticatedConnector
from pipeline.utils.backoff import available, pause_after
from pipeline.utils.network_interfaces import KEEPALIVE_SECONDS
from pipeline.utils.poison_request import ABANDONED, MAX_SERVER_CRASHES, PoisonRequestGuard, is_dead
from pipeline.utils.waiting import Deadline

SHOWN = 8
"""Number of servers that an error names."""
COMPARED = 32
"""Number of servers whose loads are compared for one request."""
MAX_IMBALANCE = 1.25
"""Largest load of a server relative to the mean with which it keeps its episodes. Source: consistent hashing with
bounded loads (Mirrokni, Thorup and Zadimoghaddam 2016, arXiv 1608.01350), whose 1 + epsilon it is."""
MIN_OVERLOAD = 8
"""Samples in progress below which a server is never overloaded: a batch that small decodes as fast as one sample."""


class InferenceClient:
    """Requests continuations from servers; used by one event loop, shared by any number of tasks."""

    def __init__(
        self,
        servers: Sequence[str],
        password: str,
        request_seconds: float,
        *,
        max_tokens_per_request: int | None = None,
        max_lag: int = 1,
        server_seconds: float = 600.0,
        vocabulary: int | None = None,
        fixed: bool = False,
        routing: RoutingShape | None = None,
        keeps_prefixes: bool = False,
        watches_load: bool = False,
    ) -> None:
        """No server gets a request before `update` declares it current.

        Args:
            servers: `host:port` of each.
            password: the run's shared secret, which every server requires.
            request_seconds: time limit of one request on one server; the rest is then requested elsewhere.
            max_tokens_per_request: limit of one request in tokens; None: none.
            max_lag: largest number of versions by which a server may trail the newest one and still get requests.
            server_seconds: timeout of the wait for an eligible server, and time for which live servers may answer a
                request with errors.
            fixed: whether the servers load their weights from disk and never change them.
            routing: the shape of the routed experts that every response must have; None: none are requested.
            keeps_prefixes: whether an episode uses its cached prefixes after an update of the weights too.
            watches_load: whether `load` is called, which has the repeated tokens only then.
            vocabulary: token ids must be below this. vLLM without a tokenizer does not check, and would crash on one
                above.
        """
        self._servers = {endpoint: Server(endpoint, fixed=fixed) for endpoint in servers}
        self._password, self._seconds, self._piece = password, request_seconds, max_tokens_per_request
        self._max_lag, self._server_seconds, self._vocabulary = max_lag, server_seconds, vocabulary
        self._routing, self._keeps_prefixes, self._watches_load = routing, keeps_prefixes, watches_load
        self._changed, self._suspects = asyncio.Event(), PoisonRequestGuard()
        self._cache_watch, self._drafts = CacheWatch(), DraftCounts()
        self._followed: set[str] = set()
        self._eligible: list[Server] | None = []
        self.retries: Counter[str] = Counter()
        self.requests = self.tokens = self.returned = self.moved = 0

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=AuthenticatedConnector(lambda: self._password, limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
            headers={"Authorization": f"Bearer {self._password}", "Content-Type": "application/json"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    def update(self, server: str, version: int | None) -> None:
        """Set the policy version of a server; None evicts it and retries its requests elsewhere."""
        state = self._servers.setdefault(server, Server(server))
        if version == state.version:
            return
        if version is None:
            state.leave()
        state.version = version
        self._eligible = None
        self._changed.set()

    def follow(self, versions: Mapping[str, int | None]) -> None:
        """Take the posted version of every server. A server that was posted before and no longer is has left: it gets
        no request, and its running ones are continued elsewhere with the tokens that it has sampled."""
        for server in self._followed - versions.keys():
            self._servers.pop(server).drain()
            self._eligible = None
        self._followed = set(versions)
        for server, version in versions.items():
            self.update(server, version)

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        n: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        top_p: float = 1.0,
        top_k: int = 0,
        known: tuple[bytes, ...] = (),
        begun: Completion | None = None,
        cached_on: str = "",
        cached_at: int | None = None,
        earlier: Sequence[int] = (),
        computed_at: int | None = None,
        note: Callable[[int, Completion], None] = lambda index, piece: None,
    ) -> list[Completion]:
        """`n` continuations of `token_ids`, each of at most `max_tokens` tokens; temperature 0 is greedy.

        `known` are the routed experts of the first tokens, from earlier responses; servers leave them out.
        With `top_p` or `top_k` the log-probabilities are those of the truncated distribution.
        `begun` is the first part of the only continuation, from an earlier call: only the rest is requested.
        `cached_on` is the server that has the beginning of `token_ids` in its prefix cache (`Completion.server` of the
        turn before); "" if none has. `cached_at` is the policy version with which the episode began: with
        `keeps_prefixes` its turns share cached prefixes under it, also after an update. `earlier` is the turn before
        with its input, which this server computed under the policy version `computed_at`.
        `note` receives each response as it comes: the index of the continuation, and its next part.

        Retries until the request succeeds. Raises `RolloutError` for a request that can never succeed, under which
        servers crash, or which live servers answer with errors for `server_seconds`; and `DeadlineError` if no server
        is eligible for `server_seconds`.
        """
        self._check(token_ids)
        self.requests += 1
        sampling = n, temperature, max_tokens, list(stop_token_ids), top_p, top_k
        tokens = list(token_ids)
        repeats = _common_prefix(tokens, list(earlier)) if self._counts(cached_on, computed_at) else 0
        cached_at = cached_at if self._keeps_prefixes else None
        request = GenerationRequest(tokens, *sampling, self._routing, known, cached_at, repeats)
        if begun is None:
            completions = await self._somewhere(request, cached_on)
            for index, completion in enumerate(completions):
                note(index, completion)
        else:
            completions = [begun]
        if not all(completion.complete for completion in completions):
            parts = [self._finished(part, request, partial(note, index)) for index, part in enumerate(completions)]
            completions = list(await asyncio.gather(*parts))
        return completions

    def numbers(self) -> dict[str, float]:
        """Values for the status: counts since the start, each server's idle fraction since the last call, and the
        fraction of its prompt tokens that were in its prefix cache, where it reports that; and the drafted tokens of
        all servers as of the last `read_drafts`."""
        idle = {f"idle/{endpoint}": 1 - server.busy.pop() for endpoint, server in self._servers.items()}
        hits = {
            f"prefix_cache/{endpoint}": server.prompts.hit_rate
            for endpoint, server in self._servers.items()
            if server.prompts.tokens
        }
        retries = {f"retries/{reason}": float(count) for reason, count in self.retries.items()}
        counts = {"requests": self.requests, SAMPLED_TOKENS: self.tokens} | self._drafts.numbers()
        return counts | {"requests/returned": self.returned, "requests/moved": self.moved} | idle | hits | retries

    async def read_drafts(self) -> None:
        """Read from each server how many tokens it drafted and accepted."""
        await self._drafts.read(self._http, [*self._servers])

    async def load(self) -> CacheLoad:
        """The load of the servers' KV caches since the last call; a server that does not answer counts for nothing."""
        servers = [server for server in self._servers.values() if server.version is not None]
        return await self._cache_watch.load(self._http, servers)

    async def _somewhere(self, request: GenerationRequest, cached_on: str) -> list[Completion]:
        """The completions from the first server that succeeds; for a long request only the first piece."""
        pauses, crashes, abandoned = _pauses(), 0, self._suspects.abandoned
        errors = _ErrorStreak(self._server_seconds)
        piece = min(request.max_tokens, self._piece or request.max_tokens)
        while crashes < MAX_SERVER_CRASHES:
            async with self._suspects.attempt(crashes):
                server = await self._chosen(cached_on, request.n)
                try:
                    repeats = request.repeats if server.endpoint == cached_on else 0
                    part = replace(request, max_tokens=piece, repeats=repeats)
                    completions = await server.ask(self._http, part, self._seconds)
                except TransientError as failure:
                    self.retries[failure.reason] += 1
                    server.backoff.record_failure()
                    # A server that has left may stop under its requests, which are not to blame.
                    blamed = failure.at_work and not server.leaving.is_set()
                    crashed = blamed and await is_dead(self._http, server.endpoint)
                    crashes += crashed
                    errors.note(failure, server, crashed)
                else:
                    server.backoff.record_success()
                    self.retries.update("aborted" for completion in completions if not completion.complete)
                    # Counted by response, so that the number grows during a long turn: it is a sign of progress.
                    self.tokens += sum(len(completion.tokens) for completion in completions)
                    return [_marked(completion, piece, request.max_tokens) for completion in completions]
            if abandoned != self._suspects.abandoned:  # another request was to blame for the crashes
                crashes, abandoned = 0, self._suspects.abandoned
            await asyncio.sleep(next(pauses))
        self._suspects.abandon()
        raise RolloutError(ABANDONED)

    async def _finished(
        self, part: Completion, request: GenerationRequest, note: Callable[[Completion], None]
    ) -> Completion:
        """`part`, continued until it is complete."""
        last = part
        while not part.complete:
            left = request.max_tokens - len(part.tokens)
            if left < 1:
                return replace(part, finish="length")
            tokens = [*request.token_ids, *part.tokens]
            # A piece without a token may be of a server that has not computed the prompt.
            is_cached = bool(last.tokens) and self._counts(last.server, last.version_min)
            repeats = len(tokens) if is_cached else 0
            known = part.routed_experts
            rest = replace(request, token_ids=tokens, n=1, max_tokens=left, known=known, repeats=repeats)
            if self._keeps_prefixes and rest.cached_at is None:
                rest = replace(rest, cached_at=part.version_min)
            (last,) = await self._somewhere(rest, part.server)
            note(last)
            part = part.followed_by(last)
        return part

    def _counts(self, endpoint: str, version: int | None) -> bool:
        """Whether the load counts the tokens that a server computed under this policy version: the server may find them
        in its cache."""
        server = self._servers.get(endpoint)
        finds = self._keeps_prefixes or (server is not None and server.version == version)
        return self._watches_load and finds

    async def _chosen(self, cached_on: str, samples: int) -> Server:
        """The server `cached_on` if it is eligible and not overloaded, else the least loaded one.

        Compared are all eligible servers, or `COMPARED` random ones: with 4,096 servers about as good, and much
        cheaper. Counts in `returned` and `moved` where requests with a cached prefix went.
        """
        deadline = Deadline("an inference server that may be asked", self._server_seconds)
        while not (eligible := self._current()):
            self._changed.clear()
            try:
                async with asyncio.timeout(deadline.left):
                    await self._changed.wait()
            except TimeoutError:
                raise deadline.error(self._without_weights()) from None
        awake = available(eligible if len(eligible) <= COMPARED else random.sample(eligible, COMPARED))
        if cached_on:
            holder = self._servers.get(cached_on)
            if holder is not None and self._takes_back(holder, awake, samples):
                self.returned += 1
                return holder
            self.moved += 1
        least = min(server.samples for server in awake)
        return random.choice([server for server in awake if server.samples == least])

    def _takes_back(self, holder: Server, awake: Sequence[Server], samples: int) -> bool:
        """Whether a server that has a prefix in its cache gets the request: it is current, awake and not overloaded."""
        is_awake = holder in available([holder, *awake])
        return holder in self._current() and is_awake and not _is_overloaded(holder, awake, samples)

    def _current(self) -> list[Server]:
        """The eligible servers, cached until a version changes."""
        if self._eligible is None:
            versions = {server: server.version for server in self._servers.values() if server.version is not None}
            newest = max(versions.values(), default=0)
            self._eligible = [server for server, version in versions.items() if newest - version <= self._max_lag]
        return self._eligible

    def _without_weights(self) -> str:
        """The servers that an error names: when none is eligible, all lack weights."""
        names = list(self._servers)
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return f"weights on {', '.join(names[:SHOWN])}{more}" if names else "any server"

    def _check(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise RolloutError("an empty prompt cannot be continued")
        highest, lowest = max(token_ids), min(token_ids)
        if lowest < 0 or (self._vocabulary is not None and highest >= self._vocabulary):
            invalid = lowest if lowest < 0 else highest
            raise RolloutError(f"token id {invalid} is outside of the vocabulary of {self._vocabulary} tokens")


class _ErrorStreak:
    """The time for which live servers, and no others, have answered one request with errors.

    Any other failure ends the streak: a server that restarts, is busy or cannot be reached is waited for.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline: Deadline | None = None

    def note(self, failure: TransientError, server: Server, crashed: bool) -> None:
        """Count a failed try; `RolloutError` when the streak is too long."""
        if not failure.answered or crashed or server.leaving.is_set():
            self._deadline = None
        elif self._deadline is None:
            self._deadline = Deadline("an answer without an error", self._seconds)
        elif self._deadline.passed:
            last = ": ".join(filter(None, (f"{server.endpoint} answered with {failure.reason}", failure.detail)))
            raise RolloutError(f"live servers answered with errors for {self._seconds:g} s; {last}")


def _common_prefix(one: list[int], other: list[int]) -> int:
    """Length of the common prefix, in tokens."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:  # three times as fast as the search
        return length
    return next(compress(count(), map(ne, one, other)))


def _is_overloaded(server: Server, others: Sequence[Server], samples: int) -> bool:
    """Whether a server with `samples` more would have too many, compared with the mean load of `others`."""
    mean = (sum(other.samples for other in others) + samples) / len(others)
    return server.samples + samples > max(MIN_OVERLOAD, MAX_IMBALANCE * mean)


def _marked(completion: Completion, piece: int, max_tokens: int) -> Completion:
    """Mark a completion that stopped at the end of a piece, not at `max_tokens`, as one to be continued."""
    is_piece_end = piece < max_tokens and completion.finish == "length" and len(completion.tokens) == piece
    return replace(completion, finish="abort") if is_piece_end else completion


def _pauses() -> Iterator[float]:
    """Seconds before each retry: exponential backoff up to a maximum, each reduced at random by up to a half."""
    for failures in count():
        yield pause_after(failures) * random.uniform(0.5, 1)
