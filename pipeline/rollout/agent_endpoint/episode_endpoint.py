"""The server of one episode's endpoint.

Owns a port while an episode runs, and its authentication by a key. Promises that a call becomes part of the episode
when its response is ready, and does not if the client disconnects before; that calls in flight end with the episode;
and that any failure is an error in the format of the route's protocol. Must not know what the agent is.

    async with Endpoint(chat, sample, max_length=4096, form="tagged") as endpoint:
        …an agent with base_url=endpoint.url and api_key=endpoint.key…
    episode = endpoint.episode()

Routes below `/v1`: `chat/completions`, `completions`, `responses`, `models` of OpenAI; `messages`,
`messages/count_tokens` of Anthropic, whose clients need the base URL without `/v1`; and `reward`, to which the agent
posts the episode's reward (`pipeline.environments.agent_report`). Each protocol is a translation: all calls are sampled
and recorded by `_answers`.
"""

import asyncio
import json
import logging
import secrets
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from aiohttp import web

from pipeline.data.chat_messages import Message
from pipeline.environments import Episode, Turn
from pipeline.environments.agent_report import AgentReport, parse_report
from pipeline.environments.chat_tokenizer import LONG_TEXT, ChatTokenizer
from pipeline.environments.guarded_call import failure_reason
from pipeline.environments.tool_call_syntax import ToolCallSyntax
from pipeline.errors import DeadlineError, RolloutError
from pipeline.rollout.agent_endpoint import anthropic_wire, openai_wire, responses_wire
from pipeline.rollout.agent_endpoint.agent_call import ChatReply, CheckedRequest, RequestRefused, reply_of, text_before
from pipeline.rollout.agent_endpoint.conversation_tree import ConversationTree, PrefixMatch
from pipeline.utils.connection_limits import SpareRoom
from pipeline.utils.limited_site import LimitedSite, is_authenticated, limit_connections

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_BODY = 1 << 26
MAX_UNAUTHENTICATED = 32
"""Largest number of connections without a valid key. Hundreds of episodes may each have an endpoint."""
_BURSTS = SpareRoom(1024)
"""Room for more of them, which all endpoints share, for an agent that makes many calls at once: OpenAI's client opens
up to 1,000 connections, and the loop accepts all of them before it reads the first key."""
DONE = b"data: [DONE]\n\n"
"""The end of a stream of chat completions or completions."""
MODEL = "policy"
"""The model's name for clients; any other name works too."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SampleFunction(Protocol):
    """The function that samples turns of the policy."""

    async def __call__(self, tokens: Sequence[int], n: int, max_tokens: int | None) -> Sequence[Turn]:
        """`n` turns after `tokens`, within the run's token limits; `RolloutError` if the request can never succeed,
        `DeadlineError` if no server may be asked for too long."""


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
    """An endpoint with OpenAI's and Anthropic's protocols, open as a context."""

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
        self._responses: dict[str, tuple[Message, ...]] = {}
        self._address, self.key = address, secrets.token_urlsafe(16)

    @property
    def url(self) -> str:
        """The base URL, as OpenAI clients expect it."""
        return f"http://{self._address}:{self._port}/v1"

    async def __aenter__(self) -> Self:
        application = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        application.router.add_post("/v1/chat/completions", self._chat_completion)
        application.router.add_post("/v1/completions", self._completion)
        application.router.add_post("/v1/responses", self._response)
        application.router.add_post("/v1/messages", self._message)
        application.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/reward", self._reward)
        admission = limit_connections(application, "an episode's endpoint", MAX_UNAUTHENTICATED, _BURSTS)
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
        return replace(episode, reward=self._report.reward, metrics={**self._report.metrics, **episode.metrics})

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Admit callers with the key, and translate errors to responses."""
        try:
            if not any(secrets.compare_digest(key, self.key.encode()) for key in _keys(request)):
                raise RequestRefused("the key is not this episode's", 401, "invalid_api_key")
            is_authenticated(request)
            return await handler(request)
        except RequestRefused as refused:
            return _refusal(request, refused)
        except RolloutError as error:
            return _refusal(request, RequestRefused(str(error)))
        except DeadlineError as error:  # no server may be asked for now: clients retry this status
            return _refusal(request, RequestRefused(str(error), 503, "server_error"))
        except web.HTTPClientError as error:
            return _refusal(request, RequestRefused(f"{request.path}: {error.reason}", error.status, "not_served"))
        except (ConnectionError, web.HTTPException):  # the client has left a stream, or a response of aiohttp
            raise
        except Exception as error:
            log.exception("a call of an agent failed: %s", request.path)
            return _refusal(request, RequestRefused(failure_reason("the call failed:", error), 500, "server_error"))

    async def _chat_completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        call = openai_wire.read_chat(body)
        match = await self._placed(call, len(body))
        replies = await self._answers(call, match)
        if call.stream:
            return await self._streamed(request, openai_wire.chat_events(call, replies, len(match.tokens)), DONE)
        return web.json_response(openai_wire.chat_answer(call, replies, len(match.tokens)))

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        call = openai_wire.read_completion(body)
        match = await self._placed(call, len(body))
        replies = await self._answers(call, match)
        if call.stream:
            return await self._streamed(request, openai_wire.completion_events(call, replies, len(match.tokens)), DONE)
        return web.json_response(openai_wire.completion_answer(call, replies, len(match.tokens)))

    async def _response(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        call = responses_wire.read_request(body, self._responses)
        match = await self._placed(call, len(body))
        (reply,) = await self._answers(call, match)
        answer = responses_wire.response_answer(call, reply, len(match.tokens))
        if call.stored:
            self._responses[answer["id"]] = (*call.history, reply.reply)
        if call.stream:
            return await self._streamed(request, responses_wire.response_events(answer))
        return web.json_response(answer)

    async def _message(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        call = anthropic_wire.read_request(body)
        match = await self._placed(call, len(body))
        (reply,) = await self._answers(call, match)
        answer = anthropic_wire.message_answer(call, reply, len(match.tokens))
        if call.stream:
            return await self._streamed(request, anthropic_wire.message_events(answer))
        return web.json_response(answer)

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        match = await self._placed(anthropic_wire.read_request(body, counts=True), len(body))
        return web.json_response({"input_tokens": len(match.tokens)})

    async def _models(self, _: web.Request) -> web.StreamResponse:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "run", "max_model_len": self._max_length}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        report = parse_report(await request.read())
        if isinstance(report, str):
            raise RequestRefused(report)
        self._report = report
        return web.json_response({})

    async def _placed(self, call: CheckedRequest, size: int) -> PrefixMatch:
        """The position in the tree of a call whose body has `size` bytes. A long call is tokenized in a thread, off the
        event loop."""
        if not call.prompt:
            match = partial(self._dialogue.match_prefix, call.messages, call.tools)
        elif isinstance(call.prompt, str):
            match = partial(self._dialogue.match_text, call.prompt)
        else:
            match = partial(self._dialogue.match_tokens, call.prompt)
        # The body has tools and their arguments too, and the messages may have more than the body: those of
        # `previous_response_id`.
        size += sum(len(message["content"]) for message in call.messages)
        try:
            return match() if size < LONG_TEXT else await asyncio.to_thread(match)
        except Exception as error:  # noqa: BLE001 the template may fail on the agent's messages, which gets the error
            raise RequestRefused(failure_reason("the messages cannot be rendered:", error)) from None

    async def _answers(self, call: CheckedRequest, match: PrefixMatch) -> list[ChatReply]:
        """Sample the replies, and add them to the tree."""
        room = self._max_length - len(match.tokens)
        if room < 1:
            # Harnesses of Anthropic's API shorten a conversation when they read these first words.
            limit = f"model.max_length={self._max_length}"
            why = f"prompt is too long: {len(match.tokens)} tokens leave no room below {limit}"
            raise RequestRefused(why, code="context_length_exceeded")
        turns = await self._sample(match.tokens, call.n, call.max_tokens)
        return [self._noted(call, match, turn) for turn in turns]

    def _noted(self, call: CheckedRequest, match: PrefixMatch, turn: Turn) -> ChatReply:
        sampled, text, stop = self._until_stop(turn, call.stop)
        form = self._form if call.parses else None
        reply = reply_of(text, form, call.tools)
        if not sampled.tokens:
            raise RequestRefused("nothing was sampled", 500, "server_error")
        self._dialogue.add(match, sampled, text, reply if call.messages else None)
        pieces = [self._chat.piece(token) for token in sampled.tokens] if call.logprobs else []
        finish = "stop" if sampled.finish == "stop" else "length"
        return ChatReply(text, reply, finish, sampled.tokens, sampled.logprobs, pieces, stop)

    def _until_stop(self, turn: Turn, stops: Sequence[str]) -> tuple[SampledTurn, str, str]:
        """A turn up to the token that completes the first of `stops`, its text before that stop, and the stop."""
        tokens, finish, text, ended_at = turn.tokens, turn.finish, self._chat.decode(turn.tokens), ""
        if any(stop in text for stop in stops):
            counts = range(len(tokens) + 1)
            # Bisect for the smallest number of tokens whose text contains a stop.
            count = bisect_left(counts, True, key=lambda size: _ends_with_stop(self._chat.decode(tokens[:size]), stops))
            tokens, finish = tokens[:count], "stop"
            text, ended_at = text_before(self._chat.decode(tokens), stops)
        logprobs, versions = turn.logprobs[: len(tokens)], turn.versions[: len(tokens)]
        routed = turn.routed_experts[: len(turn.routed_experts) - (len(turn.tokens) - len(tokens))]
        bounds = turn.version_min, turn.version_max
        return SampledTurn(tokens, logprobs, finish, *bounds, turn.server, versions, routed), text, ended_at

    async def _streamed(
        self, request: web.Request, events: Iterable[Mapping[str, Any]], last: bytes = b""
    ) -> web.StreamResponse:
        """Server-sent events, then `last`. An event with a type is named by it, as typed clients read it."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in events:
            name = f"event: {event['type']}\n" if "type" in event else ""
            await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
        await response.write(last)
        await response.write_eof()
        return response


def _ends_with_stop(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)


def _keys(request: web.Request) -> tuple[bytes, bytes]:
    """The keys of a request: as OpenAI's clients send it, and as Anthropic's do."""
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    keys = bearer, request.headers.get("x-api-key", "").strip()
    return keys[0].encode(errors="surrogateescape"), keys[1].encode(errors="surrogateescape")


def _refusal(request: web.Request, refused: RequestRefused) -> web.Response:
    """The error in the format of the route's protocol."""
    wire = anthropic_wire if request.path.startswith("/v1/messages") else openai_wire
    return web.json_response(wire.error_body(refused), status=refused.status)
