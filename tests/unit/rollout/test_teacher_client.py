"""What a teacher says of groups: over real HTTP, with a server that is away, busy, refuses, or talks nonsense."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from pipeline.config import TeacherConfig
from pipeline.errors import DeadlineError, RolloutError
from pipeline.rollout.teacher_client import References, Teacher
from pipeline.transport.sample_records import Branch, Group, Sample
from tests.fakes.async_server import ADDRESS, serving

Fault = Callable[[web.Request], Awaitable[web.StreamResponse]]
ROUTE = "/v1/completions"


def a_sample(*tokens: int, branches: tuple[Branch, ...] = ()) -> Sample:
    count = len(tokens)
    return Sample(
        tokens=np.array(tokens, "<i4").tobytes(),
        sampled=np.array([0] + [1] * (count - 1), "u1").tobytes(),
        logprobs=np.array([0.0] + [-0.5] * (count - 1), "<f4").tobytes(),
        reward=0.0,
        version_min=0,
        version_max=0,
        finish="stop",
        branches=branches,
    )


def packed(*tokens: int) -> dict[str, bytes]:
    count = len(tokens)
    return {
        "tokens": np.array(tokens, "<i4").tobytes(),
        "sampled": np.ones(count, "u1").tobytes(),
        "logprobs": np.full(count, -0.5, "<f4").tobytes(),
    }


def likely(tokens: list[int]) -> list[Any]:
    """A log-probability that tells the token and its place; others beside it, as servers may send."""
    return [
        None,
        *(
            {str(token): {"logprob": -token - place / 16}, "99": {"logprob": -9}}
            for place, token in enumerate(tokens, 1)
        ),
    ]


class Served:
    """A teacher's server: faults first, then right answers, with the entries of `answers`."""

    def __init__(self, *faults: Fault, answers: Callable[[list[int]], list[Any]] = likely) -> None:
        self.faults, self.asked, self.answers = list(faults), list[dict[str, Any]](), answers
        self.keys = set[str | None]()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.keys.add(request.headers.get("Authorization"))
        if self.faults:
            return await self.faults.pop(0)(request)
        return web.json_response({"choices": [{"prompt_logprobs": self.answers(body["prompt"][1:])}]})


def status(code: int) -> Fault:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no such model"}}, status=code)

    return answer


def saying(value: Any) -> Fault:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=json.dumps(value))

    return answer


def said_of(
    served: Served, groups: list[Group], should_stop: Callable[[], bool] = lambda: False, **config: Any
) -> list[References | str] | None:
    async def story() -> list[References | str] | None:
        async with serving({ROUTE: served.answer}) as port:
            settings = TeacherConfig(url=f"http://{ADDRESS}:{port}/v1/", model="wise", **config)
            return await asyncio.to_thread(Teacher(settings).references, groups, should_stop)

    return asyncio.run(asyncio.wait_for(story(), 60))


def numbers(references: Any) -> list[list[float]]:
    return [np.frombuffer(row.logprobs, "<f4").tolist() for row in references]


def test_every_token_of_every_row_is_asked_for_and_the_first_has_none(tmp_path: Path) -> None:
    further = Branch(
        of=0,
        shared=2,
        **packed(8),
    )
    groups = [
        Group(position=0, prompt=0, samples=(a_sample(1, 2, 3, branches=(further,)), a_sample(4, 5))),
        Group(position=1, prompt=1, samples=(a_sample(6, 7),)),
    ]
    (tmp_path / "key").write_text("secret\n")
    served = Served()
    first, second = said_of(served, groups, key_file=str(tmp_path / "key")) or []
    assert numbers(first) == [[0, -2.0625, -3.125], [0, -2.0625, -8.125], [0, -5.0625]]
    assert numbers(second) == [[0, -7.0625]]
    assert served.keys == {"Bearer secret"}
    asked = {tuple(body.pop("prompt")) for body in served.asked}
    assert asked == {(1, 2, 3), (1, 2, 8), (4, 5), (6, 7)}
    wanted = {"model": "wise", "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    assert all(body == wanted for body in served.asked)


def scored(*entries: tuple[int, float]) -> dict[str, Any]:
    return {str(token): {"logprob": logprob, "rank": 1, "decoded_token": "x"} for token, logprob in entries}


def top_of(references: Any, top_k: int) -> list[tuple[list[list[int]], list[list[float]]]]:
    arrays = (row.top_tokens.arrays(top_k) for row in references)
    return [(ids.tolist(), logprobs.tolist()) for ids, logprobs in arrays]


def test_the_likeliest_tokens_come_for_sampled_ones_in_order_and_without_them() -> None:
    """A sampled token that is among them, one that is not, a prompt's, and a vocabulary with fewer than k."""
    sample = a_sample(1, 2, 3, 4, branches=(Branch(of=0, shared=4, **packed(5)),))
    served = Served(
        answers=lambda tokens: [
            None,
            scored((2, -0.5), (9, -2.0), (8, -1.0)),
            scored((3, -9.0), (7, -1.5), (9, -0.5), (8, -1.0)),
            scored((4, -0.25), (6, -0.5)),
            *([scored((5, -3.0), (6, -0.5), (7, -2.0), (8, -1.0))] if len(tokens) == 4 else []),
        ]
    )
    groups = [Group(position=0, prompt=0, samples=(sample,))]
    (references,) = said_of(served, groups, top_k=3) or []
    assert numbers(references) == [[0, -0.5, -9, -0.25], [0, -0.5, -9, -0.25, -3]]
    assert [body["prompt_logprobs"] for body in served.asked] == [3, 3]
    none = float("-inf")
    assert top_of(references, 3) == [
        ([[8, 9, 0], [9, 8, 7], [6, 0, 0]], [[-1, -2, none], [-0.5, -1, -1.5], [-0.5, none, none]]),
        ([[6, 8, 7]], [[-0.5, -1, -2]]),
    ]


def test_without_likely_tokens_none_are_asked_for() -> None:
    (references,) = said_of(Served(), [GROUP]) or []
    assert not isinstance(references, str)
    assert [row.top_tokens for row in references] == [None]


GROUP = Group(position=0, prompt=0, samples=(a_sample(1, 2),))


def test_the_time_of_a_request_begins_when_it_is_sent() -> None:
    """Ten rows, one at a time: the last waits for longer than a request may take."""

    class Slow(Served):
        running = most = 0

        async def answer(self, request: web.Request) -> web.StreamResponse:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.3)
            try:
                return await super().answer(request)
            finally:
                self.running -= 1

    served = Slow()
    found = said_of(served, [GROUP] * 10, concurrency=1, seconds=1) or []
    assert [numbers(said) for said in found] == [[[0, -2.0625]]] * 10
    assert (len(served.asked), served.most) == (10, 1)


def test_a_teacher_that_is_busy_or_away_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    served = Served(status(503), status(429), cut)
    (said,) = said_of(served, [GROUP]) or []
    assert numbers(said) == [[0, -2.0625]]
    assert len(served.asked) == 4
    assert [record.getMessage().partition(" is retried: ")[2] for record in caplog.records] == [
        "status 503: no such model"
    ]


@pytest.mark.parametrize(
    "answer",
    [
        b"\x16\x03\x01 no HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n{}",
    ],
)
def test_a_teacher_that_answers_with_broken_http_is_asked_again(answer: bytes) -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(answer)  # type: ignore[attr-defined]
        request.transport.close()
        return web.Response()

    served = Served(broken)
    (said,) = said_of(served, [GROUP]) or []
    assert numbers(said) == [[0, -2.0625]]
    assert len(served.asked) == 2


async def redirecting(request: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": "/v1/completions"})


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (redirecting, "teacher refused: status 302: redirected to /v1/completions; set teacher.url to it"),
        (status(404), "teacher refused: status 404: no such model"),
        (saying({"choices": []}), "teacher refused: its answer has no log-probability for each token"),
        (saying({"choices": [{"prompt_logprobs": [None]}]}), "teacher refused: its answer has no log-probability"),
        (
            saying({"choices": [{"prompt_logprobs": [None, None]}]}),
            "teacher refused: its answer has no log-probability",
        ),
        (
            saying({"choices": [{"prompt_logprobs": [None, {"3": {"logprob": -1}}]}]}),
            "teacher refused: its answer has no log-probability",
        ),
    ],
)
def test_a_teacher_that_never_answers_costs_the_group_and_no_other(fault: Fault, reason: str) -> None:
    found = said_of(Served(fault), [GROUP, GROUP], concurrency=1) or []
    refused = [said for said in found if isinstance(said, str)]
    assert len(refused) == 1
    assert refused[0].startswith(reason)


def test_who_waits_for_a_teacher_can_stop() -> None:
    looks = iter([False, True])
    assert said_of(Served(*[status(503)] * 100), [GROUP], lambda: next(looks)) is None


def met(
    url: str,
    served: Served | None = None,
    seconds: float = 60,
    should_stop: Callable[[], bool] = lambda: False,
    top_k: int = 0,
) -> None:
    """`Teacher.meet` with a server, or with nobody at `url`."""

    async def story() -> None:
        async with serving({ROUTE: served.answer} if served else {}) as port:
            settings = TeacherConfig(url=url or f"http://{ADDRESS}:{port}/v1", model="wise", top_k=top_k)
            await asyncio.to_thread(Teacher(settings).meet, seconds, should_stop)

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_teacher_is_met_once_it_says_how_likely_a_token_is() -> None:
    served = Served(status(503))
    met("", served)
    assert [body["prompt"] for body in served.asked] == [[0, 0]] * 2


def test_a_teacher_that_is_not_there_is_named_with_what_to_do() -> None:
    with pytest.raises(DeadlineError, match=r"the teacher at teacher.url=http://127.0.0.1:9/v1.*fix teacher.url"):
        met("http://127.0.0.1:9/v1", seconds=0.2)


def test_a_teacher_that_refuses_is_named_at_once() -> None:
    with pytest.raises(RolloutError, match=r"teacher.model=wise: .* refuses .*: status 404: no such model"):
        met("", Served(status(404)))
    with pytest.raises(RolloutError, match="has no log-probability for each token"):
        met("", Served(saying({"choices": [{"prompt_logprobs": [None]}]})))


def test_a_teacher_that_returns_too_few_likely_tokens_is_named_at_once() -> None:
    met("", Served(), top_k=2)
    with pytest.raises(RolloutError, match=r"fewer likely tokens than teacher.top_k=3.*key_file or teacher.top_k"):
        met("", Served(), top_k=3)


def test_who_awaits_a_teacher_can_give_up() -> None:
    looks, served = iter([False, True]), Served(*[status(503)] * 100)
    met("", served, should_stop=lambda: next(looks))
    assert next(looks, None) is None
    assert served.asked
