"""Routes of models: new ones, models from a checkpoint, and their descriptions."""

from typing import Any

from pipeline.tinker.api_errors import ApiError
from pipeline.tinker.api_keys import Owner
from pipeline.tinker.gateway_settings import Settings
from pipeline.tinker.routes.body_fields import flag, future, metadata, number, text
from pipeline.tinker.routes.client_router import Body, Router
from pipeline.tinker.sampling_limits import is_whole
from pipeline.tinker.service_state import ModelRegistry
from pipeline.tinker.tinker_paths import stored_path, unload_id
from pipeline.tinker.tinker_records import Adapter, Create, Load

MAX_SEED = 1 << 62


class ModelRoutes:
    """Making models and letting them go."""

    def __init__(self, settings: Settings, registry: ModelRegistry) -> None:
        self._settings, self._registry = settings, registry

    def add(self, router: Router) -> None:
        router.post("create_model", self._create)
        router.post("load_weights", self._load_weights)
        router.post("get_info", self._info)
        router.post("unload_model", self._unload)

    async def _create(self, owner: Owner, body: Body) -> Body:
        base = self._settings.checked_base(text(body, "base_model"))
        seq = number(body, "model_seq_id")
        _check_optimizer(body)
        session, adapter = text(body, "session_id"), self._adapter(body.get("lora_config"), seq, base)
        return future(await self._registry.make_model(owner, session, seq, base, Create(adapter), metadata(body)))

    def _adapter(self, lora_config: Any, seq: int, base: str) -> Adapter:
        lora_config = {"rank": 0} if lora_config is None else lora_config
        if not isinstance(lora_config, dict):
            raise ApiError(f"lora_config={str(lora_config)[:80]!r}; expected an object with a rank")
        rank = lora_config.get("rank")
        if is_whole(rank, 0, 0):
            if not self._settings.whole_models:
                raise ApiError("no lora_config, or rank=0: full fine-tuning is off here (serve.whole_models)")
            return Adapter(0, base=self._settings.base_key(base))
        if not is_whole(rank, 1, self._settings.max_rank):
            raise ApiError(f"lora_config.rank={rank!r}; expected 1 to {self._settings.max_rank} (serve.max_rank)")
        attention, mlp = flag(lora_config, "train_attn"), flag(lora_config, "train_mlp")
        if not (attention or mlp):
            raise ApiError("lora_config: neither train_attn nor train_mlp, so nothing would be trained")
        seed = lora_config.get("seed")
        if seed is not None and not is_whole(seed, -MAX_SEED, MAX_SEED):
            raise ApiError(f"lora_config.seed={str(seed)[:80]!r}; expected a whole number, or null")
        seed = self._settings.seed + seq if seed is None else seed
        return Adapter(rank, seed, attention, mlp, self._settings.base_key(base))

    async def _load_weights(self, owner: Owner, body: Body) -> Body:
        """With a session the first request of a model, which it makes; else one of a model that there is."""
        if body.get("session_id"):
            session, seq = str(body["session_id"]), number(body, "model_seq_id")
            load, base = self._load(owner, body, fresh=True)
            return future(await self._registry.make_model(owner, session, seq, base, load, metadata(body)))
        live = self._registry.model(owner, text(body, "model_id"))
        seq = number(body, "seq_id", least=1)
        return future(await self._registry.accept(live, seq, lambda: self._load(owner, body, fresh=False)[0]))

    def _load(self, owner: Owner, body: Body, *, fresh: bool) -> tuple[Load, str]:
        _check_optimizer(body)
        if body.get("weights_access_token"):
            raise ApiError("weights_access_token is not served; load a checkpoint that your own key made")
        checkpoint = self._registry.catalog.checkpoint(owner, text(body, "path"))
        if stored_path(checkpoint.path).kind != "weights":
            raise ApiError(f"{checkpoint.path} is for sampling; expected tinker://<model id>/weights/<name>")
        if not fresh:
            own = self._registry.model(owner, text(body, "model_id")).fact.adapter
            if own.form != checkpoint.adapter.form:
                described = f"rank {checkpoint.adapter.rank} on {checkpoint.base}"
                raise ApiError(f"{checkpoint.path} is of another form: {described}, not rank {own.rank}")
        base = body.get("base_model")
        base = checkpoint.base if base is None else self._settings.checked_base(base)
        if self._settings.base_key(base) != checkpoint.adapter.base:
            raise ApiError(f"base_model {base!r}: {checkpoint.path} was trained from {checkpoint.base}")
        load = Load(checkpoint.folder, bool(body.get("optimizer")), checkpoint.adapter, fresh)
        return load, base

    async def _info(self, owner: Owner, body: Body) -> Body:
        fact = self._registry.model(owner, text(body, "model_id")).fact
        names_of = {"model_name": fact.base, "tokenizer_id": self._settings.tokenizer_of(fact.adapter.base)}
        rank = fact.adapter.rank
        info = {"type": "get_info", "model_id": fact.id, "model_data": names_of, "model_name": fact.base}
        return info | {"is_lora": rank > 0, "lora_rank": rank or None}

    async def _unload(self, owner: Owner, body: Body) -> Body:
        live = self._registry.model(owner, text(body, "model_id"))
        await self._registry.unload(live)
        return {"request_id": unload_id(live.fact.id), "model_id": live.fact.id}


def _check_optimizer(body: Body) -> None:
    """`ApiError` for another optimizer than the one there is."""
    config = body.get("optimizer_config")
    kind = config.get("type") if isinstance(config, dict) else config
    if kind not in (None, "adamw"):
        raise ApiError(f"optimizer_config {kind!r}; only adamw is served")
