"""Passes and steps."""

import asyncio

from aiohttp import web

from pipeline.api import wire
from pipeline.api.keys import Owner
from pipeline.api.registry import Registry
from pipeline.api.routes.fields import future, number, step, text
from pipeline.api.routes.router import Body, Router
from pipeline.api.settings import Settings
from pipeline.api.structure import SMALL_BYTES


class TrainingRoutes:
    """What changes a model."""

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings, self._registry = settings, registry

    def add(self, router: Router) -> None:
        self._read = router.read
        router.add("POST", "forward_backward", self._forward_backward)
        router.post("optim_step", self._optim_step)

    async def _forward_backward(self, owner: Owner, request: web.Request) -> web.Response:
        body = await self._read(request)
        if len(body) > SMALL_BYTES:  # what is counted in it takes a while
            model, seq, message = await asyncio.to_thread(wire.read_pass, body)
        else:
            model, seq, message = wire.read_pass(body)
        live = self._registry.model(owner, model)
        accepted = await self._registry.accept(live, seq, lambda: wire.pass_of(message, self._settings.max_length))
        return web.json_response(future(accepted))

    async def _optim_step(self, owner: Owner, body: Body) -> Body:
        live = self._registry.model(owner, text(body, "model_id"))
        return future(await self._registry.accept(live, number(body, "seq_id", least=1), lambda: step(body)))
