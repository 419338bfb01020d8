"""Sessions, and what the SDK asks about the server."""

from typing import Any

from aiohttp import web

from pipeline.tinker.api_keys import Owner
from pipeline.tinker.gateway_settings import Settings
from pipeline.tinker.routes.body_fields import metadata, page, text
from pipeline.tinker.routes.client_router import Body, Router
from pipeline.tinker.service_state import ModelRegistry

CLIENT_FLAGS: dict[str, Any] = {
    "use_pyqwest_transport": False,
    "proto_compress_fwdbwd": True,
    "billing_exception_max_pause_duration_sec": 86400,
}
"""What else the SDK has flags for stays as it has it: samples are fetched one by one, clients do not join sessions."""
DYNAMIC_FLAGS: dict[str, Any] = {"refresh_interval_sec": 3600, "sample_cancel_enabled": True}


class SessionRoutes:
    """Opening, keeping and ending sessions."""

    def __init__(self, settings: Settings, registry: ModelRegistry) -> None:
        self._settings, self._registry = settings, registry

    def add(self, router: Router) -> None:
        router.post("client/config", self._config)
        router.post("client/dynamic_config", self._dynamic_config)
        router.post("telemetry", self._telemetry)
        router.post("create_session", self._create)
        router.post("session_heartbeat", self._heartbeat)
        router.add("POST", "sessions/{session}/finish", self._finish)
        router.add("GET", "sessions", self._list)
        router.add("GET", "sessions/{session}", self._get)
        router.add("GET", "healthz", self._health)
        router.add("GET", "get_server_capabilities", self._capabilities)

    async def _config(self, owner: Owner, body: Body) -> Body:
        return dict(CLIENT_FLAGS)

    async def _dynamic_config(self, owner: Owner, body: Body) -> Body:
        return dict(DYNAMIC_FLAGS)

    async def _telemetry(self, owner: Owner, body: Body) -> Body:
        """Accept the SDK's telemetry, which is neither read nor stored."""
        return {"status": "accepted"}

    async def _create(self, owner: Owner, body: Body) -> Body:
        session = await self._registry.open_session(owner, metadata(body))
        return {"type": "create_session", "session_id": session.id}

    async def _heartbeat(self, owner: Owner, body: Body) -> Body:
        self._registry.session(owner, text(body, "session_id"))
        return {"type": "session_heartbeat"}

    async def _finish(self, owner: Owner, request: web.Request) -> web.Response:
        session = self._registry.session(owner, request.match_info["session"])
        await self._registry.end_session(session, "its client finished it")
        return web.json_response({})

    async def _list(self, owner: Owner, request: web.Request) -> web.Response:
        own = [session for session in self._registry.sessions.values() if session.owner == owner.name]
        some, _ = page(sorted(own, key=lambda session: -session.created), request)
        return web.json_response({"sessions": [session.id for session in some]})

    async def _get(self, owner: Owner, request: web.Request) -> web.Response:
        session = self._registry.known_session(owner, request.match_info["session"])
        id = session.id
        models = [live.fact.id for live in self._registry.models.values() if live.fact.session == id]
        samplers = [sampler for sampler in self._registry.catalog.samplers if sampler.startswith(f"{id}:")]
        return web.json_response(
            {"training_run_ids": models, "sampler_ids": samplers, "user_metadata": session.metadata}
        )

    async def _health(self, owner: Owner, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _capabilities(self, owner: Owner, request: web.Request) -> web.Response:
        facts = {"max_context_length": self._settings.max_length, "trainable": True}
        models = [
            {"model_name": name, "sampleable": self._settings.sampling} | facts for name in self._settings.all_bases
        ]
        return web.json_response({"supported_models": models})
