"""Servers by a script, and samples asked of them, for the tests of sampling."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from pipeline.tinker.durable_store import Store
from pipeline.tinker.entities import SampledWeights, SamplingSession
from pipeline.tinker.sample_queue import SampleQueue
from pipeline.tinker.sampling_limits import Limits
from pipeline.tinker.tinker_records import Failed, Pool, ServerFacts
from pipeline.tinker.usage_meter import UsageMeter
from pipeline.utils.authenticated_http import ROUTE
from pipeline.utils.weights_route import HEADER, LOAD
from tests.fakes.async_server import prove
from tests.fakes.http_server import PASSWORD

LONGEST, MOST_ADAPTERS, SEQUENCES = 16, 2, 4
LIMITS = Limits(LONGEST, 8)
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
SAMPLER = SamplingSession("s:sample:0", "ada", "tiny")


class Script:
    """A server with the routes of vLLM: what it was asked, and what it answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.statuses: list[int] = []
        self.held: set[str] = set()
        self.most_held = 0
        self.answer: dict[str, Any] | None = None
        self.folder = ""
        """Of the whole model that was loaded last."""
        self.sampling = 0
        self.load_gate = asyncio.Event()
        """Whole models are loaded while it is set."""
        self.load_gate.set()
        self.gate = asyncio.Event()
        """Samples are answered while it is set."""
        self.gate.set()

    def routes(self, app: web.Application) -> None:
        app.router.add_get(ROUTE, prove)
        for route in ("/inference/v1/generate", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            app.router.add_post(route, self._answer)
        for route in ("/pause", LOAD, "/reset_prefix_cache", "/resume"):
            app.router.add_post(route, self._change_model)

    async def _change_model(self, request: web.Request) -> web.Response:
        assert request.path != LOAD or not self.sampling, "a model is changed while nothing samples"
        self.asked.append((request.path, await request.json()))
        if request.path == LOAD:
            await self.load_gate.wait()
            if self.statuses:
                return web.Response(status=self.statuses.pop(0))
            self.folder = self.asked[-1][1]["folder"]
        return web.Response(text="ok")

    async def _answer(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {PASSWORD}"
        body = await request.json()
        self.asked.append((request.path, body))
        status = self.statuses.pop(0) if self.statuses else 200
        if status != 200:
            return web.json_response({"error": {"message": "says the server"}}, status=status)
        if not request.path.endswith("generate"):
            (self.held.discard if "unload" in request.path else self.held.add)(body["lora_name"])
            self.most_held = max(self.most_held, len(self.held))
            return web.Response(text="ok")
        if self.folder != request.headers.get(HEADER, self.folder):
            self.asked.pop()
            return web.json_response({"error": "other weights"}, status=404)
        self.sampling += 1
        await self.gate.wait()
        self.sampling -= 1
        if self.answer is not None:
            return web.json_response(self.answer)
        choices = [
            {
                "index": index,
                "token_ids": [4, 5 + index],
                "finish_reason": "stop" if index else "length",
                "logprobs": {
                    "content": [
                        {"token_id": token, "logprob": -0.5, "top_logprobs": [{"token_id": 9, "logprob": -0.1}]}
                        for token in (4, 5 + index)
                    ]
                },
            }
            for index in reversed(range(body["sampling_params"]["n"]))
        ]
        tokens = enumerate(body["token_ids"][1:], 1)
        prompt = [None, *({str(token): {"logprob": -float(place)}} for place, token in tokens)]
        if len(prompt) > 1:
            prompt[1] = {**(prompt[1] or {}), "7": {"logprob": -0.2}}
        return web.json_response({"choices": choices, "prompt_logprobs": prompt})


def write_adapter(root: Path, name: str) -> None:
    (root / "weights" / name).mkdir(parents=True)
    (root / "weights" / name / "adapter_config.json").write_text("{}")


def with_servers(
    tmp_path: Path,
    play: Callable[[SampleQueue, list[Script]], Awaitable[None]],
    count: int = 1,
    sequences: int = 8,
    whole: int = 0,
) -> None:
    async def run() -> None:
        scripts, servers = [Script() for _ in range(count)], []
        for script in scripts:
            app = web.Application()
            script.routes(app)
            servers.append(TestServer(app))
            await servers[-1].start_server()
        kept = Store(tmp_path / "store.sqlite")
        limits = Limits(LONGEST, sequences)
        sampling = SampleQueue(kept, tmp_path / "weights", limits, MOST_ADAPTERS, UsageMeter(kept))
        await sampling.start()
        endpoints = tuple(f"127.0.0.1:{server.port}" for server in servers)
        pools = (Pool(whole=True),) * whole + (Pool(),) * (count - whole)
        sampling.set_servers(ServerFacts(endpoints, PASSWORD, pools))
        try:
            await play(sampling, scripts)
        finally:
            await sampling.close()
            kept.close()
            for server in servers:
                await server.close()

    asyncio.run(run())


async def sample(
    sampling: SampleQueue, number: int = 0, folder: str = "", whole: bool = False, **body: Any
) -> bytes | Failed:
    given = {"prompt": PROMPT, "num_samples": 1, "sampling_params": {"max_tokens": 4}, **body}
    weights = SampledWeights(folder, whole)
    return await sampling.result(await sampling.accept(f"s:sample:0:{number}", SAMPLER, weights, number, given))
