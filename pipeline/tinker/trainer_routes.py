"""The gateway's routes for the trainer.

Owns the routes under /engine, on which a trainer takes work and returns results, and the proof that a trainer requires
before it sends the secret. Promises that only trainers with the gateway's secret are served; that of two trainers the
later one is served and the other is refused; and that results are stored when the trainer gets its response.
"""

import asyncio
import contextlib
import hmac
import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from pipeline.tinker.api_errors import OverLimitError
from pipeline.tinker.routes.usage_routes import ALL, described
from pipeline.tinker.service_state import ModelRegistry
from pipeline.tinker.tinker_records import Attach, ServerFacts, TrainerTurn
from pipeline.utils.authenticated_http import ROUTE, proof_answer
from pipeline.utils.limited_site import is_authenticated

ATTACH, TURN, SECRET = "/engine/attach", "/engine/turn", "X-Rollcall-Secret"
SILENT_SECONDS = 10.0
"""A trainer that is at work is silent for longer only while one request takes longer."""
_MAX_WAIT = 5.0
_REPLACED = "another trainer has come since"
_LOOK_SECONDS = 0.5
"""How often it is looked whether a gap in a model's numbers has become too old."""


class TrainerRoutes:
    """The routes for a trainer, over a registry."""

    def __init__(self, registry: ModelRegistry, secret: str, on_change: Callable[[ServerFacts | None], None]) -> None:
        """`on_change` receives the facts of a trainer that comes, and None when the trainer is gone."""
        self._registry, self.secret, self._on_change = registry, secret, on_change
        self._attempt = self._latest = ""
        self._replaced: set[str] = set()
        self._heard = 0.0
        self._busy = False
        self._epoch = 0
        """Raised by every attach: what was handed out before counts as lost, so an older turn gets nothing."""

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get(ROUTE, self._prove)
        app.router.add_post(ATTACH, self._attach)
        app.router.add_post(TURN, self._turn)
        app.router.add_get(ALL, self._used)

    def look(self) -> None:
        """Take a trainer for gone that was silent without having anything to do."""
        silent = time.monotonic() - self._heard
        if self._attempt and not self._busy and silent > SILENT_SECONDS:
            self._attempt = ""
            self._on_change(None)

    async def _prove(self, request: web.Request) -> web.Response:
        """That this is the gateway, before a trainer sends the secret and the servers' password."""
        assert request.transport is not None
        host, port = request.transport.get_extra_info("sockname")[:2]
        proof = proof_answer(self.secret, host, port, request.query_string.encode())
        return web.Response(body=proof) if proof else web.Response(status=400)

    async def _used(self, request: web.Request) -> web.Response:
        """What all names used."""
        self._admit(request)
        return web.json_response([described(self._registry, owner) for owner in self._registry.usage.owners()])

    async def _attach(self, request: web.Request) -> web.Response:
        self._admit(request)
        attach = msgspec.msgpack.decode(await request.read(), type=Attach)
        if attach.attempt in self._replaced:
            return web.Response(status=409, text=_REPLACED)
        if self._latest not in ("", attach.attempt):
            self._replaced.add(self._latest)
        self._latest = attach.attempt
        self._epoch += 1
        self._attempt, self._heard, self._busy = attach.attempt, time.monotonic(), False
        await self._registry.attach(attach.cursors)
        self._on_change(attach.facts)
        return web.Response(status=204)

    async def _turn(self, request: web.Request) -> web.Response:
        self._admit(request)
        epoch = self._epoch  # before its body is read, which may take until after the next attach
        turn = msgspec.msgpack.decode(await request.read(), type=TrainerTurn)
        if turn.attempt in self._replaced:
            return web.Response(status=409, text=_REPLACED)
        if turn.attempt != self._attempt or epoch != self._epoch:
            return web.Response(status=428, text="attach first")
        self._heard, self._busy = time.monotonic(), False
        try:
            for done in turn.done:
                await self._registry.finish(done)
            if turn.committed is not None:
                await self._registry.committed(turn.committed)
        except OverLimitError as error:
            return web.Response(status=503, text=str(error))
        work = None if turn.ending else await self._await_work(min(turn.seconds, _MAX_WAIT), epoch)
        if turn.attempt in self._replaced:
            return web.Response(status=409, text=_REPLACED)
        if epoch != self._epoch:
            return web.Response(status=428, text="attach first")
        self._heard, self._busy = time.monotonic(), work is not None
        return web.Response(body=work) if work is not None else web.Response(status=204)

    async def _await_work(self, seconds: float, epoch: int) -> bytes | None:
        end = time.monotonic() + seconds
        while epoch == self._epoch:
            self._registry.schedule.news.clear()
            work = self._registry.schedule.next_work()
            left = end - time.monotonic()
            if work is not None or left <= 0:
                return work
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._registry.schedule.news.wait(), min(left, _LOOK_SECONDS))
        return None

    def _admit(self, request: web.Request) -> None:
        if not hmac.compare_digest(request.headers.get(SECRET, "").encode(errors="replace"), self.secret.encode()):
            raise web.HTTPUnauthorized(text="this route is for the trainer of this run")
        is_authenticated(request)
