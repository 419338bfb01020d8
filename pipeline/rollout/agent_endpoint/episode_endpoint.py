"""The server of one episode's endpoint.

Owns a port while an episode runs, and its authentication by a key. Promises that a call becomes part of the episode
when its response is ready, and does not if the client disconnects before; that calls in flight end with the episode;
and that any failure is an error in OpenAI's format. Must not know what the agent is.

    async with Endpoint(chat, sample, max_length=4096, form="tagged") as endpoint:
        …an agent with base_url=endpoint.url and api_key=endpoint.key…
    episode = endpoint.episode()

Routes below `/v1`: `chat/completions`, `completions`, `models`; and `reward`, to which the agent posts the episode's
reward (`pipeline.environments.agent_report`).
"""

import asyncio
import json
import secrets
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from aiohttp import web

from pipeline.environments import Episode, Turn
from pipeline.environments.agent_report import AgentReport, parse_report
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.guarded_call import failure_reason
from pipeline.environments.tool_call_syntax import ToolCallSyntax
from pipeline.errors import RolloutError
from pipeline.rollout.agent_endpoint import openai_wire
from pipeline.rollout.agent_endpoint.conversation_tree import ConversationTree, PrefixMatch
from pipeline.utils.limited_site import LimitedSite, is_authenticated, limit_connections

LOOPBACK = "127.0.0.1"
MAX_BODY = 1 << 26
MAX_UNAUTHENTICATED = 32
"""Largest number of connections without a valid key. Hundreds of episodes may each have an endpoint."""
LONG = 2000
"""Characters of a conversation above which tokenizing takes longer than the hand-over to a thread."""
MODEL = "policy"
"""The model's name for clients; any other name works too."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SampleFunction(Protocol):
    """The function that samples turns of the policy."""

    async def __call__(self, tokens: Sequence[int], n: int, max_tokens: int | None) -> Sequence[Turn]:
        """`n` turns after `tokens`, within the run's token limits; `RolloutError` if the request can never succeed."""


@dataclass(frozen=True)
class SampledTurn:
    """The part of a turn that the agent received."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish: Literal["stop", "length", "abort"]
    version_min: int
    version_max: int
    server: str
    versions: Sequence[int]
    routed_experts: Sequence[bytes]


class Endpoint:
    """An OpenAI-compatible endpoint, open as a context."""

    model = MODEL

    def __init__(
        self,
        chat: ChatTokenizer,
        sample: SampleFunction,
        max_length: int,
        form: ToolCallSyntax = "tagged",
        address: str = LOOPBACK,
    ) -> None:
        """`max_length`: limit of a row in tokens; `form`: the policy's tool-call syntax; `address`: of this node."""
        self._chat, self._sample, self._max_length, self._form = chat, sample, max_length, form
        self._dialogue, self._report = ConversationTree(chat), AgentReport()
        self._address, self.key = address, secrets.token_urlsafe(16)

    @property
    def url(self) -> str:
        """The base URL, as OpenAI clients expect it."""
        return f"http://{self._address}:{self._port}/v1"

    async def __aenter__(self) -> Self:
        application = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        application.router.add_post("/v1/chat/completions", self._chat_completion)
        application.router.add_post("/v1/completions", self._completion)
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/reward", self._reward)
        admission = limit_connections(application, "an episode's endpoint", MAX_UNAUTHENTICATED)
        # A client that disconnects cancels its handler, and with it the sampling.
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        try:
            await LimitedSite(self._runner, self._address, 0, admission).start()
        except BaseException:
            await self._runner.cleanup()
            raise
        self._port: int = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    def episode(self) -> Episode:
        """All completed calls, with the reward and metrics that the agent posted."""
        episode = self._dialogue.episode()
        return replace(episode, reward=self._report.reward, metrics={**episode.metrics, **self._report.metrics})

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Admit callers with the key, and translate errors to responses."""
        try:
            key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
            if not secrets.compare_digest(key.encode(), self.key.encode()):
                raise openai_wire.RequestRefused("the key is not this episode's", 401, "invalid_api_key")
            is_authenticated(request)
            return await handler(request)
        except openai_wire.RequestRefused as refused:
            return web.json_response(refused.body(), status=refused.status)
        except RolloutError as error:
            return web.json_response(openai_wire.RequestRefused(str(error)).body(), status=400)

    async def _chat_completion(self, request: web.Request) -> web.StreamResponse:
        call = openai_wire.read_chat(await request.read())
        match = await self._placed(call)
        replies = await self._answers(call, match)
        if call.stream:
            return await self._streamed(request, openai_wire.chat_events(call, replies, len(match.tokens)))
        return web.json_response(openai_wire.chat_answer(call, replies, len(match.tokens)))

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        call = openai_wire.read_completion(await request.read())
        if isinstance(call.prompt, str):
            match = self._dialogue.match_text(call.prompt)
        else:
            match = self._dialogue.match_tokens(call.prompt)
        replies = await self._answers(call, match)
        if call.stream:
            return await self._streamed(request, openai_wire.completion_events(call, replies, len(match.tokens)))
        return web.json_response(openai_wire.completion_answer(call, replies, len(match.tokens)))

    async def _models(self, _: web.Request) -> web.StreamResponse:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "run", "max_model_len": self._max_length}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        report = parse_report(await request.read())
        if isinstance(report, str):
            raise openai_wire.RequestRefused(report)
        self._report = report
        return web.json_response({})

    async def _placed(self, call: openai_wire.CheckedRequest) -> PrefixMatch:
        """The position of the call in the tree. A long conversation is tokenized in a thread, off the event loop."""
        try:
            if sum(len(message["content"]) for message in call.messages) < LONG:
                return self._dialogue.match_prefix(call.messages, call.tools)
            return await asyncio.to_thread(self._dialogue.match_prefix, call.messages, call.tools)
        except Exception as error:  # noqa: BLE001 the template may fail on the agent's messages, which gets the error
            raise openai_wire.RequestRefused(failure_reason("the messages cannot be rendered:", error)) from None

    async def _answers(self, call: openai_wire.CheckedRequest, match: PrefixMatch) -> list[openai_wire.ChatReply]:
        """Sample the replies, and add them to the tree."""
        room = self._max_length - len(match.tokens)
        if room < 1:
            why = f"{len(match.tokens)} tokens leave no room below model.max_length={self._max_length}"
            raise openai_wire.RequestRefused(why, code="context_length_exceeded")
        turns = await self._sample(match.tokens, call.n, call.max_tokens)
        return [self._noted(call, match, turn) for turn in turns]

    def _noted(self, call: openai_wire.CheckedRequest, match: PrefixMatch, turn: Turn) -> openai_wire.ChatReply:
        sampled, text = self._until_stop(turn, call.stop)
        form = self._form if call.parses else None
        reply = openai_wire.reply_of(text, form, call.tools)
        if not sampled.tokens:
            raise openai_wire.RequestRefused("nothing was sampled", 500, "server_error")
        self._dialogue.add(match, sampled, text, reply if call.messages else None)
        pieces = [self._chat.piece(token) for token in sampled.tokens] if call.logprobs else []
        finish = "stop" if sampled.finish == "stop" else "length"
        return openai_wire.ChatReply(text, reply, finish, sampled.tokens, sampled.logprobs, pieces)

    def _until_stop(self, turn: Turn, stops: Sequence[str]) -> tuple[SampledTurn, str]:
        """A turn up to the token that completes the first of `stops`, and its text before that stop."""
        tokens, finish, text = turn.tokens, turn.finish, self._chat.decode(turn.tokens)
        if any(stop in text for stop in stops):
            counts = range(len(tokens) + 1)
            # Bisect for the smallest number of tokens whose text contains a stop.
            count = bisect_left(counts, True, key=lambda size: _ends_with_stop(self._chat.decode(tokens[:size]), stops))
            tokens, finish = tokens[:count], "stop"
            text = openai_wire.text_before(self._chat.decode(tokens), stops)
        logprobs, versions = turn.logprobs[: len(tokens)], turn.versions[: len(tokens)]
        routed = turn.routed_experts[: len(turn.routed_experts) - (len(turn.tokens) - len(tokens))]
        bounds = turn.version_min, turn.version_max
        return SampledTurn(tokens, logprobs, finish, *bounds, turn.server, versions, routed), text

    async def _streamed(self, request: web.Request, events: Iterable[Mapping[str, Any]]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _ends_with_stop(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)
