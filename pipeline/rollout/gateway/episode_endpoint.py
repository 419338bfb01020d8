"""The server of one episode's endpoint.

Owns a port for as long as an episode runs, and who may use it: whoever has its key. Promises that a call is part of
the episode once it is answered, and not if its client hangs up before; that calls in flight end with the episode; and
that whatever cannot be answered is an error in OpenAI's form. Must not know what the agent is.

    async with Endpoint(chat, sample, max_length=4096, form="tagged") as endpoint:
        …an agent with base_url=endpoint.url and api_key=endpoint.key…
    episode = endpoint.episode()

Routes below `/v1`: `chat/completions`, `completions`, `models`; and `reward`, to which the agent posts what its episode
is worth (`pipeline.environments.agent_report`).
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
from pipeline.rollout.gateway import openai_wire
from pipeline.rollout.gateway.conversation_tree import ConversationTree, PrefixMatch
from pipeline.utils.limited_site import LimitedSite, is_authenticated, limit_connections

LOOPBACK = "127.0.0.1"
MAX_BODY = 1 << 26
MAX_UNAUTHENTICATED = 32
"""Connections that have shown no key; there may be an endpoint for each of hundreds of episodes."""
LONG = 2000
"""Characters of a conversation that take longer to tokenise than to hand to a thread."""
MODEL = "policy"
"""What clients call it; any other name does as well."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SampleFunction(Protocol):
    """How the policy is asked."""

    async def __call__(self, tokens: Sequence[int], n: int, max_tokens: int | None) -> Sequence[Turn]:
        """`n` turns after `tokens`, each of at most as many tokens as the run allows; `RolloutError` if never."""


@dataclass(frozen=True)
class SampledTurn:
    """As much of a turn as the agent was given."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish: Literal["stop", "length", "abort"]
    version_min: int
    version_max: int
    server: str
    versions: Sequence[int]


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
        """`max_length`: most tokens of a row; `form`: how the policy writes calls of tools; `address`: of this node."""
        self._chat, self._sample, self._max_length, self._form = chat, sample, max_length, form
        self._dialogue, self._told = ConversationTree(chat), AgentReport()
        self._address, self.key = address, secrets.token_urlsafe(16)

    @property
    def url(self) -> str:
        """The base URL, as clients of OpenAI want it."""
        return f"http://{self._address}:{self._port}/v1"

    async def __aenter__(self) -> Self:
        application = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        application.router.add_post("/v1/chat/completions", self._chat_completion)
        application.router.add_post("/v1/completions", self._completion)
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/reward", self._reward)
        admission = limit_connections(application, "an episode's endpoint", MAX_UNAUTHENTICATED)
        # A client that hangs up ends its handler, and with it the sampling.
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
        """All calls that were answered, with what the agent told of its reward."""
        episode = self._dialogue.episode()
        return replace(episode, reward=self._told.reward, metrics={**episode.metrics, **self._told.metrics})

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let in callers with the key, and turn what goes wrong into an answer."""
        try:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
            if not secrets.compare_digest(given.encode(), self.key.encode()):
                raise openai_wire.RequestRefused("the key is not this episode's", 401, "invalid_api_key")
            is_authenticated(request)
            return await handler(request)
        except openai_wire.RequestRefused as refused:
            return web.json_response(refused.body(), status=refused.status)
        except RolloutError as error:
            return web.json_response(openai_wire.RequestRefused(str(error)).body(), status=400)

    async def _chat_completion(self, request: web.Request) -> web.StreamResponse:
        asked = openai_wire.read_chat(await request.read())
        place = await self._placed(asked)
        said = await self._answers(asked, place)
        if asked.stream:
            return await self._streamed(request, openai_wire.chat_events(asked, said, len(place.tokens)))
        return web.json_response(openai_wire.chat_answer(asked, said, len(place.tokens)))

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        asked = openai_wire.read_completion(await request.read())
        if isinstance(asked.prompt, str):
            place = self._dialogue.match_text(asked.prompt)
        else:
            place = self._dialogue.match_tokens(asked.prompt)
        said = await self._answers(asked, place)
        if asked.stream:
            return await self._streamed(request, openai_wire.completion_events(asked, said, len(place.tokens)))
        return web.json_response(openai_wire.completion_answer(asked, said, len(place.tokens)))

    async def _models(self, _: web.Request) -> web.StreamResponse:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "run", "max_model_len": self._max_length}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        told = parse_report(await request.read())
        if isinstance(told, str):
            raise openai_wire.RequestRefused(told)
        self._told = told
        return web.json_response({})

    async def _placed(self, asked: openai_wire.CheckedRequest) -> PrefixMatch:
        """Where the call stands. A long conversation is tokenised in a thread, to keep the loop free."""
        try:
            if sum(len(message["content"]) for message in asked.messages) < LONG:
                return self._dialogue.match_prefix(asked.messages, asked.tools)
            return await asyncio.to_thread(self._dialogue.match_prefix, asked.messages, asked.tools)
        except Exception as error:  # noqa: BLE001 a model's template meets an agent's messages: the agent is told
            raise openai_wire.RequestRefused(failure_reason("the messages cannot be rendered:", error)) from None

    async def _answers(self, asked: openai_wire.CheckedRequest, place: PrefixMatch) -> list[openai_wire.ChatReply]:
        """Sampled, and noted."""
        room = self._max_length - len(place.tokens)
        if room < 1:
            why = f"{len(place.tokens)} tokens leave no room below model.max_length={self._max_length}"
            raise openai_wire.RequestRefused(why, code="context_length_exceeded")
        turns = await self._sample(place.tokens, asked.n, asked.max_tokens)
        return [self._noted(asked, place, turn) for turn in turns]

    def _noted(self, asked: openai_wire.CheckedRequest, place: PrefixMatch, turn: Turn) -> openai_wire.ChatReply:
        heard, text = self._heard(turn, asked.stop)
        form = self._form if asked.parses else None
        reply = openai_wire.reply_of(text, form, asked.tools)
        if not heard.tokens:
            raise openai_wire.RequestRefused("nothing was sampled", 500, "server_error")
        self._dialogue.add(place, heard, text, reply if asked.messages else None)
        pieces = [self._chat.piece(token) for token in heard.tokens] if asked.logprobs else []
        finish = "stop" if heard.finish == "stop" else "length"
        return openai_wire.ChatReply(text, reply, finish, heard.tokens, heard.logprobs, pieces)

    def _heard(self, turn: Turn, stops: Sequence[str]) -> tuple[SampledTurn, str]:
        """A turn up to the token that brings the first of `stops`, and its text up to that."""
        tokens, finish, text = turn.tokens, turn.finish, self._chat.decode(turn.tokens)
        if any(stop in text for stop in stops):
            counts = range(len(tokens) + 1)
            count = bisect_left(counts, True, key=lambda most: _ends_with_stop(self._chat.decode(tokens[:most]), stops))
            tokens, finish = tokens[:count], "stop"
            text = openai_wire.text_before(self._chat.decode(tokens), stops)
        logprobs, versions = turn.logprobs[: len(tokens)], turn.versions[: len(tokens)]
        return SampledTurn(tokens, logprobs, finish, turn.version_min, turn.version_max, turn.server, versions), text

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
