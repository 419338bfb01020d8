"""The preprocessor: what becomes of each kind of group, and that its process loses none of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from msgspec import structs

from pipeline.config import RunConfig
from pipeline.roles.preprocessor import attach_references, prepare_group
from pipeline.rollout.teacher_client import RowScores
from pipeline.transport import Depth, Streams
from pipeline.transport.sample_records import Group, PreparedGroup, Sample
from pipeline.transport.top_tokens import TopTokens
from pipeline.utils.waiting import wait_for
from tests.fakes.configs import make_config
from tests.patience import WAIT_SECONDS
from tests.support.runs.attempts import Attempt, an_attempt
from tests.support.servers.policy_server import a_policy_server

pytestmark = pytest.mark.integration


def a_config(advantage: str = "group", teacher: str = "", **training: Any) -> RunConfig:
    return make_config(
        model={"path": "tiny_qwen3", "init": "random"},
        loss={"name": "grpo", "advantage_estimator": advantage, "kl": 1.0 if teacher else 0.0},
        teacher={"url": teacher, "model": "wise" if teacher else ""},
        training={"steps": 1, "prompts_per_step": 1, **training},
        rollout={"group_size": 4, "min_samples": 2},
        streams={"budget_bytes": 1 << 22},
    )


def a_group(position: int, *rewards: float, failures: tuple[str, ...] = ()) -> Group:
    return Group(position=position, prompt=0, samples=tuple(map(a_sample, rewards)), failures=failures)


def a_sample(reward: float, tokens: int = 3) -> Sample:
    return Sample(
        tokens=np.arange(tokens, dtype="<i4").tobytes(),
        sampled=b"\0\1\1",
        logprobs=np.zeros(3, dtype="<f4").tobytes(),
        reward=reward,
        version_min=0,
        version_max=0,
        finish="stop",
    )


def test_a_group_gets_one_advantage_for_each_sample() -> None:
    prepared = prepare_group(a_group(0, 1, 0, 0, 0), a_config())
    assert (prepared.outcome, prepared.advantages) == ("train", (0.75, -0.25, -0.25, -0.25))


@pytest.mark.parametrize("advantage", ["batch", "gae"])
def test_where_one_group_is_not_enough_the_rewards_travel(advantage: str) -> None:
    assert prepare_group(a_group(0, 1, 0, 0.5), a_config(advantage)).advantages == (1, 0, 0.5)
    assert prepare_group(a_group(0, 1, 1), a_config(advantage)).advantages == (1, 1)


def test_a_group_gets_what_a_teacher_says_of_it_or_fails_with_the_reason() -> None:
    prepared = prepare_group(a_group(0, 1, 1), a_config(zero_variance_groups="keep"))
    said, top = np.array([0, -1, -2], "<f4").tobytes(), TopTokens(bytes(16), bytes(16))
    taught = attach_references(prepared, (RowScores(said), RowScores(said)))
    assert (taught.outcome, taught.advantages, taught.references) == ("train", (0, 0), (said, said))
    assert taught.top_tokens == ()
    likely = attach_references(prepared, (RowScores(said, top), RowScores(said, top)))
    assert (likely.references, likely.top_tokens) == ((said, said), (top, top))
    refused = attach_references(prepared, "teacher refused: status 404: no such model")
    assert (refused.outcome, refused.advantages, refused.references) == ("failed: teacher refused", (), ())


def test_a_partial_group_trains_with_the_samples_that_it_has() -> None:
    prepared = prepare_group(a_group(0, 1, 0, failures=("reward raised ValueError: x",) * 2), a_config())
    assert (prepared.outcome, prepared.advantages) == ("train", (0.5, -0.5))


@pytest.mark.parametrize(
    ("group", "outcome"),
    [
        (a_group(0, 1, failures=("reward raised ValueError: x",) * 3), "failed: reward raised ValueError"),
        (a_group(0), "failed: too few samples"),
        (
            Group(position=0, prompt=0, samples=(a_sample(0), a_sample(1, tokens=2))),
            "malformed: sample arrays differ in length: tokens, sampled, logprobs = (2, 3, 3)",
        ),
        (a_group(0, 1, float("nan")), "malformed: a log-probability or the reward is not finite"),
    ],
)
def test_a_group_that_cannot_be_trained_is_passed_on_with_its_reason(group: Group, outcome: str) -> None:
    prepared = prepare_group(group, a_config())
    assert (prepared.outcome, prepared.advantages) == (outcome, ())


def test_samples_that_score_alike_are_kept_or_dropped_as_configured() -> None:
    alike = a_group(0, 1, 1, 1, 1)
    assert prepare_group(alike, a_config(zero_variance_groups="keep")).advantages == (0, 0, 0, 0)
    assert prepare_group(alike, a_config()).outcome == "filtered: zero advantage"


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Attempt]:
    with an_attempt(tmp_path, a_config()) as attempt:
        yield attempt


@pytest.fixture
def streams(attempt: Attempt) -> Iterator[Streams]:
    with attempt.connect() as streams:
        yield streams


def prepared_positions(streams: Streams) -> list[int]:
    return [entry.record.group.position for entry in streams.scan("prepared", PreparedGroup)]


def wait_for_positions(streams: Streams, count: int) -> list[int]:
    wait_for(f"{count} prepared groups", lambda: len(prepared_positions(streams)) >= count, WAIT_SECONDS)
    return prepared_positions(streams)


def publish(streams: Streams, positions: range) -> None:
    streams.publish_many("groups", [a_group(position, 1, 0, 0, 0) for position in positions])


def test_every_group_is_prepared_once_in_order_and_given_up(attempt: Attempt, streams: Streams) -> None:
    publish(streams, range(10))
    attempt.start("preprocessor")
    publish(streams, range(10, 100))
    assert wait_for_positions(streams, 100) == list(range(100))
    assert streams.depth("groups").entries == 0


def test_a_preprocessor_that_is_killed_loses_and_doubles_nothing(attempt: Attempt, streams: Streams) -> None:
    first = attempt.start("preprocessor")
    publish(streams, range(500))
    wait_for_positions(streams, 1)
    first.kill()
    attempt.start("preprocessor")
    assert wait_for_positions(streams, 500) == list(range(500))


def test_bytes_that_are_no_group_are_set_aside(attempt: Attempt, streams: Streams) -> None:
    streams.try_append("groups", [b"no group"], None)
    publish(streams, range(1))
    attempt.start("preprocessor")
    assert wait_for_positions(streams, 1) == [0]
    assert streams.depth("groups").rejected == 1


def test_a_group_that_cannot_be_decoded_is_passed_on_as_malformed(attempt: Attempt, streams: Streams) -> None:
    odd = structs.replace(a_sample(1), metrics={"won": True})
    streams.publish("groups", Group(position=5, prompt=2, samples=(odd,)))
    publish(streams, range(1))
    attempt.start("preprocessor")
    assert sorted(wait_for_positions(streams, 2)) == [0, 5]
    (malformed,) = [
        entry.record for entry in streams.scan("prepared", PreparedGroup) if entry.record.group.position == 5
    ]
    assert malformed.group == Group(position=5, prompt=2)
    assert "Expected `float`, got `bool`" in malformed.outcome
    assert malformed.outcome.startswith("malformed: ")
    assert streams.depth("groups") == Depth(entries=0, bytes=0, unread_bytes=0, rejected=0)


def test_a_preprocessor_that_is_killed_before_it_passes_on_a_group_that_cannot_be_decoded_gets_it_again(
    attempt: Attempt, streams: Streams
) -> None:
    full = PreparedGroup(group=Group(position=0, prompt=0), outcome="x" * (streams.budget - 200))
    streams.publish("prepared", full)
    streams.publish("groups", Group(position=5, prompt=2, failures=(5,)))  # type: ignore[arg-type]
    first = attempt.start("preprocessor")
    wait_for("the group to be read", lambda: streams.depth("groups").unread_bytes == 0, WAIT_SECONDS)
    first.kill()
    assert prepared_positions(streams) == [0]
    reader = streams.reader("prepared", PreparedGroup, "trainer")
    reader.acknowledge([entry.id for entry in reader.read(1, WAIT_SECONDS)])
    attempt.start("preprocessor")
    assert wait_for_positions(streams, 1) == [5]


def test_groups_that_can_be_trained_go_on_with_what_a_teacher_says_of_them(tmp_path: Path) -> None:
    asked = list[list[int]]()

    async def answer(request: web.Request) -> web.StreamResponse:
        tokens = (await request.json())["prompt"]
        asked.append(tokens)
        said = [None, *({str(token): {"logprob": -0.25 * token}} for token in tokens[1:])]
        return web.json_response({"choices": [{"prompt_logprobs": said}]})

    malformed = Group(position=1, prompt=0, samples=(a_sample(0), a_sample(1, tokens=2)))
    with (
        a_policy_server({"/v1/completions": answer}) as server,
        an_attempt(tmp_path, a_config(teacher=f"http://127.0.0.1:{server.port}/v1")) as attempt,
        attempt.connect() as streams,
    ):
        streams.publish_many("groups", [a_group(0, 1, 1), malformed])
        attempt.start("preprocessor")
        wait_for_positions(streams, 2)
        taught, passed = [entry.record for entry in streams.scan("prepared", PreparedGroup)]
    assert taught.references == (np.array([0, -0.25, -0.5], "<f4").tobytes(),) * 2
    assert passed.outcome.startswith("malformed")
    assert asked == [[0, 0], [0, 1, 2], [0, 1, 2]], "it is met first"


def test_it_stops_when_it_is_told_to(attempt: Attempt) -> None:
    assert attempt.start("preprocessor").stop(60) == 0
    status = attempt.context("preprocessor").status()
    assert status is not None
    assert status.state == "stopped"
