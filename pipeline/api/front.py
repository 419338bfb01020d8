"""The HTTP server that clients of the SDK see.

Owns which routes there are. Promises that whatever is answered with success is in the store; that a client which polls
is held for less than the SDK's own time-out; and that while no trainer is there, requests are taken all the same, and
polls say that it is a pause. Every mistake of a client is one line. Must not know torch, nor where trainer and servers
are: they come to it (`pipeline.api.door`)."""

from aiohttp import web

from pipeline.api.keys import Keys
from pipeline.api.registry import Registry
from pipeline.api.routes.futures import FutureRoutes
from pipeline.api.routes.lists import ListRoutes
from pipeline.api.routes.models import ModelRoutes
from pipeline.api.routes.router import Router
from pipeline.api.routes.samples import SampleRoutes
from pipeline.api.routes.sessions import SessionRoutes
from pipeline.api.routes.training import TrainingRoutes
from pipeline.api.routes.weights import WeightRoutes
from pipeline.api.sampling import SampleQueue
from pipeline.api.settings import Settings


class Front:
    """The routes of the API, over a registry; `secret` signs addresses of downloads."""

    def __init__(self, settings: Settings, registry: Registry, sampling: SampleQueue, keys: Keys, secret: str) -> None:
        self._keys, self._limit = keys, settings.request_bytes
        self._futures = FutureRoutes(registry, sampling)
        self._routes = (
            SessionRoutes(settings, registry),
            ModelRoutes(settings, registry),
            TrainingRoutes(settings, registry),
            WeightRoutes(settings, registry, secret),
            SampleRoutes(settings, registry, sampling),
            self._futures,
            ListRoutes(registry),
        )

    @property
    def attached(self) -> bool:
        """Whether a trainer is there."""
        return self._futures.attached

    @attached.setter
    def attached(self, there: bool) -> None:
        self._futures.attached = there

    def add_routes(self, app: web.Application) -> None:
        router = Router(app, self._keys, self._limit)
        for each in self._routes:
            each.add(router)
        router.refuse_others()
