"""Fields of requests that a gateway honors or refuses, over HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pipeline.tinker.service_state import ModelRegistry
from pipeline.tinker.tinker_records import Acknowledged, SaveResult, WorkResult
from tests.unit.tinker.gateway_case import ADA, Client, with_gateway

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}


async def made(client: Client, **body: Any) -> str:
    """A model that a trainer has."""
    session = await client.session()
    fields = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}, **body}
    model = str((await client.post("create_model", fields))[1]["model_id"])
    await client.attach("one")
    await client.turn("one")
    await client.turn("one", WorkResult(f"{model}:0", Acknowledged()))
    return model


async def get(client: Client, route: str, **headers: str) -> Any:
    async with client.http.get(f"/api/v1/{route}", headers=ADA | headers) as answer:
        return await answer.json()


def params(**given: Any) -> dict[str, Any]:
    return {"sampling_params": given}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"num_samples": True}, "num_samples"),
        ({"num_samples": "3"}, "num_samples"),
        ({"num_samples": 13}, "num_samples=13; expected 1 to 12 (inference.max_sequences)"),
        *[({"prompt": {"chunks": [{"tokens": bad}]}}, "tokens") for bad in ("abc", [1.5], [True], [10**30], [-1])],
        ({"prompt": {"chunks": [5]}}, "prompt"),
        ({"prompt": [1]}, "prompt"),
        ({"sampling_params": []}, "sampling_params"),
        (params(max_tokens="x"), "max_tokens"),
        (params(max_tokens=0), "max_tokens"),
        (params(temperature="hot"), "temperature"),
        (params(temperature=None), "temperature"),
        (params(temperature=3), "temperature"),
        (params(top_p=0), "top_p"),
        (params(top_k=1.5), "top_k"),
        *[(params(stop=bad), "stop") for bad in (5, {"a": 1}, [1, "a"], ["a", 1], [[1]], "", [""])],
        ({"topk_sample_logprobs": "x"}, "topk_sample_logprobs"),
        ({"topk_prompt_logprobs": [1]}, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": -3}, "topk_sample_logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        *[({"prompt_logprobs": True, "prompt_logprobs_last_n": bad}, "last_n") for bad in ("a", -2, 0, 3)],
        ({"prompt_logprobs_last_n": 1}, "set prompt_logprobs"),
        (params(seed="x"), "seed"),
        (params(seed=1.5), "seed"),
        ({"record_stability_info": True}, "record_stability_info"),
    ],
)
def test_a_malformed_field_of_a_sample_is_refused_by_name(body: dict[str, Any], named: str, tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        given = {"session_id": await client.session(), "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = (await client.post("create_sampling_session", given))[1]["sampling_session_id"]
        asked = {"sampling_session_id": sampler, "seq_id": 1, "prompt": PROMPT, "sampling_params": {}}
        status, refusal = await client.post("asample", asked | body)
        assert (status, named in refusal.get("detail", "")) == (400, True), refusal
        assert "malformed" not in refusal["detail"]
        assert (await client.post("asample", asked))[0] == 200, "its number is not used"

    with_gateway(tmp_path, play)


@pytest.mark.parametrize(
    ("lora", "named"),
    [
        ({"rank": True}, "lora_config.rank"),
        ([], "lora_config"),
        ({"rank": 4, "seed": "x"}, "lora_config.seed"),
        ({"rank": 4, "seed": 1 << 70}, "lora_config.seed"),
        ({"rank": 4, "train_mlp": "no"}, "train_mlp"),
    ],
)
def test_a_malformed_field_of_an_adapter_is_refused_by_name(lora: Any, named: str, tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        session = await client.session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
        status, refusal = await client.post("create_model", body)
        assert (status, named in refusal.get("detail", "")) == (400, True), refusal

    with_gateway(tmp_path, play)


def test_a_learning_rate_of_true_is_refused_by_the_name_that_clients_have_for_it(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await made(client)
        await client.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": True}})
        _, result = await client.post("retrieve_future", {"request_id": f"{model}:1"})
        assert "learning_rate=True" in result["error"]

    with_gateway(tmp_path, play)


def test_the_future_of_an_unload_is_answered_once_the_trainer_has_forgotten_the_model(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await made(client)
        assert (await client.post("retrieve_future", {"request_id": f"{model}:unload"}))[0] == 404
        _, future = await client.post("unload_model", {"model_id": model})
        asked = asyncio.create_task(client.post("retrieve_future", {"request_id": future["request_id"]}))
        _, work = await client.turn("one")
        assert work is not None
        assert not asked.done()
        await client.turn("one", WorkResult(work.request, Acknowledged()))
        assert await asked == (200, {"type": "unload_model", "model_id": model})
        assert ModelRegistry(client.kept).models[model].unloaded.is_set(), "nor does it wait after a start"

    with_gateway(tmp_path, play)


def test_addresses_of_downloads_have_a_scheme_of_http_whatever_a_proxy_says(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await made(client)
        await client.post("save_weights_external", {"model_id": model, "seq_id": 1, "path": "mine"})
        await client.turn("one")
        await client.turn("one", WorkResult(f"{model}:1", SaveResult(10)))
        (saved,) = client.registry.catalog.checkpoints.values()
        (tmp_path / "weights" / saved.folder).mkdir(parents=True)
        (tmp_path / "weights" / saved.folder / "file").touch()
        route = f"training_runs/{model}/checkpoints/external_weights/mine/external_weights_urls"
        for told, scheme in (("javascript", "http"), ("https", "https")):
            urls = (await get(client, route, **{"X-Forwarded-Proto": told}))["urls"]
            assert urls["file"].startswith(f"{scheme}://")
        (listed,) = (await get(client, "checkpoints"))["checkpoints"]
        assert listed["checkpoint_type"] == "external"

    with_gateway(tmp_path, play)


def test_a_resume_takes_the_options_that_there_are_and_refuses_the_others_by_name(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await made(client)
        await client.post("save_weights", {"model_id": model, "seq_id": 1, "path": "mine"})
        await client.turn("one")
        await client.turn("one", WorkResult(f"{model}:1", SaveResult(10)))
        path = f"tinker://{model}/weights/mine"
        body = {"session_id": await client.session(), "model_seq_id": 0, "path": path, "optimizer": True}
        wrong: dict[str, Any] = {
            "base_model": "gpt-17",
            "optimizer_config": {"type": "dimuon", "version": 1},
            "weights_access_token": "token",
        }
        for name, value in wrong.items():
            status, refusal = await client.post("load_weights", body | {name: value})
            assert (status, name in refusal.get("detail", "")) == (400, True), (name, refusal)
        given = {"base_model": "tiny", "optimizer_config": {"type": "adamw"}, "user_metadata": {"run": "r2"}}
        status, future = await client.post("load_weights", body | given)
        assert status == 200
        assert (await get(client, f"training_runs/{future['model_id']}"))["user_metadata"] == {"run": "r2"}

    with_gateway(tmp_path, play)


def test_sampling_clients_whose_weights_change_are_refused_by_name(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await made(client)
        save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "inflight"}
        await client.post("save_weights_for_sampler", save)
        _, result = await client.post("retrieve_future", {"request_id": f"{model}:1"})
        assert "kind='inflight' is not served" in result.get("error", "")

    with_gateway(tmp_path, play)


def test_metadata_of_sessions_and_models_are_told_again_also_after_a_start(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        _, opened = await client.post("create_session", {"user_metadata": {"who": "ada"}})
        assert (await get(client, f"sessions/{opened['session_id']}"))["user_metadata"] == {"who": "ada"}
        model = await made(client, user_metadata={"run": "r1"})
        assert (await get(client, f"training_runs/{model}"))["user_metadata"] == {"run": "r1"}
        again = ModelRegistry(client.kept)
        assert again.models[model].fact.metadata == {"run": "r1"}
        assert again.sessions[opened["session_id"]].metadata == {"who": "ada"}
        status, refusal = await client.post("create_session", {"user_metadata": {"who": 5}})
        assert (status, "user_metadata" in refusal.get("detail", "")) == (400, True)

    with_gateway(tmp_path, play)


def test_the_time_of_the_last_request_moves_with_requests(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await made(client)
        first = (await get(client, f"training_runs/{model}"))["last_request_time"]
        await client.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
        assert (await get(client, f"training_runs/{model}"))["last_request_time"] > first

    with_gateway(tmp_path, play)


def test_a_rank_of_0_is_a_whole_model_which_is_refused_where_it_is_off(tmp_path: Path) -> None:
    async def refused(client: Client) -> None:
        for lora in ({"rank": 0}, None):
            body = {"session_id": await client.session(), "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
            status, refusal = await client.post("create_model", body)
            assert (status, "serve.whole_models" in refusal["detail"]) == (400, True)

    with_gateway(tmp_path / "off", refused)

    async def saved(client: Client, says: str) -> None:
        session = await client.session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 0}}
        _, future = await client.post("create_model", body)
        model = future["model_id"]
        assert client.registry.models[model].fact.adapter.rank == 0
        await client.attach("one")
        await client.turn("one", WorkResult(f"{model}:0", Acknowledged()))
        await client.post("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "mine"})
        _, result = await client.post("retrieve_future", {"request_id": f"{model}:1"}) if says else (0, {"error": ""})
        assert says in result["error"]

    with_gateway(tmp_path / "without", lambda client: saved(client, "serve.whole_servers"), whole_models=True)
    with_gateway(tmp_path / "with", lambda client: saved(client, ""), whole_models=True, whole_servers=1)
