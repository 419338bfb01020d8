"""Numbers that clients give: models, requests and sampling clients; and stored paths of another form."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pipeline.tinker import durable_store, tinker_wire
from pipeline.tinker.durable_store import Store
from pipeline.tinker.entities import SavedWeights
from pipeline.tinker.model_requests import UNLOAD_SEQ
from pipeline.tinker.routes.sample_routes import MAX_SAMPLE
from pipeline.tinker.tinker_paths import MAX_NUMBER, WeightsPath, model_id, parse_path
from pipeline.tinker.tinker_records import Adapter, encode
from tests.unit.tinker.gateway_case import ADA, BOB, Client, with_gateway

SESSION = "0" * 32
LARGE = f"tinker://{SESSION}:train:{MAX_NUMBER + 1}/weights/a"
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}


async def listed(client: Client, route: str, headers: dict[str, str]) -> tuple[int, Any]:
    async with client.http.get(f"/api/v1/{route}", headers=headers) as answer:
        return answer.status, await answer.json()


def test_the_largest_number_of_a_model_gives_a_path_that_can_be_parsed() -> None:
    path = WeightsPath(model_id(SESSION, MAX_NUMBER), "weights", "a")
    assert parse_path(str(path)) == path


@pytest.mark.parametrize("number", [MAX_NUMBER + 1, 1 << 61])
def test_a_number_of_a_model_whose_paths_could_not_be_parsed_is_refused(number: int, tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        session = await client.session()
        loaded = {"session_id": session, "model_seq_id": number, "path": f"tinker://{SESSION}:train:0/weights/a"}
        for status, refusal in (await client.model(session, number), await client.post("load_weights", loaded)):
            assert (status, "model_seq_id" in refusal["detail"]) == (400, True), refusal
        assert (await client.model(session, MAX_NUMBER))[0] == 200

    with_gateway(tmp_path, play)


def test_no_request_of_a_client_has_the_number_of_an_unload(tmp_path: Path) -> None:
    assert UNLOAD_SEQ > MAX_NUMBER

    async def play(client: Client) -> None:
        model = (await client.model(await client.session()))[1]["model_id"]
        asked = {"model_id": model, "seq_id": UNLOAD_SEQ, "adam_params": {}, "path": "a"}
        for route in ("optim_step", "save_weights", "save_weights_for_sampler", "load_weights"):
            status, refusal = await client.post(route, asked)
            assert (status, "seq_id" in refusal.get("detail", "")) == (400, True), route
        message = tinker_wire.protocol().ForwardBackwardRequest(model_id=model, seq_id=MAX_NUMBER + 1)
        async with client.http.post(
            "/api/v1/forward_backward", data=message.SerializeToString(), headers=ADA
        ) as answer:
            assert (answer.status, "seq_id" in await answer.text()) == (400, True)
        assert (await client.post("optim_step", {**asked, "seq_id": MAX_NUMBER}))[0] == 200

    with_gateway(tmp_path, play)


def test_samples_may_have_the_large_numbers_of_the_sdk(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        given = {"session_id": await client.session(), "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = (await client.post("create_sampling_session", given))[1]["sampling_session_id"]
        asked = {"sampling_session_id": sampler, "prompt": PROMPT, "sampling_params": {}}
        assert (await client.post("asample", {**asked, "seq_id": 10**18 + 1}))[0] == 200
        status, refusal = await client.post("asample", {**asked, "seq_id": MAX_SAMPLE + 1})
        assert (status, "seq_id" in refusal["detail"]) == (400, True)

    with_gateway(tmp_path, play)


def test_a_stored_path_of_another_form_fails_neither_the_lists_nor_the_sweep(tmp_path: Path) -> None:
    saved = [
        SavedWeights(path, "bob", "tiny", Adapter(4), f"folder-{index}", 10, 1.0, expires=expires, ephemeral=ephemeral)
        for index, (path, expires, ephemeral) in enumerate(
            [(LARGE, None, False), ("no path", None, False), ("none either", 2.0, False), ("tinker://x", None, True)]
        )
    ]

    async def keep() -> None:
        await store.keep(*(durable_store.fact("checkpoint", each.path, encode(each)) for each in saved))

    store = Store(tmp_path / "store.sqlite")
    asyncio.run(keep())
    store.close()

    async def play(client: Client) -> None:
        for headers in (ADA, BOB):
            assert (await client.model(await client.session(headers), 0, headers))[0] == 200
            for route in ("training_runs", "checkpoints"):
                status, answer = await listed(client, route, headers)
                assert status == 200, answer
        await client.registry.sweep(60)
        assert "none either" not in client.registry.catalog.checkpoints, "it has expired"
        _, answer = await listed(client, "checkpoints", BOB)
        assert {each["tinker_path"] for each in answer["checkpoints"]} == {LARGE, "no path"}
        one = LARGE.replace("tinker://", "/api/v1/training_runs/").replace("/weights/", "/checkpoints/weights/")
        async with client.http.delete(one, headers=BOB) as deleted:
            assert deleted.status == 200, "its owner can delete it"
        assert LARGE not in client.registry.catalog.checkpoints

    with_gateway(tmp_path, play)
