"""Requests at random against the gateway's real routes, registry and store: it stays up, and nobody else notices."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import zstandard
from yarl import URL

from pipeline.tinker import forwarding, tinker_wire
from pipeline.tinker.routes import future_routes
from pipeline.tinker.service_state import ModelRegistry
from pipeline.tinker.tinker_records import Acknowledged, PassResult, SaveResult, WorkResult
from tests.unit.tinker.gateway_case import BOB, LORA, Client, with_gateway

EVE = {"X-API-Key": "tml-eve"}
AT_ONCE, ROUND = 8, 400
KINDS = ("session", "model", "committed_cursor", "checkpoint", "sampler", "unnamed")
ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 7, 1 << 70, 1.5, -0.0, 1e400, "", "a", "..", "../../etc/passwd", "\x00", "ü" * 300, [], {}),
    *("tinker://", "tinker://../../weights/x", [[]], [{}], [None], {"rank": 1 << 40}, {"chunks": [7]}, {"type": "x"}),
)


class Fuzzer:
    """Requests that begin as valid ones of some client and are then spoiled, or not."""

    def __init__(self, draw: random.Random, routes: list[tuple[str, str]], ids: dict[str, list[str]]) -> None:
        self._draw, self._routes, self._ids = draw, routes, ids

    def request(self) -> tuple[str, URL, dict[str, str], bytes]:
        method, path = self._draw.choice(self._routes)
        url = "/".join(self._part(part) for part in path.split("/"))
        if method == "GET" and self._draw.random() < 0.3:
            url += f"?limit={quote(str(self._odd()))}&offset={quote(str(self._odd()))}&expires=9999999999&sign=a"
        headers = {"X-API-Key": self._draw.choice(["tml-eve"] * 8 + ["", "tml-", "é", "tml-eve "])}
        return method, URL(url, encoded=True), headers, self._encoded(self._body(path), headers)

    def _part(self, part: str) -> str:
        if not part.startswith("{"):
            return part
        name = part.strip("{}").partition(":")[0]
        return quote(str(self._known(name) if self._draw.random() < 0.7 else self._odd()), safe="") or "x"

    def _known(self, name: str) -> Any:
        return self._draw.choice(self._ids.get(name) or ["x"])

    def _odd(self) -> Any:
        return self._draw.choice(ODD)

    def _body(self, path: str) -> bytes:
        if self._draw.random() < 0.05:
            return self._draw.randbytes(self._draw.randrange(80))
        if path.endswith("forward_backward"):
            return self._spoiled(self._pass())
        fields = self._openai_fields(path) if path.endswith("completions") else self._fields()
        for name in [name for name in fields if self._draw.random() < 0.2]:
            fields[name] = self._odd()
        for name in [name for name in fields if self._draw.random() < 0.1]:
            del fields[name]
        body = json.dumps(self._odd() if self._draw.random() < 0.02 else fields).encode()
        return self._spoiled(body) if self._draw.random() < 0.1 else body

    def _fields(self) -> dict[str, Any]:
        """What all routes read, each of some client."""
        known = {name: self._known(name) for name in ("session_id", "model_id", "sampling_session_id", "request_id")}
        paths = {name: self._known("path") for name in ("tinker_path", "model_path")}
        numbers = {name: self._draw.randrange(4) for name in ("seq_id", "model_seq_id", "sampling_session_seq_id")}
        return {
            **(known | paths | numbers),
            "path": self._draw.choice([self._known("path"), "mine", "yours", None]),
            "base_model": "tiny",
            "lora_config": dict(LORA),
            "adam_params": {"learning_rate": 0.1},
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "num_samples": 1,
            "sampling_params": {"max_tokens": 4, "stop": self._odd()},
            "ttl_seconds": self._draw.choice([None, 3600, 1]),
            "optimizer": True,
            "overwrite": self._draw.random() < 0.5,
        }

    def _openai_fields(self, path: str) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": self._odd()}]} if "chat" in path else {"prompt": self._odd()}
        return {"model": self._draw.choice([self._known("path"), "tiny"]), "stream": self._draw.random() < 0.5, **asked}

    def _pass(self) -> bytes:
        proto = tinker_wire.protocol()
        loss = self._draw.choice(["cross_entropy", "ppo", "none"])
        message = proto.ForwardBackwardRequest(model_id=self._known("model_id"), seq_id=1, loss_fn=loss)
        for _ in range(self._draw.randrange(3)):
            datum, count = message.data.add(), self._draw.randrange(1, 5)
            datum.model_input.add().encoded_text.tokens = bytes(4 * count)
            datum.loss_fn_inputs["target_tokens"].CopyFrom(proto.Tensor(dense=bytes(8 * count), dtype=2))
        return bytes(message.SerializeToString())

    def _spoiled(self, body: bytes) -> bytes:
        changed = bytearray(body)
        for _ in range(self._draw.choice([0, 0, 1, 3])):
            at = self._draw.randrange(len(changed) + 1)
            changed[at : at + self._draw.randrange(3)] = self._draw.randbytes(self._draw.randrange(3))
        return bytes(changed)

    def _encoded(self, body: bytes, headers: dict[str, str]) -> bytes:
        kind = self._draw.random()
        if kind < 0.1:
            headers["Content-Encoding"] = "zstd"
            return self._spoiled(zstandard.compress(body))
        if kind < 0.13:
            headers["Content-Encoding"] = self._draw.choice(["gzip", "zstd", "x"])
        return body


def picture(client: Client, session: str) -> list[Any]:
    """All that the store has of a session."""
    facts: list[Any] = [(kind, *each) for kind in KINDS for each in client.kept.facts(kind) if session in each[0]]
    own = [each for each in client.kept.requests() if each.id.startswith(session)]
    return facts + [(each, client.kept.body(each.id), client.kept.result(each.id)) for each in own]


def known_to(registry: ModelRegistry) -> tuple[set[str], ...]:
    """The names of all that a registry knows."""
    catalog = registry.catalog
    parts = (registry.sessions, registry.models, registry.requests, catalog.checkpoints, catalog.samplers)
    return tuple(set(part) for part in parts)


async def furnish(client: Client, headers: dict[str, str]) -> dict[str, list[str]]:
    """A session with a model, checkpoints and a sampling client, of which one request waits; the names of all."""
    session = await client.session(headers)
    model = (await client.model(session, headers=headers))[1]["model_id"]
    routes = ("optim_step", "save_weights", "save_weights_for_sampler", "optim_step")
    for seq, route in enumerate(routes, 1):
        body = {"model_id": model, "seq_id": seq, "path": "mine", "adam_params": {}}
        assert (await client.post(route, body, headers))[0] == 200
    results = (Acknowledged(), PassResult([], [], {}), SaveResult(10), SaveResult(10))
    for seq, result in enumerate(results):
        await client.turn("one")
        await client.turn("one", WorkResult(f"{model}:{seq}", result))
    path = f"tinker://{model}/sampler_weights/mine"
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    sampler = (await client.post("create_sampling_session", body, headers))[1]["sampling_session_id"]
    return {
        "session_id": [session],
        "session": [session],
        "model_id": [model],
        "model": [model],
        "sampling_session_id": [sampler],
        "sampler": [sampler],
        "request_id": [f"{model}:1", f"{model}:4", f"{sampler}:1"],
        "path": [path, f"tinker://{model}/weights/mine"],
        "kind": ["weights", "sampler_weights", "external_weights"],
        "name": ["mine"],
        "file": ["adapter_config.json", "archive.tar"],
    }


async def fuzz(client: Client, count: int, seed: int) -> None:
    """Answers are never errors of the server's own; what they are depends on the request."""
    theirs = await furnish(client, BOB)
    assert client.http.app is not None
    there = [(route.method, route.resource) for route in client.http.app.router.routes()]
    routes = [(method, resource.canonical) for method, resource in there if resource and method not in ("*", "HEAD")]
    routes += [route for route in routes if route[1].endswith("/archive")] * 3  # few requests are good enough for it
    draw, kept, seen = random.Random(seed), picture(client, theirs["session_id"][0]), set[int]()
    assert len(kept) > len(KINDS)

    async def ask(fuzzer: Fuzzer) -> None:
        method, url, headers, data = fuzzer.request()
        async with client.http.request(method, url, headers=headers, data=data, allow_redirects=False) as answer:
            waits = answer.status == 503 and url.path.endswith("completions")  # there is no server to sample
            assert answer.status < 500 or waits, (method, url, headers, data, await answer.text())
            seen.add(answer.status)

    for _ in range(count // ROUND):
        own = await furnish(client, EVE)  # what she had is spoiled by now, and her session perhaps finished
        fuzzer = Fuzzer(draw, routes, {name: own[name] + theirs[name] for name in own})
        for _ in range(ROUND // AT_ONCE):
            await asyncio.gather(*(ask(fuzzer) for _ in range(AT_ONCE)))
    assert {200, 302, 400, 401, 404, 408, 410, 415, 503} <= seen, seen
    assert picture(client, theirs["session_id"][0]) == kept
    assert known_to(client.registry) == known_to(ModelRegistry(client.kept)), "what is in memory is in the store"
    step = {"model_id": theirs["model_id"][0], "seq_id": 5, "adam_params": {}}
    assert (await client.post("optim_step", step, BOB))[0] == 200


@pytest.mark.parametrize(("count", "seed"), [(1600, 0), pytest.param(10_000, 1, marks=pytest.mark.trial)])
def test_random_requests_leave_the_gateway_up_and_what_others_have_as_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    count: int,
    seed: int,
) -> None:
    monkeypatch.setattr(future_routes, "HOLD_SECONDS", 0.01)
    monkeypatch.setattr(forwarding, "HOLD_SECONDS", 0.01)

    async def play(client: Client) -> None:
        await client.attach("one")
        await fuzz(client, count, seed)

    with_gateway(tmp_path, play)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
