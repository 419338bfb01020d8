"""The HTTP server for clients of the SDK.

Owns the list of routes. Promises that a request is stored before its success is reported; that a poll returns before
the SDK's own timeout; and that without a trainer, requests are accepted and polls report a pause. Every client error is
one line. Must not know torch, nor the addresses of trainer and servers: they connect to the gateway
(`pipeline.tinker.trainer_routes`).
"""

from aiohttp import web

from pipeline.tinker.api_keys import Keys
from pipeline.tinker.gateway_settings import Settings
from pipeline.tinker.routes.client_router import Router
from pipeline.tinker.routes.future_routes import FutureRoutes
from pipeline.tinker.routes.list_routes import ListRoutes
from pipeline.tinker.routes.model_routes import ModelRoutes
from pipeline.tinker.routes.openai import PREFIXES, OpenAiRouter, OpenAiRoutes
from pipeline.tinker.routes.sample_routes import SampleRoutes
from pipeline.tinker.routes.session_routes import SessionRoutes
from pipeline.tinker.routes.training_routes import TrainingRoutes
from pipeline.tinker.routes.usage_routes import UsageRoutes
from pipeline.tinker.routes.weight_routes import WeightRoutes
from pipeline.tinker.sample_queue import SampleQueue
from pipeline.tinker.service_state import ModelRegistry


class Gateway:
    """The routes of the API, over a registry; `secret` signs addresses of downloads."""

    def __init__(
        self, settings: Settings, registry: ModelRegistry, sampling: SampleQueue, keys: Keys, secret: str
    ) -> None:
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
            UsageRoutes(registry),
        )
        self._openai = OpenAiRoutes(settings, registry, sampling)

    @property
    def attached(self) -> bool:
        """Whether a trainer is there."""
        return self._futures.attached

    @attached.setter
    def attached(self, there: bool) -> None:
        self._futures.attached = there

    def add_routes(self, app: web.Application) -> None:
        router = Router(app, self._keys, self._limit)
        for routes in self._routes:
            routes.add(router)
        router.refuse_others()
        for prefix in PREFIXES:
            other = OpenAiRouter(app, self._keys, self._limit, prefix)
            self._openai.add(other)
            other.refuse_others()
