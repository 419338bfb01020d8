"""Samples, by the run's own servers.

Owns requests to sample: which server does each, the adapters that it has to have for it, and the form of the answer.
Promises that a request which was accepted is done, if need be by another server after this one was lost; that a
sampling client of a snapshot gets tokens of that snapshot alone, since every save has a name of its own; and that the
adapters of each server are at most `most_adapters`, of which the one that was used least recently leaves. Must not know
models' training or HTTP's front."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from pipeline.api import store, wire
from pipeline.api.errors import ApiError, Full
from pipeline.api.facts import Sampler
from pipeline.api.records import Facts, Failed
from pipeline.api.settings import BASE
from pipeline.api.store import Store

log = logging.getLogger(__name__)
REQUEST_SECONDS = 1800.0
FETCHED_SECONDS = 300.0
MOST_SAMPLES, MOST_WAITING = 1024, 20000
_PAUSES = (0.1, 0.3, 1.0, 3.0)
_NO_TOKEN = -99999.0


class Sampled(msgspec.Struct, frozen=True):
    """A request as the store keeps it."""

    sampler: str
    seq: int
    folder: str
    body: dict[str, Any]


@dataclass(eq=False)
class _Job:
    given: Sampled
    task: "asyncio.Task[bytes | Failed] | None" = None
    fetched: float = 0.0


@dataclass(eq=False)
class _Server:
    """One server: what it works on, and its adapters, the last used one at the end."""

    endpoint: str
    running: int = 0
    adapters: "OrderedDict[str, None]" = field(default_factory=OrderedDict)
    in_use: dict[str, int] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Refused(Exception):
    """A server says that the request can never work."""


class Sampling:
    """All requests to sample, and the servers that there are now."""

    def __init__(self, kept: Store, weights: Path, max_length: int, most_adapters: int) -> None:
        self._store, self._weights, self._max_length, self._most = kept, weights, max_length, most_adapters
        self._jobs: dict[str, _Job] = {}
        self._servers: list[_Server] = []
        self._password = ""
        self._there = asyncio.Event()
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Begin again with what was accepted before this process."""
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS))
        for kept in self._store.requests():
            body = self._store.body(kept.id)
            if kept.model == "" and body is not None:
                self._begin(kept.id, msgspec.msgpack.decode(body, type=Sampled))

    async def close(self) -> None:
        for job in self._jobs.values():
            if job.task is not None:
                job.task.cancel()
        if self._http is not None:
            await self._http.close()

    def use(self, facts: Facts | None) -> None:
        """Ask these servers from now on; None: there are none."""
        known = {server.endpoint for server in self._servers}
        wanted = set(facts.servers) if facts else set()
        if facts is not None and (wanted != known or facts.password != self._password):
            self._servers = [_Server(endpoint) for endpoint in facts.servers]
            self._password = facts.password
        elif facts is None:
            self._servers = []
        self._there.set() if self._servers else self._there.clear()

    @property
    def waits_for_servers(self) -> bool:
        return not self._servers

    def has(self, id: str) -> bool:
        return id in self._jobs

    async def accept(self, id: str, sampler: Sampler, folder: str, seq: int, body: dict[str, Any]) -> str:
        """The id of the request, which is in the store by now; `ApiError` 429 where too many wait."""
        if id in self._jobs:
            return id
        if sum(1 for job in self._jobs.values() if job.task is None or not job.task.done()) >= MOST_WAITING:
            raise Full(f"{MOST_WAITING} samples wait", 429)
        given = Sampled(sampler.id, seq, folder, body)
        checked_request(body, self._max_length)
        job = self._jobs[id] = _Job(given)
        try:
            await self._store.keep(store.request(id, "", seq, msgspec.msgpack.encode(given)))
        except Full as error:
            del self._jobs[id]
            raise Full(str(error), 429) from None
        self._begin(id, given, job)
        return id

    async def result(self, id: str) -> bytes | Failed:
        """The answer as protobuf, or why there is none."""
        job = self._jobs[id]
        while job.task is None:
            await asyncio.sleep(0.01)
        outcome = await asyncio.shield(job.task)
        job.fetched = job.fetched or time.monotonic()
        return outcome

    async def sweep(self) -> None:
        """Forget what was fetched a while ago."""
        now = time.monotonic()
        old = [id for id, job in self._jobs.items() if job.fetched and now - job.fetched > FETCHED_SECONDS]
        if old:
            await self._store.keep(*store.no_requests(old))
        for id in old:
            del self._jobs[id]

    def _begin(self, id: str, given: Sampled, job: _Job | None = None) -> None:
        job = job or _Job(given)
        self._jobs[id] = job
        job.task = asyncio.create_task(self._work(id, given), name=f"sample {id}")

    async def _work(self, id: str, given: Sampled) -> bytes | Failed:
        failures = 0
        while True:
            try:
                return await self._once(given)
            except _Refused as error:
                return Failed(str(error), "user")
            except ApiError as error:
                return Failed(str(error), "user")
            except (TimeoutError, aiohttp.ClientError, OSError, msgspec.MsgspecError, KeyError) as error:
                if failures in (3, 30):
                    log.warning("%s is tried again: %s: %s", id, type(error).__name__, error)
                await asyncio.sleep(_PAUSES[min(failures, len(_PAUSES) - 1)])
                failures += 1

    async def _once(self, given: Sampled) -> bytes:
        await self._there.wait()
        server = min(self._servers, key=lambda each: each.running, default=None)
        if server is None:
            raise OSError("the servers are gone")
        server.running += 1
        try:
            async with _Used(server, given.folder):
                if given.folder:
                    await self._load(server, given.folder)
                body = request_body(given.body, adapter_name(given.folder), self._max_length)
                answer = await self._post(server, "/inference/v1/generate", body)
                return written_sample(msgspec.json.decode(answer), given.body)
        finally:
            server.running -= 1

    async def _load(self, server: _Server, folder: str) -> None:
        """Have the server know the adapter; the least recently used ones that nobody samples from give way."""
        async with server.lock:
            if folder in server.adapters:
                server.adapters.move_to_end(folder)
                return
            place = self._weights / folder
            if not (place / "adapter_config.json").is_file():
                raise _Refused("the checkpoint that this client samples from was removed")
            unused = [each for each in server.adapters if not server.in_use.get(each)]
            for old in unused[: max(0, len(server.adapters) - self._most + 1)]:
                with suppress(_Refused):
                    await self._post(server, "/v1/unload_lora_adapter", {"lora_name": adapter_name(old)})
                server.adapters.pop(old, None)
            name = {"lora_name": adapter_name(folder), "lora_path": str(place)}
            try:
                await self._post(server, "/v1/load_lora_adapter", name)
            except _Refused as refusal:
                if "already" not in str(refusal):
                    raise
            server.adapters[folder] = None

    async def _post(self, server: _Server, route: str, body: Mapping[str, Any]) -> bytes:
        assert self._http is not None
        headers = {"Authorization": f"Bearer {self._password}"}
        async with self._http.post(f"http://{server.endpoint}{route}", json=body, headers=headers) as response:
            answer = await response.read()
            if response.status == 404 and route.endswith("generate"):
                server.adapters.clear()  # it was started anew
                raise OSError(f"{server.endpoint} does not know the adapter")
            if 400 <= response.status < 500 and response.status not in (408, 409, 429):
                raise _Refused(_reason(answer))
            if response.status != 200:
                raise OSError(f"{server.endpoint}{route} answered {response.status}: {answer[:200]!r}")
            return answer


class _Used:
    """While it is entered, the server keeps the adapter."""

    def __init__(self, server: _Server, folder: str) -> None:
        self._server, self._folder = server, folder

    async def __aenter__(self) -> None:
        self._server.in_use[self._folder] = self._server.in_use.get(self._folder, 0) + 1

    async def __aexit__(self, *_: object) -> None:
        self._server.in_use[self._folder] -= 1
        if not self._server.in_use[self._folder]:
            del self._server.in_use[self._folder]


def adapter_name(folder: str) -> str:
    """What servers call the adapter of a folder; the base without one."""
    return folder.replace("/", "--") if folder else BASE


def checked_request(body: Mapping[str, Any], max_length: int) -> list[int]:
    """The prompt's tokens; `ApiError` for what no server could do."""
    tokens: list[int] = []
    for chunk in (body.get("prompt") or {}).get("chunks") or []:
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise ApiError(f"a prompt chunk of kind {chunk.get('type')!r}; only encoded_text is served")
        tokens.extend(chunk["tokens"])
    if not tokens:
        raise ApiError("the prompt has no tokens")
    if len(tokens) >= max_length:
        raise ApiError(f"the prompt has {len(tokens)} tokens; expected fewer than {max_length} (model.max_length)")
    count = body.get("num_samples", 1)
    if not isinstance(count, int) or not 1 <= count <= MOST_SAMPLES:
        raise ApiError(f"num_samples={count!r}; expected 1 to {MOST_SAMPLES}")
    for field_name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n"):
        if body.get(field_name):
            raise ApiError(f"{field_name} is not served")
    return tokens


def request_body(body: Mapping[str, Any], model: str, max_length: int) -> dict[str, Any]:
    """The request in vLLM's form."""
    tokens = checked_request(body, max_length)
    given = body.get("sampling_params") or {}
    stop = given.get("stop")
    top, top_prompt = int(body.get("topk_sample_logprobs") or 0), int(body.get("topk_prompt_logprobs") or 0)
    sampling: dict[str, Any] = {
        "n": body.get("num_samples", 1),
        "temperature": given.get("temperature", 1.0),
        "top_p": given.get("top_p", 1.0),
        "top_k": max(0, given.get("top_k", -1)),
        "max_tokens": min(given.get("max_tokens") or max_length, max_length - len(tokens)),
        "logprobs": top,
        "ignore_eos": stop is not None,
    }
    if given.get("seed") is not None:
        sampling["seed"] = given["seed"]
    if body.get("prompt_logprobs") or top_prompt:
        sampling["prompt_logprobs"] = top_prompt
    stops = [stop] if isinstance(stop, str) else list(stop or [])
    if stops and isinstance(stops[0], str):
        sampling |= {"stop": stops, "detokenize": True, "include_stop_str_in_output": True}
    else:
        sampling |= {"stop_token_ids": stops, "detokenize": False}
    return {"model": model, "token_ids": tokens, "sampling_params": sampling}


def written_sample(answer: Mapping[str, Any], body: Mapping[str, Any]) -> bytes:
    """The protobuf that the SDK reads, from vLLM's answer."""
    proto = wire.protocol()
    message = proto.SampleResponse()
    top, top_prompt = int(body.get("topk_sample_logprobs") or 0), int(body.get("topk_prompt_logprobs") or 0)
    for choice in sorted(answer["choices"], key=lambda each: each["index"]):
        content = (choice.get("logprobs") or {}).get("content") or []
        sequence = message.sequences.add(
            stop_reason=proto.STOP_REASON_LENGTH if choice["finish_reason"] == "length" else proto.STOP_REASON_STOP,
            tokens=np.array(choice["token_ids"], "<i4").tobytes(),
            logprobs=np.array([each["logprob"] for each in content], "<f4").tobytes(),
        )
        if top:
            ranked = [{_id(one): one["logprob"] for one in each.get("top_logprobs") or []} for each in content]
            sequence.topk_sampled_logprobs.CopyFrom(_top(ranked, top))
    prompt = answer.get("prompt_logprobs")
    if prompt is not None:
        tokens = checked_request(body, 1 << 60)
        rows = [{int(id): one["logprob"] for id, one in (each or {}).items()} for each in prompt]
        own = [float("nan"), *(row[token] for row, token in zip(rows[1:], tokens[1:], strict=True))]
        if body.get("prompt_logprobs"):
            message.prompt_logprobs = np.array(own, "<f4").tobytes()
        if top_prompt:
            message.topk_prompt_logprobs.CopyFrom(_top(rows, top_prompt))
    return bytes(message.SerializeToString())


def _top(rows: Sequence[Mapping[int, float]], k: int) -> Any:
    """The k likeliest of each row; where there are none, token 0 with a log-probability that none has."""
    ids = np.zeros((len(rows), k), "<i4")
    logprobs = np.full((len(rows), k), _NO_TOKEN, "<f4")
    for number, row in enumerate(rows):
        for place, (token, logprob) in enumerate(sorted(row.items(), key=lambda item: -item[1])[:k]):
            ids[number, place], logprobs[number, place] = token, logprob
    proto = wire.protocol()
    return proto.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=len(rows))


def _id(token: Mapping[str, Any]) -> int:
    return int(token["token_id"]) if "token_id" in token else int(str(token["token"]).removeprefix("token_id:"))


def _reason(answer: bytes) -> str:
    with suppress(msgspec.DecodeError, AttributeError, TypeError):
        found = msgspec.json.decode(answer)
        message = (found.get("error") or {}).get("message") or found.get("message")
        if message:
            return f"the server refuses: {message}"
    return f"the server refuses: {answer[:300]!r}"
