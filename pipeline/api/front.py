"""The HTTP server that clients of the SDK see.

Owns the routes under /api/v1 and what each answers. Promises that whatever is answered with success is in the store;
that a client which polls is held for `HOLD_SECONDS` at most, less than the SDK's own time-out; and that while no
trainer is there, requests are taken all the same, and polls say that it is a pause. Every mistake of a client is one
line. Must not know torch, nor where trainer and servers are: they come to it (`pipeline.api.door`)."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from pipeline.api import names, wire
from pipeline.api.errors import ApiError, Full, Missing
from pipeline.api.facts import Checkpoint, Model, Sampler
from pipeline.api.keys import Keys, Owner
from pipeline.api.names import WeightsPath
from pipeline.api.records import Adapter, Body, Create, Failed, Load, Passed, Plain, Result, Saved, Step, Stepped
from pipeline.api.registry import Live, Registry, Request, SaveNote, save_body
from pipeline.api.sampling import Sampling
from pipeline.api.settings import Settings
from pipeline.errors import one_line

log = logging.getLogger(__name__)
HOLD_SECONDS = 25.0
LEAST_TTL, MOST_TTL = 3600, 10 * 365 * 86400
CLIENT_FLAGS = {
    "use_pyqwest_transport": False,
    "proto_compress_fwdbwd": True,
    "billing_exception_max_pause_duration_sec": 86400,
}
_PROTOBUF = "application/x-protobuf"
Handler = Callable[[Owner, dict[str, Any]], Awaitable[dict[str, Any]]]


class Front:
    """The routes of the API, over a registry."""

    def __init__(self, settings: Settings, registry: Registry, sampling: Sampling, keys: Keys) -> None:
        self._settings, self._registry, self._sampling, self._keys = settings, registry, sampling, keys
        self.attached = False
        """Whether a trainer is there."""

    def add_routes(self, app: web.Application) -> None:
        posts: dict[str, Handler] = {
            "client/config": self._config,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "load_weights": self._load_weights,
            "get_info": self._get_info,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "unload_model": self._unload_model,
        }
        api = "/api/v1/"
        for route, handler in posts.items():
            app.router.add_post(api + route, self._json(handler))
        app.router.add_post(api + "forward_backward", self._whole(self._forward_backward))
        app.router.add_post(api + "retrieve_future", self._whole(self._retrieve))
        app.router.add_post(api + "sessions/{session}/finish", self._whole(self._finish_session))
        app.router.add_get(api + "healthz", self._health)
        gets = {
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._get_sampler,
            "training_runs": self._list_runs,
            "training_runs/{model}": self._get_run,
            "training_runs/{model}/checkpoints": self._list_of_run,
            "checkpoints": self._list_checkpoints,
        }
        for route, reader in gets.items():
            app.router.add_get(api + route, self._whole(reader))
        one = api + "training_runs/{model}/checkpoints/{kind}/{name}"
        app.router.add_delete(one, self._whole(self._delete_checkpoint))
        app.router.add_put(one + "/ttl", self._whole(self._set_ttl))

    # What every route does

    def _whole(self, handle: Callable[[Owner, web.Request], Awaitable[web.Response]]) -> Any:
        async def answer(request: web.Request) -> web.Response:
            try:
                return await handle(self._keys.owner(_key_of(request)), request)
            except ApiError as error:
                return web.json_response({"detail": str(error)}, status=error.status)
            except (TypeError, AttributeError, KeyError, ValueError, OverflowError, msgspec.MsgspecError) as error:
                log.warning("%s is malformed: %s", request.path, one_line(error))
                return web.json_response({"detail": f"the request is malformed: {one_line(error)}"}, status=400)

        return answer

    def _json(self, handle: Handler) -> Any:
        async def read(owner: Owner, request: web.Request) -> web.Response:
            body = msgspec.json.decode(await self._body(request))
            if not isinstance(body, dict):
                raise ApiError("the body is no JSON object")
            return web.json_response(await handle(owner, body))

        return self._whole(read)

    async def _body(self, request: web.Request) -> bytes:
        limit, body = self._settings.request_bytes, bytearray()
        async for chunk in request.content.iter_chunked(1 << 16):
            body += chunk
            if len(body) > limit:
                raise ApiError(f"the request is larger than serve.request_bytes={limit}", 413)
        return wire.decompressed(bytes(body), request.headers.get("Content-Encoding", ""), limit)

    # Sessions

    async def _config(self, owner: Owner, body: dict[str, Any]) -> dict[str, Any]:
        return dict(CLIENT_FLAGS)

    async def _telemetry(self, owner: Owner, body: dict[str, Any]) -> dict[str, Any]:
        """What the SDK tells of its user is not looked at, and not kept."""
        return {"status": "accepted"}

    async def _create_session(self, owner: Owner, body: dict[str, Any]) -> dict[str, Any]:
        session = await self._registry.open_session(owner)
        return {"type": "create_session", "session_id": session.id}

    async def _heartbeat(self, owner: Owner, body: dict[str, Any]) -> dict[str, Any]:
        session = self._registry.session(owner, _text(body, "session_id"))
        self._registry.heard[session.id] = datetime.now(UTC).timestamp()
        return {"type": "session_heartbeat"}

    async def _finish_session(self, owner: Owner, request: web.Request) -> web.Response:
        session = self._registry.session(owner, request.match_info["session"])
        await self._registry.end_session(session, "its client finished it")
        return web.json_response({})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    # Models

    async def _create_model(self, owner: Owner, body: dict[str, Any]) -> dict[str, Any]:
        base = self._base(_text(body, "base_model"))
        number = _number(body, "model_seq_id")
        optimizer = body.get("optimizer_config") or {"type": "adamw"}
        if optimizer.get("type") != "adamw":
            raise ApiError(f"optimizer_config {optimizer.get('type')!r}; only adamw is served")
        adapter = self._adapter(body.get("lora_config"), _text(body, "session_id"), number)
        session = _text(body, "session_id")
        return _future(await self._registry.make_model(owner, session, number, base, Create(adapter)))

    def _adapter(self, wanted: dict[str, Any] | None, session: str, number: int) -> Adapter:
        if wanted is None:
            if not self._settings.whole_models:
                raise ApiError("no lora_config: full fine-tuning is off here (serve.whole_models)")
            return Adapter(0)
        rank = wanted.get("rank")
        if not isinstance(rank, int) or not 1 <= rank <= self._settings.max_rank:
            raise ApiError(f"lora_config.rank={rank!r}; expected 1 to {self._settings.max_rank} (serve.max_rank)")
        attention, mlp = bool(wanted.get("train_attn", True)), bool(wanted.get("train_mlp", True))
        if not (attention or mlp):
            raise ApiError("lora_config: neither train_attn nor train_mlp, so nothing would be trained")
        seed = wanted.get("seed")
        return Adapter(rank, self._settings.seed + number if seed is None else int(seed), attention, mlp)

    def _base(self, name: str) -> str:
        if name not in self._settings.base_names:
            raise ApiError(f"base_model {name!r}; served here: {', '.join(self._settings.base_names)}")
        return name

    async def _get_info(self, owner: Owner, body: dict[str, Any]) -> dict[str, Any]:
        fact = self._registry.model(owner, _text(body, "model_id")).fact
        names_of = {"model_name": fact.base, "tokenizer_id": self._settings.tokenizer}
        rank = fact.adapter.rank
        info = {"type": "get_info", "model_id": fact.id, "model_data": names_of, "model_name": fact.base}
        return info | {"is_lora": rank > 0, "lora_rank": rank or None}

    async def _unload_model(self, owner: Owner, body: dict[str, Any]) -> dict[str, Any]:
        live = self._registry.model(owner, _text(body, "model_id"))
        live.unloading = True
        self._registry.news.set()
        return {"request_id": live.fact.id + ":unload", "model_id": live.fact.id}

    # Training

    async def _forward_backward(self, owner: Owner, request: web.Request) -> web.Response:
        body = await self._body(request)
        model, seq, message = wire.read_pass(body)
        live = self._registry.model(owner, model)
        accepted = await self._registry.accept(live, seq, lambda: wire.pass_of(message, self._settings.max_length))
        return web.json_response(_future(accepted))

    async def _optim_step(self, owner: Owner, body: dict[str, Any]) -> dict[str, Any]:
        return await self._submit(owner, body, lambda: _step(body))

    async def _submit(self, owner: Owner, body: dict[str, Any], make: Callable[[], Body]) -> dict[str, Any]:
        live = self._registry.model(owner, _text(body, "model_id"))
        return _future(await self._registry.accept(live, _number(body, "seq_id", least=1), make))

    # Weights

    async def _save_weights(self, owner: Owner, body: dict[str, Any]) -> dict[str, Any]:
        return await self._submit(owner, body, lambda: self._save(owner, body, "weights"))

    async def _save_for_sampler(self, owner: Owner, body: dict[str, Any]) -> dict[str, Any]:
        return await self._submit(owner, body, lambda: self._save(owner, body, "sampler_weights"))

    def _save(self, owner: Owner, body: dict[str, Any], kind: names.Kind) -> Body:
        model, seq = _text(body, "model_id"), _number(body, "seq_id")
        live = self._registry.model(owner, model)
        number = body.get("sampling_session_seq_id")
        sampler = "" if number is None else names.sampler_id(live.fact.session, int(number))
        if kind == "sampler_weights" and not live.fact.adapter.rank:
            raise ApiError(f"{model} is a whole model; only adapters can be sampled from: create it with a lora_config")
        given = body.get("path")
        if given is None and not sampler:
            raise ApiError("a save needs a path: a name for the checkpoint")
        path = WeightsPath(model, kind, names.checked_name(given) if given is not None else f"passing-{seq}")
        if str(path) in self._registry.checkpoints and not body.get("overwrite"):
            raise ApiError(f"{path} is there already; choose another name, or overwrite=True")
        self._refuse_full_store(owner)
        return save_body(path, seq, SaveNote(str(path), _ttl(body), body.get("user_metadata"), sampler))

    def _refuse_full_store(self, owner: Owner) -> None:
        stored = self._registry.stored_bytes(owner.name)
        if owner.bytes and stored >= owner.bytes:
            raise ApiError(f"{owner.name} keeps {stored} bytes of checkpoints, its limit is {owner.bytes}; delete some")

    async def _load_weights(self, owner: Owner, body: dict[str, Any]) -> dict[str, Any]:
        """With a session the first request of a model, which it makes; else one of a model that there is."""
        if body.get("session_id"):
            load, base = self._load(owner, body, fresh=True)
            number = _number(body, "model_seq_id")
            return _future(await self._registry.make_model(owner, str(body["session_id"]), number, base, load))
        return await self._submit(owner, body, lambda: self._load(owner, body, fresh=False)[0])

    def _load(self, owner: Owner, body: dict[str, Any], *, fresh: bool) -> tuple[Load, str]:
        checkpoint = self._registry.checkpoint(owner, _text(body, "path"))
        if names.parse_path(checkpoint.path).kind != "weights":
            raise ApiError(f"{checkpoint.path} is for sampling; expected tinker://<model id>/weights/<name>")
        if not fresh:
            own = self._registry.model(owner, _text(body, "model_id")).fact.adapter
            if (own.rank, own.attention, own.mlp) != (
                checkpoint.adapter.rank,
                checkpoint.adapter.attention,
                checkpoint.adapter.mlp,
            ):
                raise ApiError(f"{checkpoint.path} is of another form: rank {checkpoint.adapter.rank}, not {own.rank}")
        load = Load(checkpoint.folder, bool(body.get("optimizer")), checkpoint.adapter, fresh)
        return load, checkpoint.base

    async def _weights_info(self, owner: Owner, body: dict[str, Any]) -> dict[str, Any]:
        found = self._registry.checkpoint(owner, _text(body, "tinker_path"))
        adapter = found.adapter
        info = {"base_model": found.base, "is_lora": adapter.rank > 0, "lora_rank": adapter.rank or None}
        return info | {"train_unembed": False, "train_mlp": adapter.mlp, "train_attn": adapter.attention}

    # Sampling

    async def _create_sampler(self, owner: Owner, body: dict[str, Any]) -> dict[str, Any]:
        session = self._registry.session(owner, _text(body, "session_id"))
        id = names.sampler_id(session.id, _number(body, "sampling_session_seq_id"))
        if id not in self._registry.samplers:
            path = body.get("model_path") or ""
            if path:
                checkpoint = self._registry.checkpoint(owner, path)
                if names.parse_path(checkpoint.path).kind != "sampler_weights":
                    raise ApiError(f"{path} is for training; save_weights_for_sampler makes what can be sampled from")
                base = checkpoint.base
            else:
                base = self._base(_text(body, "base_model"))
            await self._registry.add_sampler(Sampler(id, owner.name, base, path))
        return {"type": "create_sampling_session", "sampling_session_id": id}

    async def _get_sampler(self, owner: Owner, request: web.Request) -> web.Response:
        found = self._registry.sampler(owner, request.match_info["sampler"])
        answer = {"sampler_id": found.id, "base_model": found.base, "model_path": found.path or None}
        return web.json_response(answer)

    async def _sample(self, owner: Owner, body: dict[str, Any]) -> dict[str, Any]:
        sampler = self._registry.sampler(owner, _text(body, "sampling_session_id"))
        folder = self._registry.checkpoint(owner, sampler.path).folder if sampler.path else ""
        seq = _number(body, "seq_id")
        request = await self._sampling.accept(names.request_id(sampler.id, seq), sampler, folder, seq, body)
        ids = [f"{request}:{index}" for index in range(int(body.get("num_samples", 1)))]
        return {"request_id": request, "sample_sequence_ids": ids}

    # Futures

    async def _retrieve(self, owner: Owner, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await self._body(request))
        id = _text(body, "request_id")
        if self._sampling.has(id):
            return await self._retrieve_sample(owner, id)
        found = self._registry.requests.get(id)
        live = self._registry.models.get(found.model) if found else None
        if found is None or live is None or live.fact.owner != owner.name:
            raise Missing(f"no request {id!r}, or its result was fetched long ago")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(found.done.wait(), 0 if live.lost else HOLD_SECONDS)
        if live.lost and found.result is None:
            return _failure(live.lost, "server")
        if found.result is None:
            return self._pending()
        await self._registry.note_served(found)
        return self._answer(found, live, found.result)

    async def _retrieve_sample(self, owner: Owner, id: str) -> web.Response:
        self._registry.sampler(owner, id.rpartition(":")[0])
        with contextlib.suppress(TimeoutError):
            outcome = await asyncio.wait_for(self._sampling.result(id), HOLD_SECONDS)
            if isinstance(outcome, Failed):
                return _failure(outcome.error, outcome.category)
            return web.Response(body=outcome, content_type=_PROTOBUF)
        return self._pending(servers=not self._sampling.waits_for_servers)

    def _pending(self, servers: bool = True) -> web.Response:
        if self.attached and servers:
            return web.json_response({"type": "try_again", "queue_state": "active"}, status=408)
        reason = "the trainer is not up" if not self.attached else "the servers are not up"
        state = {"queue_state": "paused_capacity", "queue_state_reason": f"{reason}; requests are kept until it is"}
        return web.json_response({"type": "try_again"} | state, status=408)

    def _answer(self, request: Request, live: Live, result: Result) -> web.Response:
        if isinstance(result, Failed):
            return _failure(result.error, result.category)
        if isinstance(result, Passed):
            return web.Response(body=wire.written_pass(result), content_type=_PROTOBUF)
        if isinstance(result, Stepped):
            return web.json_response({"type": "optim_step", "metrics": result.metrics})
        if isinstance(result, Saved):
            return web.json_response(
                {"sampling_session_id": result.sampler, "path": None} if result.sampler else {"path": result.path}
            )
        assert isinstance(result, Plain)
        return web.json_response({"model_id": live.fact.id})

    # Lists

    async def _capabilities(self, owner: Owner, request: web.Request) -> web.Response:
        longest = self._settings.max_length
        models = [
            {"model_name": name, "max_context_length": longest, "trainable": True, "sampleable": True}
            for name in self._settings.base_names
        ]
        return web.json_response({"supported_models": models})

    async def _list_runs(self, owner: Owner, request: web.Request) -> web.Response:
        own = [live for live in self._registry.models.values() if live.fact.owner == owner.name]
        page, cursor = _page(sorted(own, key=lambda live: -live.fact.created), request)
        return web.json_response({"training_runs": [self._run(live.fact) for live in page], "cursor": cursor})

    async def _get_run(self, owner: Owner, request: web.Request) -> web.Response:
        return web.json_response(self._run(self._registry.model(owner, request.match_info["model"]).fact))

    def _run(self, fact: Model) -> dict[str, Any]:
        own = [each for each in self._registry.checkpoints.values() if names.parse_path(each.path).model == fact.id]
        newest: dict[str, Any] = {}
        for each in sorted(own, key=lambda each: each.created):
            newest[names.parse_path(each.path).kind] = _listed(each)
        rank = fact.adapter.rank
        return {
            "training_run_id": fact.id,
            "base_model": fact.base,
            "model_owner": fact.owner,
            "is_lora": rank > 0,
            "lora_rank": rank or None,
            "last_request_time": _time(fact.created),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
        }

    async def _list_of_run(self, owner: Owner, request: web.Request) -> web.Response:
        model = self._registry.model(owner, request.match_info["model"]).fact.id
        own = [each for each in self._visible(owner) if names.parse_path(each.path).model == model]
        return web.json_response({"checkpoints": [_listed(each) for each in own]})

    async def _list_checkpoints(self, owner: Owner, request: web.Request) -> web.Response:
        page, cursor = _page(self._visible(owner), request)
        return web.json_response({"checkpoints": [_listed(each) for each in page], "cursor": cursor})

    def _visible(self, owner: Owner) -> list[Checkpoint]:
        own = [each for each in self._registry.checkpoints.values() if each.owner == owner.name and not each.passing]
        return sorted(own, key=lambda each: -each.created)

    async def _delete_checkpoint(self, owner: Owner, request: web.Request) -> web.Response:
        await self._registry.remove_checkpoint(self._named(owner, request))
        return web.json_response({})

    async def _set_ttl(self, owner: Owner, request: web.Request) -> web.Response:
        checkpoint = self._named(owner, request)
        ttl = _ttl(msgspec.json.decode(await self._body(request)))
        await self._registry.set_expiry(checkpoint, None if ttl is None else datetime.now(UTC).timestamp() + ttl)
        return web.json_response({})

    def _named(self, owner: Owner, request: web.Request) -> Checkpoint:
        given = request.match_info
        return self._registry.checkpoint(owner, f"tinker://{given['model']}/{given['kind']}/{given['name']}")


def _key_of(request: web.Request) -> str:
    return request.headers.get("X-API-Key", "") or request.headers.get("Authorization", "").removeprefix("Bearer ")


def _future(request: Request) -> dict[str, Any]:
    return {"request_id": request.id, "model_id": request.model}


def _failure(error: str, category: str) -> web.Response:
    return web.json_response({"error": error, "category": category})


def _text(body: dict[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not value:
        raise ApiError(f"{field}={value!r}; expected a text")
    return value


def _number(body: dict[str, Any], field: str, least: int = 0) -> int:
    value = body.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 62:
        raise ApiError(f"{field}={value!r}; expected a number of {least} or more")
    return value


def _ttl(body: dict[str, Any]) -> int | None:
    ttl = body.get("ttl_seconds")
    if ttl is None:
        return None
    if not isinstance(ttl, int) or not LEAST_TTL <= ttl <= MOST_TTL:
        raise ApiError(f"ttl_seconds={ttl!r}; expected {LEAST_TTL} (an hour) to {MOST_TTL} (10 years)")
    return ttl


def _step(body: dict[str, Any]) -> Step:
    params = body.get("adam_params")
    if not isinstance(params, dict):
        raise ApiError("optim_step without adam_params; only adamw is served")
    given = {
        "lr": params.get("learning_rate", 1e-4),
        "beta1": params.get("beta1", 0.9),
        "beta2": params.get("beta2", 0.95),
        "eps": params.get("eps", 1e-12),
        "weight_decay": params.get("weight_decay", 0.0),
        "clip_norm": params.get("grad_clip_norm", 0.0),
    }
    for name, value in given.items():
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ApiError(f"adam_params: {name}={value!r}; expected a finite number that is not negative")
    if given["beta1"] >= 1 or given["beta2"] >= 1:
        raise ApiError("adam_params: beta1 and beta2 have to be below 1")
    return Step(**{name: float(value) for name, value in given.items()})


def _listed(checkpoint: Checkpoint) -> dict[str, Any]:
    path = names.parse_path(checkpoint.path)
    return {
        "checkpoint_id": path.checkpoint,
        "checkpoint_type": "training" if path.kind == "weights" else "sampler",
        "time": _time(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size,
        "public": False,
        "user_metadata": checkpoint.metadata,
        "expires_at": None if checkpoint.expires is None else _time(checkpoint.expires),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _page(items: list[Any], request: web.Request) -> tuple[list[Any], dict[str, int]]:
    def query(name: str, otherwise: int) -> int:
        text = request.query.get(name, str(otherwise))
        if not text.isdecimal():
            raise ApiError(f"{name}={text!r}; expected a number")
        return int(text)

    offset, limit = query("offset", 0), query("limit", 100)
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


__all__ = ["Front", "Full"]
