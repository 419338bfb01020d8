"""A gateway over HTTP, with a trainer that only says what it did."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from pipeline.tinker.api_keys import Keys, digest
from pipeline.tinker.durable_store import Store
from pipeline.tinker.gateway import Gateway
from pipeline.tinker.gateway_settings import Settings
from pipeline.tinker.sample_queue import SampleQueue
from pipeline.tinker.service_state import ModelRegistry
from pipeline.tinker.tinker_records import (
    Acknowledged,
    Attach,
    SaveResult,
    ServerFacts,
    TrainerTurn,
    Work,
    WorkResult,
    encode,
)
from pipeline.tinker.trainer_routes import ATTACH, SECRET, TURN, TrainerRoutes

ADA, BOB = {"X-API-Key": "tml-ada"}, {"X-API-Key": "tml-bob"}
DOOR = {SECRET: "secret"}
LORA = {"rank": 4}
_works = msgspec.msgpack.Decoder(Work)


class Client:
    """A front of its own, as clients and as a trainer see it."""

    def __init__(
        self, http: TestClient[Any, Any], registry: ModelRegistry, kept: Store, sampling: SampleQueue, root: Path
    ) -> None:
        self.http, self.registry, self.kept, self.sampling, self.root = http, registry, kept, sampling, root

    async def post(self, route: str, body: Any, headers: dict[str, str] = ADA) -> tuple[int, Any]:
        async with self.http.post(f"/api/v1/{route}", json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def session(self, headers: dict[str, str] = ADA) -> str:
        return str((await self.post("create_session", {}, headers))[1]["session_id"])

    async def model(self, session: str, number: int = 0, headers: dict[str, str] = ADA) -> tuple[int, Any]:
        body = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": LORA}
        return await self.post("create_model", body, headers)

    async def adapter(self, name: str = "mine") -> str:
        """The path of sampler weights of Ada's, with their files."""
        model = (await self.model(await self.session()))[1]["model_id"]
        await self.attach("one")
        await self.turn("one", WorkResult(f"{model}:0", Acknowledged()))
        await self.post("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": name})
        await self.turn("one")
        await self.turn("one", WorkResult(f"{model}:1", SaveResult(10)))
        path = f"tinker://{model}/sampler_weights/{name}"
        folder = self.root / "weights" / self.registry.catalog.checkpoints[path].folder
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
        return path

    async def attach(self, attempt: str, **cursors: int) -> int:
        body = encode(Attach(attempt, {name.replace("__", ":"): at for name, at in cursors.items()}, ServerFacts()))
        async with self.http.post(ATTACH, data=body, headers=DOOR) as answer:
            return answer.status

    async def turn(self, attempt: str, *done: WorkResult) -> tuple[int, Work | None]:
        async with self.http.post(TURN, data=encode(TrainerTurn(attempt, done)), headers=DOOR) as answer:
            body = await answer.read()
            return answer.status, _works.decode(body) if answer.status == 200 else None


class _Server(TestServer):
    """Without the end of handlers whose clients hang up, as in the gateway's process."""

    async def _make_runner(self, **given: Any) -> web.AppRunner:
        return web.AppRunner(self.app, **{**given, "handler_cancellation": False})


def with_gateway(
    tmp_path: Path, play: Callable[[Client], Awaitable[None]], request_bytes: int = 1 << 16, **given: Any
) -> None:
    """`given` are other settings of the gateway than those below."""

    async def run() -> None:
        lines = [f"{digest(f'tml-{name}')} {name}" for name in ("bob", "eve")]
        tmp_path.mkdir(exist_ok=True)
        (tmp_path / "keys").write_text("\n".join([f"{digest('tml-ada')} ada models=2", *lines, ""]))
        settings = Settings(
            root=str(tmp_path),
            host="127.0.0.1",
            port=0,
            keys="",
            base_names=("tiny",),
            tokenizer="tiny",
            max_length=16,
            max_samples=12,
            max_rank=8,
            request_bytes=request_bytes,
            session_seconds=60,
            whole_models=False,
            sampling=True,
            seed=0,
        )
        settings = msgspec.structs.replace(settings, **given)
        kept = Store(settings.store)
        registry = ModelRegistry(kept)
        sampling = SampleQueue(kept, settings.weights, settings.limits, 2, registry.usage)
        gateway = Gateway(settings, registry, sampling, Keys(tmp_path / "keys"), "secret")
        app = web.Application(client_max_size=0)
        gateway.add_routes(app)
        TrainerRoutes(registry, "secret", lambda facts: None).add_routes(app)
        await sampling.start()
        server = _Server(app)
        await server.start_server(auto_decompress=False)
        async with TestClient(server) as http:
            await play(Client(http, registry, kept, sampling, tmp_path))
        await sampling.close()
        kept.close()

    asyncio.run(run())
