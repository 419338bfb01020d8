"""Sampling clients and what they ask."""

from aiohttp import web

from pipeline.tinker import tinker_paths
from pipeline.tinker.api_errors import ApiError
from pipeline.tinker.api_keys import Owner
from pipeline.tinker.entities import SampledWeights, SamplingSession
from pipeline.tinker.gateway_settings import Settings
from pipeline.tinker.routes.body_fields import number, text
from pipeline.tinker.routes.client_router import Body, Router
from pipeline.tinker.sample_queue import SampleQueue
from pipeline.tinker.service_state import ModelRegistry

MAX_SAMPLE = (1 << 62) - 1
"""The largest number of a sample. Copies of a sampling client count from a random multiple of a billion."""


class SampleRoutes:
    """Samples of the base, and of checkpoints that were saved for it."""

    def __init__(self, settings: Settings, registry: ModelRegistry, sampling: SampleQueue) -> None:
        self._settings, self._registry, self._sampling = settings, registry, sampling

    def add(self, router: Router) -> None:
        router.post("create_sampling_session", self._create)
        router.add("GET", "samplers/{sampler}", self._get)
        router.post("asample", self._sample)

    async def _create(self, owner: Owner, body: Body) -> Body:
        self._refuse_without_servers()
        session = self._registry.session(owner, text(body, "session_id"))
        id = tinker_paths.sampler_id(session.id, number(body, "sampling_session_seq_id"))
        known, path = self._registry.catalog.samplers.get(id), body.get("model_path") or ""
        if known is not None and (known.path != path or (not path and known.base != body.get("base_model"))):
            raise ApiError(f"the sampling session {id} is there already, of other weights; choose another number")
        if known is None:
            if path:
                checkpoint = self._registry.catalog.checkpoint(owner, path)
                if tinker_paths.stored_path(checkpoint.path).kind != "sampler_weights":
                    raise ApiError(f"{path} is for training; save_weights_for_sampler makes what can be sampled from")
                base = checkpoint.base
            else:
                base = self._settings.checked_base(text(body, "base_model"))
            if self._registry.is_being_made(id):
                raise ApiError(f"the sampling session {id} is made by a save already; choose another number")
            await self._registry.catalog.add_sampler(SamplingSession(id, owner.name, base, path))
        return {"type": "create_sampling_session", "sampling_session_id": id}

    def _refuse_without_servers(self) -> None:
        if not self._settings.sampling:
            raise ApiError("nothing samples here: this server was started without serve.sampling=true")

    async def _get(self, owner: Owner, request: web.Request) -> web.Response:
        sampler = self._registry.catalog.sampler(owner, request.match_info["sampler"])
        answer = {"sampler_id": sampler.id, "base_model": sampler.base, "model_path": sampler.path or None}
        return web.json_response(answer)

    async def _sample(self, owner: Owner, body: Body) -> Body:
        self._refuse_without_servers()
        sampler = self._registry.catalog.sampler(owner, text(body, "sampling_session_id"))
        self._registry.heartbeats.beat(tinker_paths.session_of(sampler.id))
        if sampler.path:
            weights = self._registry.catalog.checkpoint(owner, sampler.path).sampled
        else:
            weights = SampledWeights(base=self._settings.base_key(sampler.base))
        seq = number(body, "seq_id", most=MAX_SAMPLE)
        request = await self._sampling.accept(tinker_paths.request_id(sampler.id, seq), sampler, weights, seq, body)
        ids = [f"{request}:{index}" for index in range(body.get("num_samples", 1))]
        return {"request_id": request, "sample_sequence_ids": ids}
