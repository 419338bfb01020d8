"""What keys used, as clients and the run's owner are told."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import ConfigError
from pipeline.tinker import tinker_wire
from pipeline.tinker.durable_store import Store
from pipeline.tinker.gateway_settings import Address
from pipeline.tinker.routes.usage_routes import ALL
from pipeline.tinker.tinker_records import Failed, PassResult, StepResult, WorkResult
from pipeline.tinker.trainer_routes import SECRET
from pipeline.tinker.usage_meter import KEPT_DAYS, Usage, UsageMeter
from slurm.submission.usage_table import ask_usage, usage_lines
from tests.unit.tinker.gateway_case import ADA, BOB, Client, with_gateway
from tests.unit.tinker.test_openai import MESSAGES, Script, ask, events, torn, with_script

DAY = 86400.0


async def used(client: Client, headers: dict[str, str] = ADA) -> dict[str, float]:
    async with client.http.get("/api/v1/usage", headers=headers) as answer:
        body = await answer.json()
    assert body["total"] == (sum_of(body["days"]) if body["days"] else dict.fromkeys(body["total"], 0))
    total: dict[str, float] = body["total"]
    return total


def sum_of(days: dict[str, dict[str, float]]) -> dict[str, float]:
    (only,) = days.values()
    return only


async def submit_pass(client: Client, model: str, seq: int, *, forward_only: bool) -> int:
    """Of two sequences, five tokens together."""
    proto = tinker_wire.protocol()
    message = proto.ForwardBackwardRequest(
        model_id=model, seq_id=seq, loss_fn="cross_entropy", forward_only=forward_only
    )
    for length in (3, 2):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.arange(length, dtype="<i4").tobytes()
        tensor = proto.Tensor(dense=np.arange(length).tobytes(), dtype=2, shape=[length])
        datum.loss_fn_inputs["target_tokens"].CopyFrom(tensor)
    body = message.SerializeToString()
    async with client.http.post("/api/v1/forward_backward", data=body, headers=ADA) as answer:
        return answer.status


def test_passes_and_steps_count_once_and_failures_never(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        path = await client.adapter()
        model = path.removeprefix("tinker://").partition("/")[0]
        before = await used(client)
        assert before["requests"] == 2  # the model and its save
        for seq, forward_only in ((2, False), (3, True), (4, False)):
            assert await submit_pass(client, model, seq, forward_only=forward_only) == 200
        await client.post("optim_step", {"model_id": model, "seq_id": 5, "adam_params": {}})
        work = (await client.turn("one"))[1]
        for seq, result in enumerate(
            (PassResult([], [], {}), PassResult([], [], {}), Failed("no", "user"), StepResult({})), 2
        ):
            assert work
            assert work.seq == seq
            done = WorkResult(work.request, result)
            work = (await client.turn("one", done, done))[1]
        after = await used(client)
        assert (after["requests"], after["trained_tokens"], after["scored_tokens"]) == (5, 5, 5)
        assert after["trainer_seconds"] > before["trainer_seconds"] > 0
        await client.attach("two")
        while (work := (await client.turn("two"))[1]) is not None:
            await client.turn("two", WorkResult(work.request, PassResult([], [], {})))
        assert await used(client) == after, "what is done again counts nothing"
        assert (await used(client, BOB))["requests"] == 0

    with_gateway(tmp_path, play)


def test_chats_count_also_when_their_stream_is_torn(tmp_path: Path) -> None:
    async def play(client: Client, script: Script) -> None:
        body = {"model": "tiny", "messages": MESSAGES}
        await ask(client, body)
        await events(client, body)
        script.answers = [torn]
        await events(client, body)
        total = await used(client)
        assert (total["requests"], total["prompt_tokens"], total["sampled_tokens"]) == (3, 9, 6)
        async with client.http.get(ALL, headers={SECRET: "secret"}) as answer:
            assert [(each["name"], each["total"]) for each in await answer.json()] == [("ada", total)]
        async with client.http.get(ALL, headers={SECRET: "other"}) as answer:
            assert answer.status == 401
        url = f"http://127.0.0.1:{client.http.port}"
        (told,) = await asyncio.to_thread(ask_usage, Address(url=url, secret="secret", pid=1))
        assert told["total"] == total
        assert "ada " in usage_lines([told])[1]

    with_script(tmp_path, play)


def test_no_gateway_is_said_in_one_line() -> None:
    with pytest.raises(ConfigError, match="a running gateway"):
        ask_usage(Address(url="http://127.0.0.1:9", secret="secret", pid=1))


def test_counts_outlive_the_process_until_they_are_old(tmp_path: Path) -> None:
    async def keep(now: float, add: int) -> Usage:
        kept = Store(tmp_path / "store.sqlite")
        meter = UsageMeter(kept, lambda: now)
        if add:
            meter.count("ada lovelace", Usage(sampled_tokens=add))
        await meter.flush()
        kept.close()
        return meter.total("ada lovelace")

    assert asyncio.run(keep(0.0, 5)).sampled_tokens == 5
    assert asyncio.run(keep(DAY, 7)).sampled_tokens == 12
    assert asyncio.run(keep(DAY * (KEPT_DAYS + 1), 0)).sampled_tokens == 7
