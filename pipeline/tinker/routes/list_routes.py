"""Training runs and checkpoints, by name."""

from typing import Any

from aiohttp import web

from pipeline.tinker.api_keys import Owner
from pipeline.tinker.entities import SavedWeights
from pipeline.tinker.model_requests import ModelEntry
from pipeline.tinker.routes.body_fields import listed, page, time_of, ttl
from pipeline.tinker.routes.client_router import Router
from pipeline.tinker.service_state import ModelRegistry
from pipeline.tinker.tinker_paths import stored_path


class ListRoutes:
    """What an owner has, and how long it is kept."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry

    def add(self, router: Router) -> None:
        self._read_json = router.read_json
        router.add("GET", "training_runs", self._runs)
        router.add("GET", "training_runs/{model}", self._run_of)
        router.add("GET", "training_runs/{model}/checkpoints", self._checkpoints_of)
        router.add("GET", "checkpoints", self._checkpoints)
        one = "training_runs/{model}/checkpoints/{kind}/{name}"
        router.add("DELETE", one, self._delete)
        router.add("PUT", one + "/ttl", self._set_ttl)

    async def _runs(self, owner: Owner, request: web.Request) -> web.Response:
        own = [live for live in self._registry.models.values() if live.fact.owner == owner.name]
        some, cursor = page(sorted(own, key=lambda live: -live.fact.created), request)
        return web.json_response({"training_runs": [self._run(live) for live in some], "cursor": cursor})

    async def _run_of(self, owner: Owner, request: web.Request) -> web.Response:
        return web.json_response(self._run(self._registry.model(owner, request.match_info["model"])))

    def _run(self, live: ModelEntry) -> dict[str, Any]:
        fact, newest = live.fact, dict[str, Any]()
        for checkpoint in sorted(self._registry.catalog.of_model(fact.id), key=lambda checkpoint: checkpoint.created):
            newest[stored_path(checkpoint.path).kind] = listed(checkpoint)
        rank = fact.adapter.rank
        return {
            "training_run_id": fact.id,
            "base_model": fact.base,
            "model_owner": fact.owner,
            "is_lora": rank > 0,
            "lora_rank": rank or None,
            "last_request_time": time_of(live.requested),
            "user_metadata": fact.metadata,
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
        }

    async def _checkpoints_of(self, owner: Owner, request: web.Request) -> web.Response:
        model = self._registry.model(owner, request.match_info["model"]).fact.id
        own = [checkpoint for checkpoint in self._visible(owner) if stored_path(checkpoint.path).model == model]
        return web.json_response({"checkpoints": [listed(checkpoint) for checkpoint in own]})

    async def _checkpoints(self, owner: Owner, request: web.Request) -> web.Response:
        some, cursor = page(self._visible(owner), request)
        return web.json_response({"checkpoints": [listed(checkpoint) for checkpoint in some], "cursor": cursor})

    def _visible(self, owner: Owner) -> list[SavedWeights]:
        own = [
            checkpoint for checkpoint in self._registry.catalog.checkpoints.values() if checkpoint.owner == owner.name
        ]
        return sorted(
            (checkpoint for checkpoint in own if not checkpoint.ephemeral), key=lambda checkpoint: -checkpoint.created
        )

    async def _delete(self, owner: Owner, request: web.Request) -> web.Response:
        await self._registry.catalog.remove(self._registry.catalog.named(owner, request.match_info))
        return web.json_response({})

    async def _set_ttl(self, owner: Owner, request: web.Request) -> web.Response:
        checkpoint = self._registry.catalog.named(owner, request.match_info)
        await self._registry.catalog.keep_for(checkpoint, ttl(await self._read_json(request)))
        return web.json_response({})
