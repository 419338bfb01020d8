"""The client's policy, against small HTTP servers that misbehave as told."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import DeadlineError, RolloutError
from pipeline.rollout.generate_wire import FINAL_ONLY
from pipeline.rollout.server_client import Completion, Server
from pipeline.rollout.server_pool import InferenceClient
from pipeline.utils import backoff
from pipeline.utils.poison_request import MAX_SERVER_CRASHES
from tests.fakes.mortal_server import POISON, a_mortal_server
from tests.fakes.scripted_server import (
    Answer,
    Script,
    always,
    answer,
    ask,
    choice,
    client_and,
    hangs_up,
    never_answers,
    older_choice,
    run,
    with_status,
    works,
)


def test_a_request_says_exactly_how_to_sample_and_proves_that_it_may() -> None:
    async def story(script: Script) -> list[Completion]:
        async with client_and(script) as client:
            return await ask(client, n=2)

    script = Script([works])
    completions = run(story(script))
    assert script.authorizations == ["Bearer s3cret"]
    (body,) = script.bodies
    assert body == {
        "model": "policy",
        "token_ids": [1, 2, 3],
        "sampling_params": {
            "n": 2,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": 0,
            "max_tokens": 4,
            "stop_token_ids": [2],
            "logprobs": 0,
            "detokenize": False,
            "output_kind": FINAL_ONLY,
        },
        "cache_salt": "5",
    }
    assert [completion.tokens for completion in completions] == [(7, 7, 7, 7)] * 2
    assert completions[0].logprobs == (-0.5,) * 4
    assert (completions[0].version_min, completions[0].version_max) == (5, 5)
    assert completions[0].server == script.endpoint


def test_a_release_that_says_no_versions_had_those_between_question_and_answer() -> None:
    async def story(script: Script) -> list[Completion]:
        async with client_and(script) as client:

            async def updated_meanwhile(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
                client.update(script.endpoint, 6)
                return answer(older_choice([7, 8]))

            script.answers = [updated_meanwhile]
            return await ask(client, n=1)

    (completion,) = run(story(Script([])))
    assert (completion.tokens, completion.logprobs) == ((7, 8), (-0.5, -0.5))
    assert (completion.version_min, completion.version_max) == (5, 6)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (always(older_choice([7, 8], named=[7, 9])), "malformed answer"),
        (with_status(500), "status 500"),
        (with_status(503), "status 503"),
        (with_status(429), "status 429"),
        (hangs_up, "disconnected"),
        (always(choice([7], version="default")), "stale weights"),
        (always(choice([7], version="4")), "stale weights"),
        (always(choice([7]), choice([7])), "malformed answer"),
        (always({"index": 0}), "malformed answer"),
        (always(choice([7]) | {"token_ids": [8]}), "malformed answer"),
        (always(choice([7]) | {"finish_reason": "error"}), "malformed answer"),
    ],
)
def test_what_fails_for_now_is_tried_again_and_counted_by_its_reason(failure: Answer, reason: str) -> None:
    async def story() -> InferenceClient:
        async with client_and(Script([failure, failure, works])) as client:
            assert [completion.tokens for completion in await ask(client)] == [(7, 7, 7, 7)]
            return client

    assert run(story()).retries == {reason: 2}


NAN = "Out of range float values are not JSON compliant: nan"


@pytest.mark.parametrize(
    ("failure", "words"),
    [(with_status(500, NAN), f"status 500: {NAN}"), (always({"index": 0}), "malformed answer")],
)
def test_what_live_servers_always_answer_with_an_error_is_given_up_after_a_time(failure: Answer, words: str) -> None:
    async def story(script: Script) -> None:
        async with client_and(script, server_seconds=0.3) as client:
            with pytest.raises(RolloutError, match=r"live servers answered with errors for 0\.3 s; 127") as raised:
                await asyncio.wait_for(ask(client), 10)
            assert str(raised.value).endswith(words)
            assert len(script.bodies) > 2

    run(story(Script([failure])))


def test_a_server_that_is_gone_between_its_errors_is_waited_for() -> None:
    async def story() -> InferenceClient:
        script = Script([*[with_status(500), hangs_up] * 3, works])
        async with client_and(script, server_seconds=0.3) as client:
            assert [completion.tokens for completion in await ask(client)] == [(7, 7, 7, 7)]
            return client

    assert run(story()).retries == {"status 500": 3, "disconnected": 3}


def test_a_server_that_does_not_answer_in_time_is_given_up_for_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.rollout.server_client.INTERRUPTION_SECONDS", 0.1)

    async def story() -> InferenceClient:
        async with client_and(Script([never_answers, works]), seconds=0.2) as client:
            await ask(client)
            return client

    assert run(story()).retries == {"timed out": 1}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"error": {"message": "token 99 is out of vocabulary", "code": 400}}', "token 99 is out of vocabulary"),
        ('{"error": "no such thing"}', "no such thing"),
        ("plain words", "plain words"),
        ("[1]", r"\[1\]"),
    ],
)
def test_what_can_never_work_is_an_error_in_the_servers_own_words(body: str, words: str) -> None:
    async def story() -> InferenceClient:
        async with client_and(Script([with_status(400, body)])) as client:
            with pytest.raises(RolloutError, match=words):
                await ask(client)
            return client

    assert run(story()).retries == {}


@pytest.mark.parametrize("tokens", [[], [-1], [17], [1, 2, 400]])
def test_tokens_that_would_kill_a_server_are_never_sent(tokens: list[int]) -> None:
    async def story(script: Script) -> None:
        async with client_and(script, vocabulary=17) as client:
            with pytest.raises(RolloutError):
                await client.generate(tokens, n=1, temperature=1.0, max_tokens=1, stop_token_ids=[])

    script = Script([works])
    run(story(script))
    assert script.bodies == []


def test_an_aborted_sample_goes_on_where_it_stopped_and_the_others_of_its_group_are_kept() -> None:
    async def story(script: Script) -> list[Completion]:
        async with client_and(script) as client:
            return await ask(client, n=3)

    half = answer_of(choice([7, 7, 7, 7]), choice([4, 4], "abort"), choice([], "abort"))
    later = {5: always(choice([6], "abort", "6")), 3: always(choice([9, 9, 9, 9], version="6")), 6: works}

    async def by_length(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await later[len(body["token_ids"])](request, body)

    script = Script([half, by_length])
    whole, aborted, unbegun = run(story(script))
    assert whole.tokens == (7, 7, 7, 7)
    assert sorted(len(body["token_ids"]) for body in script.bodies) == [3, 3, 5, 6]
    last = next(body for body in script.bodies if len(body["token_ids"]) == 6)
    assert last["token_ids"] == [1, 2, 3, 4, 4, 6]
    assert last["sampling_params"]["max_tokens"] == 1
    assert (aborted.tokens, aborted.finish) == ((4, 4, 6, 7), "length")
    assert (aborted.version_min, aborted.version_max, aborted.versions) == (5, 6, (5, 5, 6, 5))
    assert len(aborted.logprobs) == 4
    assert (unbegun.tokens, unbegun.version_min) == ((9, 9, 9, 9), 6)


def test_each_token_has_the_version_of_its_span() -> None:
    async def story() -> list[Completion]:
        async with client_and(Script([always(straddling)])) as client:
            return await ask(client)

    spans = [{"version": "5", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 4}]
    straddling = choice([7, 7, 7, 7]) | {"weight_versions": spans}
    (completion,) = run(story())
    assert (completion.versions, completion.version_max) == ((5, 7, 7, 7), 7)


def test_a_release_without_spans_has_them_beside_its_log_probabilities() -> None:
    """Or none, where a token's version is not known: then each may be as old as the question."""

    async def story(spans: Any) -> list[Completion]:
        tokens = [{"token": "token_id:7", "logprob": -0.5}] * 4
        said = {"token_ids": [7] * 4, "finish_reason": "length", "logprobs": {"content": tokens} | spans}
        async with client_and(Script([always(said)])) as client:
            return await ask(client)

    spans = [{"version": "5", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 4}]
    (told,), (untold,) = run(story({"weight_versions": spans})), run(story({"weight_versions": None}))
    assert (told.versions, told.version_max) == ((5, 7, 7, 7), 7)
    assert (untold.versions, untold.version_max) == ((5, 5, 5, 5), 5)


def answer_of(*choices: dict[str, Any]) -> Answer:
    return always(*(one | {"index": index} for index, one in enumerate(choices)))


def test_a_sample_aborted_at_its_last_token_is_whole() -> None:
    async def story() -> list[Completion]:
        async with client_and(Script([always(choice([7, 7, 7, 7], "abort"))])) as client:
            return await ask(client)

    (completion,) = run(story())
    assert (completion.tokens, completion.finish) == ((7, 7, 7, 7), "length")


def test_who_may_ask_no_server_is_told_which_have_no_weights() -> None:
    async def story(script: Script) -> None:
        async with client_and(script, server_seconds=0.1) as client:
            client.update(script.endpoint, None)
            with pytest.raises(DeadlineError, match=f"may be asked; missing: weights on {script.endpoint}$"):
                await ask(client)
            client.update(script.endpoint, 5)
            assert (await ask(client))[0].tokens == (7, 7, 7, 7)

    run(story(Script([works])))


def test_the_least_loaded_server_is_asked() -> None:
    async def story(busy: Script, idle: Script) -> None:
        async with client_and(busy, idle) as client:
            client.update(idle.endpoint, None)
            stuck = asyncio.create_task(ask(client, n=8))
            while not busy.bodies:
                await asyncio.sleep(0.001)
            client.update(idle.endpoint, 5)
            for _ in range(5):
                await ask(client)
            stuck.cancel()

    busy, idle = Script([never_answers]), Script([works])
    run(story(busy, idle))
    assert len(idle.bodies) == 5


def test_requests_on_an_evicted_server_go_elsewhere_at_once() -> None:
    async def story(dead: Script, alive: Script) -> InferenceClient:
        async with client_and(dead, alive) as client:
            client.update(alive.endpoint, None)
            requests = [asyncio.create_task(ask(client)) for _ in range(4)]
            while len(dead.bodies) < 4:
                await asyncio.sleep(0.001)
            client.update(alive.endpoint, 5)
            client.update(dead.endpoint, None)
            await asyncio.gather(*requests)
            return client

    client = run(story(Script([never_answers]), alive := Script([works])))
    assert client.retries == {"evicted": 4}
    assert len(alive.bodies) == 4


def test_a_server_too_far_behind_the_newest_weights_is_not_asked() -> None:
    async def story(old: Script, new: Script) -> None:
        async with client_and(old, new, max_lag=1) as client:
            client.update(new.endpoint, 7)
            for _ in range(6):
                await ask(client)

    old, new = Script([works]), Script([always(choice([7] * 4, version="7"))])
    run(story(old, new))
    assert (len(old.bodies), len(new.bodies)) == (0, 6)


class Looked(dict[str, Server]):
    """Servers that count how often all of them are looked at."""

    times = 0

    def values(self) -> Any:
        self.times += 1
        return super().values()


def test_thousands_of_servers_are_looked_at_once_a_change_and_not_once_each() -> None:
    async def story() -> None:
        names = [f"10.0.{index // 250}.{index % 250}:30000" for index in range(4096)]
        client = InferenceClient(names, "s3cret", 5.0)
        looked = client._servers = Looked(client._servers)
        for version in (1, 1, 1, 2):
            for name in names:
                client.update(name, version)
            assert (await client._chosen("", 1)).version == version
        assert looked.times == 2, "the versions changed twice"
        assert len({(await client._chosen("", 1)).endpoint for _ in range(64)}) > 32, "any of them may be the one"

    run(story())


def test_a_server_that_fails_at_once_does_not_draw_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "pause_after", lambda failures: 60.0)  # as if the machine were infinitely fast

    async def story(broken: Script, sound: Script) -> None:
        async with client_and(broken, sound) as client:
            await asyncio.gather(*(ask(client) for _ in range(50)))
            for _ in range(50):
                await ask(client)

    broken, sound = Script([with_status(500)]), Script([works])
    run(story(broken, sound))
    assert len(sound.bodies) == 100
    assert len(broken.bodies) < 40


def test_a_request_that_servers_die_of_is_given_up_and_takes_no_other_with_it() -> None:
    async def story() -> None:
        async with a_mortal_server() as server, InferenceClient([server.endpoint], "s3cret", 5.0) as client:
            client.update(server.endpoint, 5)
            asked = [
                client.generate([1, token], n=1, temperature=1.0, max_tokens=4, stop_token_ids=[2])
                for token in (4, 5, POISON, 6)
            ]
            *sound, last = await asyncio.gather(*(asked[at] for at in (0, 1, 3, 2)), return_exceptions=True)
            assert [isinstance(each, list) for each in sound] == [True] * 3, sound
            assert isinstance(last, RolloutError)
            assert f"{MAX_SERVER_CRASHES} servers crashed" in str(last)
            assert server.deaths == MAX_SERVER_CRASHES

    run(story())


def test_a_request_whose_connection_is_cut_again_and_again_is_never_given_up() -> None:
    async def story(script: Script) -> list[Completion]:
        async with client_and(script) as client:
            return await ask(client)

    assert run(story(Script([*[hangs_up] * (2 * MAX_SERVER_CRASHES), works])))[0].complete


completions = st.builds(
    Completion,
    tokens=(tokens := st.lists(st.integers(0, 9), max_size=5).map(tuple)),
    logprobs=tokens,
    finish=st.sampled_from(["stop", "length", "abort"]),
    version_min=(version := st.integers(0, 9)),
    version_max=version,
    server=st.just("s"),
    seconds=st.floats(0, 9),
)


@given(completions, completions)
def test_two_parts_make_one_sample_that_hides_no_version(first: Completion, then: Completion) -> None:
    whole = first.followed_by(then)
    assert whole.tokens == first.tokens + then.tokens
    assert whole.finish == then.finish
    assert whole.version_min <= then.version_min
    assert not first.tokens or whole.version_min <= first.version_min
    assert whole.version_max >= max(first.version_max, then.version_max)
