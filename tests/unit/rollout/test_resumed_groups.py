"""Groups whose actor was lost: what was sampled is neither paid for twice nor changed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from pipeline.environments import Episode, Policy, Prompt, Task, user_prompt
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.rollout.episode_journal import EpisodeJournal
from pipeline.rollout.group_rollout import GroupBuilder
from pipeline.rollout.server_pool import InferenceClient
from pipeline.transport.sample_records import Group, Sample
from tests.fakes.configs import make_config
from tests.fakes.inline_calls import InlineCalls
from tests.fakes.scripted_server import Script, answer, client_and, run
from tests.unit.environments.test_tasks import TINY

CHAT = ChatTokenizer(TINY)
DIGITS, END = CHAT.encode("123456789"), CHAT.encode("$")
POSITION, SAMPLES, TURNS = 5, 2, 3


class Dialogue(Task):
    """Three turns with a tool between them; `replays` and `salt` are for the test to change."""

    name = "dialogue"
    replays, salt = True, ""

    def __init__(self) -> None:
        super().__init__(None, 0)
        self.called: list[str] = []

    def __len__(self) -> int:
        return 8

    def prompt(self, index: int) -> Prompt:
        return user_prompt("2+2", answer="4")

    def held_out(self) -> list[Prompt]:
        return [self.prompt(0)]

    def reward(self, prompt: Prompt, text: str) -> float:
        return 1.0

    def use(self, prompt: Prompt, name: str, arguments: Any) -> str:
        self.called.append(arguments)
        if len(arguments) % 2:
            raise ValueError("an odd call")
        return "+1"

    def can_replay(self, prompt: Prompt) -> bool:
        return self.replays

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        episode = Episode.begin(policy.prompt)
        while True:
            turn = await policy.sample(episode.tokens)
            episode = episode.append_turn(turn, policy.decode(turn.tokens))
            if episode.turns == TURNS:
                return episode
            try:
                result = await policy.use(prompt, "tool", episode.text)
            except Exception:  # noqa: BLE001 a failed tool is an answer too
                result = "+0"
            episode = episode.append_observation(policy.encode(result + self.salt))


@dataclass
class Policyfake:
    """A server whose every token has a log-probability of its own; it answers `limit` requests and then no more.

    A turn is of 2 to 4 tokens.
    """

    limit: int = 1000
    tokens: int = 0
    answered: int = 0
    sampled: dict[float, int] = field(default_factory=dict)

    async def respond(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.answered >= self.limit:
            await asyncio.sleep(3600)
        self.answered += 1
        sampling = body["sampling_params"]
        return answer(*(self.choice(sampling["max_tokens"], index) for index in range(sampling["n"])))

    def choice(self, most: int, index: int) -> dict[str, Any]:
        length = min(most, 2 + self.tokens % 3)
        tokens = [DIGITS[(self.tokens + place) % 9] for place in range(length - 1)]
        tokens.append(DIGITS[self.tokens % 9] if length == most else END[0])
        logprobs = [-0.001 * (self.tokens + place) for place in range(length)]
        self.tokens += length
        return {
            "index": index,
            "finish_reason": "length" if length == most else "stop",
            "token_ids": tokens,
            "weight_versions": [{"version": "5", "start": 0, "end": length}],
            "logprobs": {"content": [{"token_id": t, "logprob": p} for t, p in zip(tokens, logprobs, strict=True)]},
        }


@asynccontextmanager
async def an_actor(
    folder: Path, task: Task, server: Policyfake, pieces: int | None = None, **rollout: Any
) -> AsyncIterator[tuple[GroupBuilder, InferenceClient]]:
    config = make_config(
        model={"path": "tiny_qwen3", "max_length": 64},
        rollout={"group_size": SAMPLES, "max_tokens": 8, **rollout},
        training={"stale": "refuse"},
    )
    script = Script([server.respond])
    async with client_and(script, max_tokens_per_request=pieces) as client:
        with EpisodeJournal(folder, 1 << 20) as journal:
            yield GroupBuilder(task, InlineCalls(task), CHAT, client, config, journal), client


async def lost(folder: Path, task: Task, server: Policyfake, limit: int, **settings: Any) -> None:
    """An actor that ends after its server answered so many requests."""
    server.limit, before = limit, server.answered
    server.answered = 0
    async with an_actor(folder, task, server, **settings) as (builder, _):
        building = asyncio.create_task(builder.build(POSITION))
        while server.answered < limit and not building.done():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # the last answer arrives
        building.cancel()
        await asyncio.gather(building, return_exceptions=True)
    server.limit, server.answered = 1000, before + server.answered


async def whole(
    folder: Path, task: Task, server: Policyfake, oldest: int = 0, **settings: Any
) -> tuple[Group, dict[float, int]]:
    async with an_actor(folder, task, server, **settings) as (builder, client):
        group = await builder.build(POSITION, oldest)
        return group, {"asked": client.tokens}


def logprobs(group: Group) -> set[float]:
    """The log-probability of each sampled token, which names it."""
    return {round(float(p), 4) for sample in group.samples for p in sample.logprob_array()[sample.sampled_array() > 0]}


def sampled(group: Group) -> int:
    return sum(int(sample.sampled_array().sum()) for sample in group.samples)


@pytest.mark.parametrize("limit", range(6))
def test_an_episode_continues_after_any_number_of_turns_without_a_token_more(tmp_path: Path, limit: int) -> None:
    """A group of two samples of three turns takes five requests: the first turns share one."""

    async def story() -> None:
        server, task = Policyfake(), Dialogue()
        await lost(tmp_path, task, server, limit)
        recorded = server.tokens
        group, numbers = await whole(tmp_path, task, server)
        assert not group.failures
        assert [sample.turns for sample in group.samples] == [TURNS] * SAMPLES
        assert sampled(group) == server.tokens, "each sampled token is in a sample"
        assert logprobs(group) == {round(0.001 * n, 4) * -1 for n in range(server.tokens)}
        assert (group.reused, group.resampled, server.answered) == (recorded, 0, 5)
        assert numbers["asked"] == server.tokens - recorded
        assert len(task.called) <= SAMPLES * (TURNS - 1) + SAMPLES, "at most the calls in flight are made again"

    run(story())


def test_a_turn_continues_after_the_pieces_that_were_recorded(tmp_path: Path) -> None:
    async def story() -> None:
        server, task = Policyfake(), Dialogue()
        await lost(tmp_path, task, server, limit=4, pieces=2)
        recorded = server.tokens
        group, _ = await whole(tmp_path, task, server, pieces=2)
        assert recorded
        assert (group.reused, group.resampled) == (recorded, 0)
        assert sampled(group) == server.tokens

    run(story())


def test_a_task_that_refuses_begins_again_but_keeps_the_episodes_that_ended(tmp_path: Path) -> None:
    async def story() -> None:
        server, task = Policyfake(), Dialogue()
        task.replays = False
        await lost(tmp_path, task, server, limit=3)
        recorded, calls = server.tokens, len(task.called)
        group, numbers = await whole(tmp_path, task, server)
        assert (group.reused, group.resampled) == (0, recorded)
        assert sampled(group) == server.tokens - recorded == numbers["asked"]
        assert len(task.called) - calls == SAMPLES * (TURNS - 1)
        again, _ = await whole(tmp_path, task, server)
        assert again.samples == group.samples, "both have ended, and nothing was dropped"
        assert again.reused == sampled(group)

    run(story())


@pytest.mark.parametrize("entry", [b"\xc1", b"\xa1\xff", msgspec.msgpack.encode({"type": "ended", "episode": 3})])
def test_a_sample_whose_recorded_episode_cannot_be_read_begins_again(
    tmp_path: Path, entry: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        server, task = Policyfake(), Dialogue()
        task.replays = False
        group, _ = await whole(tmp_path, task, server)
        with EpisodeJournal(tmp_path, 1 << 20) as journal:
            journal.add(POSITION, 0, 9, entry)
        for warnings in (1, 1):
            again, _ = await whole(tmp_path, task, server)
            assert again.samples[1] == group.samples[1] != again.samples[0]
            assert sum("sample 0 of position 5 is sampled again" in one.message for one in caplog.records) == warnings

    run(story())


def test_of_a_group_that_has_more_samples_than_it_wants_the_ended_ones_are_kept(tmp_path: Path) -> None:
    async def story() -> None:
        server, task = Policyfake(), Dialogue()
        task.replays = False
        first, _ = await whole(tmp_path, task, server, oversample=1)
        before = server.tokens
        again, _ = await whole(tmp_path, task, server, oversample=1)
        kept = [sample.tokens for sample in again.samples]
        assert all(sample.tokens in kept for sample in first.samples)
        assert server.tokens == before

    run(story())


@pytest.mark.parametrize(("oldest", "reused"), [(5, True), (6, False)])
def test_what_is_too_old_to_be_trained_is_sampled_again(tmp_path: Path, oldest: int, reused: bool) -> None:
    async def story() -> None:
        server, task = Policyfake(), Dialogue()
        await lost(tmp_path, task, server, limit=2)
        recorded = server.tokens
        group, _ = await whole(tmp_path, task, server, oldest)
        assert (group.reused, group.resampled) == ((recorded, 0) if reused else (0, recorded))
        later, _ = await whole(tmp_path, task, server, oldest=5)
        assert [s.logprobs for s in later.samples] == [s.logprobs for s in group.samples], "the old record is gone"

    run(story())


def test_a_rollout_that_asks_something_else_samples_from_there_on(tmp_path: Path) -> None:
    async def story() -> None:
        server, task = Policyfake(), Dialogue()
        await lost(tmp_path, task, server, limit=5)
        recorded = server.tokens
        task.salt = "+3"
        group, _ = await whole(tmp_path, task, server)
        first_turns = group.reused
        assert 0 < first_turns < recorded
        assert group.resampled == recorded - first_turns
        assert sampled(group) == first_turns + server.tokens - recorded

    run(story())


def test_a_single_turn_continues_by_default_and_several_do_not() -> None:
    class Single(Dialogue):
        can_replay = Task.can_replay
        rollout = Task.rollout

    class Several(Dialogue):
        can_replay = Task.can_replay

    prompt = user_prompt("2+2")
    assert (Single().can_replay(prompt), Several().can_replay(prompt)) == (True, False)


def broken(*_: Any) -> Any:
    raise ValueError("no answer")


@pytest.mark.parametrize("can_replay", [broken, lambda *_: None, lambda *_: "yes"])
def test_a_task_whose_word_is_no_word_is_not_replayed(tmp_path: Path, can_replay: Callable[..., Any]) -> None:
    async def story() -> None:
        server, task = Policyfake(), Dialogue()
        task.can_replay = can_replay  # type: ignore[method-assign]
        await lost(tmp_path, task, server, limit=3)
        group, _ = await whole(tmp_path, task, server)
        assert group.reused == 0
        assert not group.failures

    run(story())


def test_a_group_is_the_same_with_and_without_a_journal(tmp_path: Path) -> None:
    def of(group: Group) -> list[tuple[bytes, bytes, bytes]]:
        return [arrays(sample) for sample in group.samples]

    def arrays(sample: Sample) -> tuple[bytes, bytes, bytes]:
        return sample.tokens, sample.sampled, sample.logprobs

    async def story() -> None:
        task = Dialogue()
        with_journal, _ = await whole(tmp_path, task, Policyfake())
        server = Policyfake()
        async with an_actor(tmp_path / "other", task, server) as (builder, _):
            builder.journal = EpisodeJournal(Path(), 0)
            without = await builder.build(POSITION)
        assert sorted(of(with_journal)) == sorted(of(without))

    run(story())
