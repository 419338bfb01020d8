"""The judge: what it is asked, how its verdict is read, and what a judge that fails costs."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pipeline.config import RewardConfig
from pipeline.environments.llm_judge import judge, score_in
from pipeline.environments.rewards import check_rewards
from pipeline.errors import ConfigError
from tests.fakes.async_server import ADDRESS, serving
from tests.unit.environments.test_tasks import arithmetic

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]
ASKED = [{"role": "user", "content": "What is 2+2?"}]


def said(verdict: str) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": verdict}}]})


def judged(answering: Answering, completions: list[Any], **options: Any) -> list[float]:
    async def story() -> list[float]:
        async with serving({"/v1/chat/completions": answering}) as port:
            url = f"http://{ADDRESS}:{port}/v1/"
            asked = [ASKED] * len(completions)
            return await judge(asked, completions, ["4"] * len(completions), url=url, model="m", **options)

    return asyncio.run(story())


def test_a_judge_sees_question_answer_and_truth_and_its_score_is_a_fraction(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def answering(request: web.Request) -> web.Response:
        seen.append((request.headers["Authorization"], await request.json()))
        return said(
            "It is right.\n**Score: 8**" if "[assistant] 4" in seen[-1][1]["messages"][0]["content"] else "Score: 0"
        )

    (tmp_path / "key").write_text("secret\n")
    completions = [[{"role": "assistant", "content": "4"}], "five"]
    assert judged(answering, completions, key_file=str(tmp_path / "key")) == [0.8, 0.0]
    (key, body), _ = seen
    assert (key, body["model"], body["temperature"]) == ("Bearer secret", "m", 0.0)
    text = body["messages"][0]["content"]
    assert "[user] What is 2+2?" in text
    assert "# The right answer\n4\n" in text


def test_all_samples_of_a_prompt_are_judged_at_once() -> None:
    there = asyncio.Semaphore(0)

    async def answering(request: web.Request) -> web.Response:
        there.release()
        while there._value < 3:
            await asyncio.sleep(0.001)
        return said("Score: 5")

    assert judged(answering, ["a", "b", "c"]) == [0.5] * 3


def test_a_busy_judge_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.environments.llm_judge.PAUSE_SECONDS", 0.0)
    answers = iter([web.Response(status=503), web.Response(status=429), said("Score: 10")])

    async def answering(request: web.Request) -> web.StreamResponse:
        return next(answers)

    assert judged(answering, ["4"]) == [1.0]


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (lambda: said("I would rather not."), "gave no score from 0 to 10: 'I would rather not.'"),
        (lambda: said("Score: 11"), "gave no score"),
        (lambda: web.Response(status=401, text="no key"), "refused with status 401: no key"),
        (lambda: web.Response(status=500), "answered with status 500"),
        (lambda: web.json_response({"choices": []}), "no chat completion"),
        (lambda: web.Response(text="<html>"), "no chat completion"),
    ],
)
def test_a_judge_that_gives_no_score_is_an_error_and_no_zero(
    response: Callable[[], web.Response], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.environments.llm_judge.PAUSE_SECONDS", 0.0)

    async def answering(request: web.Request) -> web.Response:
        return response()

    with pytest.raises((ValueError, ConnectionError), match=words):
        judged(answering, ["4"])


def test_a_judge_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.environments.llm_judge.PAUSE_SECONDS", 0.0)
    with socket.socket() as held:
        held.bind((ADDRESS, 0))
        url = f"http://{ADDRESS}:{held.getsockname()[1]}/v1"
        with pytest.raises(ConnectionError, match=f"the judge at {url}/chat/completions was not reached"):
            asyncio.run(judge([ASKED], ["4"], url=url, model="m"))


def test_the_last_score_counts() -> None:
    assert score_in("Score: 9? No.\nscore: 2.5", 5) == 0.5


def test_it_is_refused_without_a_url() -> None:
    config = RewardConfig(functions=("pipeline.environments.llm_judge:judge",))
    with pytest.raises(ConfigError, match=r"it needs model, url; give it in reward\.options\.judge"):
        check_rewards(config, arithmetic(), "arithmetic")
    given = config.model_copy(update={"options": {"judge": json.loads('{"url": "http://x", "model": "m"}')}})
    check_rewards(given, arithmetic(), "arithmetic")
