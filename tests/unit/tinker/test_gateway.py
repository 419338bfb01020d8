"""The gateway over HTTP, with a trainer that only says what it did."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from pipeline.tinker import durable_store, json_limits
from pipeline.tinker.api_errors import OverLimitError
from pipeline.tinker.durable_store import Store
from pipeline.tinker.service_state import ModelRegistry
from pipeline.tinker.tinker_records import (
    Acknowledged,
    Failed,
    SaveResult,
    StepResult,
    TrainerTurn,
    Unload,
    WorkResult,
    encode,
)
from pipeline.tinker.trainer_routes import SECRET, TURN
from tests.unit.tinker.gateway_case import ADA, BOB, DOOR, LORA, Client, with_gateway


def test_a_retry_is_the_same_request_and_makes_no_second_model(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        session = await client.session()
        first = await client.model(session)
        assert await client.model(session) == first
        assert len(client.registry.models) == 1
        model = first[1]["model_id"]
        step = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
        assert await client.post("optim_step", step) == await client.post("optim_step", step)
        await client.attach("one")
        assert (await client.turn("one"))[1].seq == 0  # type: ignore[union-attr]
        assert (await client.turn("one"))[1].seq == 1  # type: ignore[union-attr]
        assert await client.turn("one") == (204, None)

    with_gateway(tmp_path, play)


def test_a_result_never_changes_and_what_a_trainer_lost_is_handed_out_again(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = (await client.model(await client.session()))[1]["model_id"]
        await client.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
        await client.attach("one")
        await client.turn("one")
        await client.turn("one", WorkResult(f"{model}:0", Acknowledged()))
        await client.turn("one", WorkResult(f"{model}:1", StepResult({"lr:mean": 1.0})))
        await client.attach("two")
        status, again = await client.turn("two")
        assert (status, again and again.seq, again and again.answered) == (200, 0, True)
        await client.turn("two")
        await client.turn("two", WorkResult(f"{model}:1", StepResult({"lr:mean": 2.0})))
        status, result = await client.post("retrieve_future", {"request_id": f"{model}:1"})
        assert (status, result["metrics"]) == (200, {"lr:mean": 1.0})

    with_gateway(tmp_path, play)


def test_a_trainer_that_was_replaced_is_told_so_and_cannot_come_back(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        assert (await client.turn("one"))[0] == 428
        assert await client.attach("one") == 204
        assert await client.attach("two") == 204
        assert (await client.turn("one"))[0] == 409
        assert await client.attach("one") == 409
        assert (await client.turn("two"))[0] == 204
        async with client.http.post(TURN, data=encode(TrainerTurn("two")), headers={SECRET: "guess"}) as answer:
            assert answer.status == 401

    with_gateway(tmp_path, play)


def test_a_turn_from_before_an_attach_takes_no_work_into_its_dead_connection(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        session = await client.session()
        await client.attach("one")
        body = encode(TrainerTurn("one", seconds=5.0))
        stalled = asyncio.create_task(client.http.post(TURN, data=body, headers=DOOR))
        await asyncio.sleep(0.3)  # sooner or later, it gets none
        await client.attach("one")
        await client.model(session)
        assert (await stalled).status == 428
        status, work = await client.turn("one")
        assert (status, work and work.seq) == (200, 0)

    with_gateway(tmp_path, play)


def test_a_trainer_that_is_ending_brings_results_and_takes_nothing(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        await client.model(await client.session())
        await client.attach("one")
        async with client.http.post(TURN, data=encode(TrainerTurn("one", ending=True)), headers=DOOR) as answer:
            assert answer.status == 204
        assert (await client.turn("one"))[0] == 200

    with_gateway(tmp_path, play)


def test_a_model_that_is_unloaded_takes_nothing_and_leaves_a_trainer_that_brings_it_back(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = (await client.model(await client.session()))[1]["model_id"]
        await client.attach("one")
        await client.turn("one")
        await client.turn("one", WorkResult(f"{model}:0", Acknowledged()))
        step = {"model_id": model, "adam_params": {}}
        kept = await client.post("optim_step", step | {"seq_id": 1})
        await client.post("unload_model", {"model_id": model})
        assert await client.post("optim_step", step | {"seq_id": 1}) == kept, "a retry"
        assert (await client.post("optim_step", step | {"seq_id": 2}))[0] == 410
        await client.turn("one")
        _, work = await client.turn("one")
        assert work is not None
        assert isinstance(work.body, Unload)
        assert await client.turn("one", WorkResult(work.request, Acknowledged())) == (204, None)
        assert (await client.post("optim_step", step | {"seq_id": 2}))[0] == 410
        await client.attach("two", **{model: 0})
        _, work = await client.turn("two")
        assert work is not None
        assert isinstance(work.body, Unload)
        assert await client.turn("two", WorkResult(work.request, Acknowledged())) == (204, None)

    with_gateway(tmp_path, play)


def test_a_checkpoint_that_an_open_load_reads_stays_until_none_does(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        removed: list[str] = []
        client.registry.catalog.on_removed = removed.append
        model = (await client.model(await client.session()))[1]["model_id"]
        await client.attach("one")
        await client.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
        await client.turn("one")
        await client.turn("one", WorkResult(f"{model}:0", Acknowledged()))
        await client.turn("one", WorkResult(f"{model}:1", SaveResult(10)))
        [saved] = client.registry.catalog.checkpoints.values()
        load = {"model_id": model, "seq_id": 2, "path": saved.path, "optimizer": True}
        assert (await client.post("load_weights", load))[0] == 200
        await client.registry.catalog.remove(saved)
        await client.turn("one", WorkResult(f"{model}:2", Acknowledged()))
        assert removed == [], "a trainer that comes now loads it again"
        await client.registry.committed({model: 2})
        await client.registry.committed({model: 3})
        await client.registry.sweep(60.0)
        assert removed == [saved.folder]

    with_gateway(tmp_path, play)


def test_a_retry_of_what_the_store_did_not_take_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(client: Client) -> None:
        model = (await client.model(await client.session()))[1]["model_id"]
        full = asyncio.Event()

        async def keep(self: Store, *changes: object) -> None:
            await full.wait()
            raise OverLimitError("full")

        monkeypatch.setattr(Store, "keep", keep)
        step = {"model_id": model, "seq_id": 1, "adam_params": {}}
        both = [asyncio.create_task(client.post("optim_step", step)) for _ in range(2)]
        await asyncio.sleep(0.2)
        full.set()
        assert {status for status, _ in await asyncio.gather(*both)} == {402}

    with_gateway(tmp_path, play)


def test_open_requests_of_a_model_that_is_gone_fail_when_the_gateway_comes_back(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = (await client.model(await client.session()))[1]["model_id"]
        live = client.registry.models[model]
        gone = msgspec.structs.replace(live.fact, gone=True)
        await client.kept.keep(durable_store.fact("model", model, encode(gone)))
        again = ModelRegistry(client.kept)
        assert isinstance(again.result(again.requests[f"{model}:0"]), Failed)

    with_gateway(tmp_path, play)


def test_nobody_sees_what_another_key_made(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        session = await client.session()
        model = (await client.model(session))[1]["model_id"]
        save = {"model_id": model, "seq_id": 1, "path": "mine"}
        await client.post("save_weights", save)
        await client.attach("one")
        await client.turn("one")
        await client.turn("one", WorkResult(f"{model}:0", Acknowledged()))
        await client.turn("one", WorkResult(f"{model}:1", SaveResult(10)))
        path = f"tinker://{model}/weights/mine"
        assert (await client.post("weights_info", {"tinker_path": path}))[0] == 200
        asked = [
            ("weights_info", {"tinker_path": path}),
            ("get_info", {"model_id": model}),
            ("retrieve_future", {"request_id": f"{model}:0"}),
            ("optim_step", {"model_id": model, "seq_id": 9, "adam_params": {}}),
            ("session_heartbeat", {"session_id": session}),
            ("create_model", {"session_id": session, "model_seq_id": 1, "base_model": "tiny", "lora_config": LORA}),
        ]
        for route, body in asked:
            assert (await client.post(route, body, BOB))[0] == 404, route
        async with client.http.get("/api/v1/checkpoints", headers=BOB) as answer:
            assert (await answer.json())["checkpoints"] == []

    with_gateway(tmp_path, play)


def test_what_became_of_a_sample_is_told_to_its_owner_though_its_sampling_client_is_forgotten(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        session = await client.session()
        create = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = (await client.post("create_sampling_session", create))[1]["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
        status, sample = await client.post("asample", {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt})
        assert status == 200
        asked = {"request_id": sample["request_id"]}
        await client.post("cancel_future", asked, BOB)
        await client.registry.catalog.drop_samplers({session})
        assert (await client.post("retrieve_future", asked, BOB))[0] == 404
        await client.post("cancel_future", asked)
        status, outcome = await client.post("retrieve_future", asked)
        assert (status, outcome["error"]) == (200, "its client gave this sample up")

    with_gateway(tmp_path, play)


def test_a_key_has_as_many_models_as_it_may_and_an_ended_session_takes_nothing(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        session = await client.session()
        for number in (0, 1):
            assert (await client.model(session, number))[0] == 200
        status, refusal = await client.model(session, 2)
        assert (status, "all it may have" in refusal["detail"]) == (403, True)
        await client.post(f"sessions/{session}/finish", {})
        model = f"{session}:train:0"
        status, refusal = await client.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
        assert (status, "make a new ServiceClient" in refusal["detail"]) == (410, True)

    with_gateway(tmp_path, play)


def test_a_save_of_a_name_that_is_taken_or_bad_fails_its_request_alone(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = (await client.model(await client.session()))[1]["model_id"]
        for seq, path in enumerate(("../x", "a/b", "", ".hidden"), 1):
            status, accepted = await client.post("save_weights", {"model_id": model, "seq_id": seq, "path": path})
            assert status == 200
            _, result = await client.post("retrieve_future", {"request_id": accepted["request_id"]})
            assert result["category"] == "user"
            assert "the name" in result["error"]

    with_gateway(tmp_path, play)


def test_of_two_saves_of_a_name_in_flight_the_second_is_refused_unless_it_overwrites(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = (await client.model(await client.session()))[1]["model_id"]
        await client.attach("one")
        await client.turn("one", WorkResult(f"{model}:0", Acknowledged()))
        save = {"model_id": model, "path": "a"}
        for seq in (1, 2):
            assert (await client.post("save_weights", {**save, "seq_id": seq}))[0] == 200
        _, result = await client.post("retrieve_future", {"request_id": f"{model}:2"})
        assert "choose another name, or overwrite=True" in result.get("error", ""), "the first is not done yet"
        assert ModelRegistry(client.kept).models[model].open_saves, "nor is the name free after a start"
        await client.post("save_weights", {**save, "seq_id": 3, "overwrite": True})
        await client.post("save_weights", {**save, "seq_id": 4, "path": "b"})
        for seq in (1, 3, 4):
            await client.turn("one")
            await client.turn("one", WorkResult(f"{model}:{seq}", SaveResult(10 + seq)))
        sizes = {path.rpartition("/")[2]: saved.size for path, saved in client.registry.catalog.checkpoints.items()}
        assert sizes == {"a": 13, "b": 14}
        await client.post("save_weights", {**save, "seq_id": 5, "path": "c"})
        await client.turn("one", WorkResult(f"{model}:5", Failed("no room", "server")))
        await client.post("save_weights", {**save, "seq_id": 6, "path": "c"})
        await client.turn("one")
        await client.turn("one", WorkResult(f"{model}:6", SaveResult(16)))
        assert f"tinker://{model}/weights/c" in client.registry.catalog.checkpoints, "a save that failed takes no name"

    with_gateway(tmp_path, play)


def test_a_sampling_client_of_other_weights_does_not_get_the_number_of_one(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        path = await client.adapter()
        new = {"session_id": await client.session(), "sampling_session_seq_id": 0}
        for given in ({"base_model": "tiny"}, {"base_model": "tiny"}):
            assert (await client.post("create_sampling_session", new | given))[0] == 200, "a retry is the same"
        status, refusal = await client.post("create_sampling_session", {**new, "model_path": path})
        assert (status, "choose another number" in refusal.get("detail", "")) == (400, True)
        new["sampling_session_seq_id"] = 1
        for _ in range(2):
            assert (await client.post("create_sampling_session", {**new, "model_path": path}))[0] == 200
        status, refusal = await client.post("create_sampling_session", {**new, "base_model": "tiny"})
        assert (status, "choose another number" in refusal.get("detail", "")) == (400, True)

    with_gateway(tmp_path, play)


def test_a_save_makes_no_sampling_client_whose_number_is_taken(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        session = await client.session()
        models = [(await client.model(session, number))[1]["model_id"] for number in (0, 1)]
        await client.attach("one")
        for model in models:
            await client.turn("one", WorkResult(f"{model}:0", Acknowledged()))
        new = {"session_id": session, "base_model": "tiny"}
        sampler = (await client.post("create_sampling_session", {**new, "sampling_session_seq_id": 0}))[1]
        save = {"model_id": models[0], "seq_id": 1, "sampling_session_seq_id": 0}
        assert (await client.post("save_weights_for_sampler", save))[0] == 200
        _, result = await client.post("retrieve_future", {"request_id": f"{models[0]}:1"})
        assert "choose another number" in result.get("error", "")
        save = {**save, "seq_id": 2, "sampling_session_seq_id": 1}
        for other in ({}, {"seq_id": 2, "sampling_session_seq_id": 5}, {"model_id": models[1], "seq_id": 1}):
            assert (await client.post("save_weights_for_sampler", save | other))[0] == 200
        _, result = await client.post("retrieve_future", {"request_id": f"{models[1]}:1"})
        assert "choose another number" in result.get("error", ""), "an open save of the session has it"
        status, refusal = await client.post("create_sampling_session", {**new, "sampling_session_seq_id": 1})
        assert (status, "choose another number" in refusal.get("detail", "")) == (400, True)
        await client.turn("one")
        await client.turn("one", WorkResult(f"{models[0]}:2", SaveResult(10)))
        _, made = await client.post("retrieve_future", {"request_id": f"{models[0]}:2"})
        assert made["sampling_session_id"] == f"{session}:sample:1", "a retry with another number is the same request"
        assert client.registry.catalog.samplers[sampler["sampling_session_id"]].path == "", "it samples from the base"

    with_gateway(tmp_path, play)


def test_a_request_that_is_too_large_is_refused_whatever_it_says_of_its_length(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        async def chunks() -> Any:
            for _ in range(20):
                yield b"x" * 8192

        async with client.http.post("/api/v1/forward_backward", data=chunks(), headers=ADA) as answer:
            assert answer.status == 413

    with_gateway(tmp_path, play)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"[" * 20_000, 400, "nested too deeply"),
        (b'{"a":' * 9_000 + b"1" + b"}" * 9_000, 400, "nested too deeply"),
        (b"[]", 400, "no JSON object"),
        (b'{"a": [NaN]}', 400, "malformed"),
        (b'{"a": [' + b"[]," * json_limits.MAX_PARTS + b"[]]}", 413, "lists, objects and keys"),
        (b"{" + b'"a":0,' * json_limits.MAX_PARTS + b'"b":0}', 413, "lists, objects and keys"),
        (b'"' + b"x" * json_limits.MAX_JSON + b'"', 413, "larger than what JSON may have"),
    ],
    ids=["deep lists", "deep objects", "a list", "no number", "many lists", "many keys", "large"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "zstd"])
def test_json_that_would_hold_up_others_is_refused_before_it_is_parsed(
    body: bytes, status: int, said: str, packed: bool, tmp_path: Path
) -> None:
    headers = ADA | ({"Content-Encoding": "zstd"} if packed else {})
    data = zstandard.ZstdCompressor().compress(body) if packed else body

    async def play(client: Client) -> None:
        async with client.http.post("/api/v1/create_session", data=io.BytesIO(data), headers=headers) as answer:
            told = (await answer.json())["detail"]
            assert answer.status == status, told
            assert said in told or "bytes when decompressed" in told

    with_gateway(tmp_path, play, request_bytes=1 << 24)


@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_ends_in_the_middle_of_an_upload_or_a_poll_is_no_error_of_the_gateway(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, reset: bool
) -> None:
    monkeypatch.setattr("pipeline.tinker.routes.future_routes.HOLD_SECONDS", 0.2)

    async def play(client: Client) -> None:
        model = (await client.model(await client.session()))[1]["model_id"]
        poll = json.dumps({"request_id": f"{model}:0"}).encode()
        for route, length, body in (
            ("forward_backward", 60000, b"x" * 30000),
            ("optim_step", 60000, b"x" * 30000),
            ("retrieve_future", len(poll), poll),
        ):
            _, writer = await asyncio.open_connection("127.0.0.1", client.http.port)
            head = f"POST /api/v1/{route} HTTP/1.1\r\nHost: x\r\nX-API-Key: tml-ada\r\nContent-Length: {length}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.transport.abort() if reset else writer.close()
        await asyncio.sleep(0.1)
        assert await client.session(), "others go on"

    with_gateway(tmp_path, play)
    assert [each.message for each in caplog.records if each.levelname == "ERROR"] == []
