"""Requests to the servers, which are scripted here."""

import asyncio
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.tinker import durable_store, tinker_wire
from pipeline.tinker.api_errors import OverLimitError
from pipeline.tinker.durable_store import Store
from pipeline.tinker.entities import SampledWeights
from pipeline.tinker.sample_queue import FETCHED_SECONDS, UNFETCHED_SECONDS, SampleQueue
from pipeline.tinker.sampler import MAX_WRONG
from pipeline.tinker.tinker_records import Failed, ServerFacts
from pipeline.utils.poison_request import ABANDONED, MAX_SERVER_CRASHES
from pipeline.utils.subprocesses import hold_port
from tests.fakes.http_server import PASSWORD
from tests.fakes.mortal_server import POISON, a_mortal_server
from tests.unit.tinker.sampling_case import (
    MOST_ADAPTERS,
    PROMPT,
    SAMPLER,
    Script,
    sample,
    with_servers,
    write_adapter,
)


def test_the_sdk_reads_what_the_servers_said(tmp_path: Path) -> None:
    from tinker.proto.response_conv import deserialize_sample_response

    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        asked = {"num_samples": 2, "prompt_logprobs": True, "topk_prompt_logprobs": 1, "topk_sample_logprobs": 1}
        outcome = await sample(sampling, **asked)
        assert isinstance(outcome, bytes)
        answer = deserialize_sample_response(outcome)
        assert [each.tokens for each in answer.sequences] == [[4, 5], [4, 6]]
        assert [each.stop_reason for each in answer.sequences] == ["length", "stop"]
        assert answer.sequences[0].logprobs == [-0.5, -0.5]
        assert answer.prompt_logprobs == [None, -1.0, -2.0]
        likeliest = tinker_wire.protocol().SampleResponse.FromString(outcome).topk_prompt_logprobs
        assert np.frombuffer(likeliest.token_ids, "<i4").tolist() == [0, 7, 3]

    with_servers(tmp_path, play)


def test_the_prompt_before_its_last_tokens_has_no_logprobs_of_its_own_and_no_likeliest(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        outcome = await sample(sampling, prompt_logprobs=True, topk_prompt_logprobs=1, prompt_logprobs_last_n=1)
        assert isinstance(outcome, bytes)
        answer = tinker_wire.protocol().SampleResponse.FromString(outcome)
        assert np.isnan(np.frombuffer(answer.prompt_logprobs, "<f4")).tolist() == [True, True, False]
        assert np.frombuffer(answer.topk_prompt_logprobs.token_ids, "<i4").tolist() == [0, 0, 3]

    with_servers(tmp_path, play)


def test_a_server_holds_a_few_adapters_and_the_one_not_used_for_longest_leaves(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        for name in "abc":
            write_adapter(tmp_path, name)
        for number, folder in enumerate(("a", "b", "a", "c", "a", "b")):
            assert isinstance(await sample(sampling, number, folder), bytes)
        moves = [(path.split("/")[2][:4], body["lora_name"]) for path, body in scripts[0].asked if "lora" in path]
        expected = [("load", "a"), ("load", "b"), ("unlo", "b"), ("load", "c"), ("unlo", "c"), ("load", "b")]
        assert moves == expected

    with_servers(tmp_path, play)


def test_samples_that_need_more_adapters_at_once_than_a_server_may_hold_wait_in_turn(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        (script,) = scripts
        script.gate.clear()
        for name in "abcd":
            write_adapter(tmp_path, name)
        drawn = [asyncio.create_task(sample(sampling, number, folder)) for number, folder in enumerate("abcabd")]
        while len(script.held) < MOST_ADAPTERS:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert script.held == {"a", "b"}
        script.gate.set()
        assert all([isinstance(await each, bytes) for each in drawn])
        assert script.most_held == MOST_ADAPTERS

    with_servers(tmp_path, play)


def test_a_server_that_fails_for_a_moment_is_asked_again_and_one_that_refuses_is_not(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        scripts[0].statuses = [503, 429]
        assert isinstance(await sample(sampling, 0), bytes)
        assert len(scripts[0].asked) == 3
        scripts[0].statuses = [400]
        assert await sample(sampling, 1) == Failed("the server refuses: says the server", "user")
        assert await sample(sampling, 2, "gone") == Failed(
            "the checkpoint that this client samples from was removed", "user"
        )

    with_servers(tmp_path, play)


def test_a_server_that_is_lost_does_not_draw_the_requests_of_those_that_are_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.utils.backoff.pause_after", lambda failures: 60.0)  # as if the machine were fast

    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        free = hold_port()
        lost, sound = f"127.0.0.1:{free.getsockname()[1]}", sampling._servers[0]
        sampling.set_servers(ServerFacts((lost, sound.endpoint), PASSWORD))
        sampling._servers[1].running = 1  # the lost one, which fails at once, is always the least loaded
        asked = 0

        async def post(*given: Any, ask: Any = sampling._post) -> Any:
            nonlocal asked
            asked += given[0].endpoint == lost
            return await ask(*given)

        sampling._post = post  # type: ignore[method-assign]
        with closing(free):
            outcomes = await asyncio.gather(*(sample(sampling, number) for number in range(20)))
            assert all(isinstance(outcome, bytes) for outcome in outcomes)
            first = asked
            for number in range(20, 40):
                assert isinstance(await sample(sampling, number), bytes)
        assert asked == first, "nobody asks a server that rests while another is there"

    with_servers(tmp_path, play)


def test_a_retry_is_not_accepted_before_the_store_has_the_request(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        full = asyncio.Event()

        async def keep(*changes: Any) -> None:
            await full.wait()
            raise OverLimitError("no space")

        sampling._store.keep = keep  # type: ignore[method-assign]
        given = ("s:sample:0:0", SAMPLER, SampledWeights(), 0, {"prompt": PROMPT})
        tries = [asyncio.create_task(sampling.accept(*given)) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert not any(each.done() for each in tries)
        full.set()
        outcomes = await asyncio.gather(*tries, return_exceptions=True)
        assert [getattr(each, "status", None) for each in outcomes] == [429, 429]

    with_servers(tmp_path, play)


def test_a_request_that_cannot_be_kept_leaves_nothing_that_a_retry_would_wait_for(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        for _ in range(2):
            with pytest.raises(OverflowError):
                await asyncio.wait_for(sample(sampling, unknown=1 << 70), 10)
        assert isinstance(await sample(sampling), bytes)

    with_servers(tmp_path, play)


def test_no_more_samples_wait_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.tinker.sample_queue.MAX_WAITING", 2)

    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        async def ask(number: int) -> str:
            body = {"prompt": PROMPT, "num_samples": 1}
            return await sampling.accept(f"s:sample:0:{number}", SAMPLER, SampledWeights(), number, body)

        (script,) = scripts
        script.gate.clear()
        first, _ = await ask(0), await ask(1)
        with pytest.raises(OverLimitError) as refused:
            await ask(2)
        assert refused.value.status == 429
        assert await ask(0) == first, "a retry"
        sampling.cancel(first)
        assert isinstance(await sampling.result(first), Failed)
        third = await ask(2)
        script.gate.set()
        assert isinstance(await sampling.result(third), bytes)

    with_servers(tmp_path, play)


def test_requests_wait_for_servers_and_outlive_the_process(tmp_path: Path) -> None:
    async def accept(sampling: SampleQueue, scripts: list[Script]) -> None:
        sampling.set_servers(None)
        given = {"prompt": PROMPT, "num_samples": 1}
        await sampling.accept("s:sample:0:0", SAMPLER, SampledWeights(), 0, given)
        assert not scripts[0].asked

    async def answer(sampling: SampleQueue, scripts: list[Script]) -> None:
        assert isinstance(await sampling.result("s:sample:0:0"), bytes)

    with_servers(tmp_path, accept)
    with_servers(tmp_path, answer)


def test_a_sample_that_its_client_gives_up_is_stopped_and_forgotten(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        sampling.set_servers(None)
        id = await sampling.accept("s:sample:0:0", SAMPLER, SampledWeights(), 0, {"prompt": PROMPT})
        waiting = asyncio.create_task(sampling.result(id))
        await asyncio.sleep(0)
        sampling.cancel(id)
        assert await waiting == Failed("its client gave this sample up", "user")
        sampling._jobs[id].fetched -= FETCHED_SECONDS + 1
        await sampling.sweep()
        assert sampling.owner_of(id) is None

    with_servers(tmp_path, play)
    assert not list(Store(tmp_path / "store.sqlite").requests())


def test_samples_that_nobody_fetches_are_forgotten_after_a_while(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        id = await sampling.accept("s:sample:0:0", SAMPLER, SampledWeights(), 0, {"prompt": PROMPT})
        task = sampling._jobs[id].task
        assert task is not None
        await task
        await sampling.sweep()
        assert sampling.owner_of(id) == "ada"
        sampling._jobs[id].ended -= UNFETCHED_SECONDS + 1
        await sampling.sweep()
        assert sampling.owner_of(id) is None

    with_servers(tmp_path, play)


def test_a_sample_that_is_asked_for_again_while_it_is_forgotten_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": PROMPT, "num_samples": 1}

    async def accept(sampling: SampleQueue, scripts: list[Script]) -> None:
        sampling.set_servers(None)
        await sampling.accept("s:sample:0:0", SAMPLER, SampledWeights(), 0, body)

    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        (id,) = sampling._jobs
        sampling._jobs[id].ended -= UNFETCHED_SECONDS + 1
        with monkeypatch.context() as broken:
            broken.setattr(durable_store, "no_requests", lambda ids: [("DELETE FROM nowhere", ())])
            with pytest.raises(OverLimitError):
                await sampling.sweep()
        assert sampling.owner_of(id) == "ada", "the store did not forget it"
        sweeping = asyncio.create_task(sampling.sweep())
        await asyncio.sleep(0)
        assert await sampling.accept(id, SAMPLER, SampledWeights(), 0, body) == id
        await sweeping
        assert isinstance(await asyncio.wait_for(sampling.result(id), 10), bytes)
        assert sampling._store.body(id) is not None, "it is accepted, so it is stored"

    with_servers(tmp_path, accept)
    with_servers(tmp_path, play)


def test_a_sample_that_the_store_cannot_take_is_refused_again_when_it_is_retried(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        id = "s:sample:0:\ud800"
        for _ in range(2):
            accepted = sampling.accept(id, SAMPLER, SampledWeights(), 0, {"prompt": PROMPT})
            with pytest.raises(UnicodeEncodeError):
                await asyncio.wait_for(accepted, 10)
        assert sampling.owner_of(id) is None

    with_servers(tmp_path, play)


def test_the_adapter_of_a_sample_is_in_use_until_its_client_has_the_result(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        write_adapter(tmp_path, "a")
        id = await sampling.accept(
            "s:sample:0:0", SAMPLER, SampledWeights("a"), 0, {"prompt": PROMPT, "num_samples": 1}
        )
        task = sampling._jobs[id].task
        assert task is not None
        await task
        assert sampling.open_folders() == {"a"}, "a gateway that starts now draws it again"
        await sampling.result(id)
        assert sampling.open_folders() == set()

    with_servers(tmp_path, play)


def test_greedy_samples_are_drawn_once_and_told_as_often_as_asked(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        given = {"temperature": 0.0, "max_tokens": 4}
        outcome = await sample(sampling, num_samples=3, sampling_params=given)
        assert isinstance(outcome, bytes)
        assert len(tinker_wire.protocol().SampleResponse.FromString(outcome).sequences) == 3
        assert [body["sampling_params"]["n"] for _, body in scripts[0].asked] == [1]

    with_servers(tmp_path, play)


def test_a_sample_that_servers_die_of_fails_and_takes_no_other_with_it(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        async with a_mortal_server() as server:
            sampling.set_servers(ServerFacts((server.endpoint,), PASSWORD))
            prompts = [{"chunks": [{"type": "encoded_text", "tokens": [1, token]}]} for token in (4, 5, 6, POISON)]
            asked = (sample(sampling, number, prompt=prompt) for number, prompt in enumerate(prompts))
            *sound, last = await asyncio.wait_for(asyncio.gather(*asked), 30)
            assert all(isinstance(each, bytes) for each in sound)
            assert last == Failed(ABANDONED, "server")
            assert server.deaths == MAX_SERVER_CRASHES

    with_servers(tmp_path, play)


def test_servers_that_end_with_their_attempt_one_after_another_fail_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.utils.backoff.pause_after", lambda failures: 60.0)  # none is asked twice

    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        sound = sampling._servers[0].endpoint
        async with AsyncExitStack() as stack:
            ending = [
                await stack.enter_async_context(a_mortal_server(60.0, "earlier")) for _ in range(MAX_SERVER_CRASHES)
            ]
            sampling.set_servers(ServerFacts(tuple(each.endpoint for each in ending), "earlier"))
            asked = asyncio.create_task(sample(sampling))
            assert POISON in PROMPT["chunks"][0]["tokens"]  # type: ignore[operator]
            while sum(each.deaths for each in ending) < MAX_SERVER_CRASHES:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            assert not asked.done()
            sampling.set_servers(ServerFacts((sound,), PASSWORD))
            assert isinstance(await asyncio.wait_for(asked, 20), bytes)

    with_servers(tmp_path, play)


def test_an_answer_that_makes_no_sense_fails_its_sample_after_a_few_tries(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        scripts[0].answer = {"nothing": 1}
        outcome = await sample(sampling)
        assert isinstance(outcome, Failed)
        assert "makes no sense" in outcome.error
        assert (outcome.category, len(scripts[0].asked)) == ("server", MAX_WRONG)

    with_servers(tmp_path, play)
