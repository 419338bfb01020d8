"""What keys used: a key's own name for its clients, all names for the owner of the run."""

from typing import Any

import msgspec
from aiohttp import web

from pipeline.tinker.api_keys import Owner
from pipeline.tinker.routes.client_router import Router
from pipeline.tinker.service_state import ModelRegistry

ALL = "/engine/usage"
"""All names, for the run's owner, who can read the gateway's secret."""


class UsageRoutes:
    """The counts of `pipeline.tinker.usage_meter`."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry

    def add(self, router: Router) -> None:
        router.add("GET", "usage", self._own)

    async def _own(self, owner: Owner, request: web.Request) -> web.Response:
        days = msgspec.to_builtins(self._registry.usage.days(owner.name))
        return web.json_response({**described(self._registry, owner.name), "days": days})


def described(registry: ModelRegistry, owner: str) -> dict[str, Any]:
    """The total of a name, and the bytes of checkpoints that it keeps now."""
    total = msgspec.to_builtins(registry.usage.total(owner))
    return {"name": owner, "total": total, "checkpoint_bytes": registry.catalog.stored_bytes(owner)}
