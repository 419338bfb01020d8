"""The times of turns: what is measured, to which tokens it belongs, and how it reaches a stored sample."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from pyarrow import parquet

from pipeline.environments import Episode, Prompt
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.episode import EpisodeBranch
from pipeline.environments.rewards import Score
from pipeline.environments.task_calls import RenderedPrompt
from pipeline.rollout.episode_record import Ended
from pipeline.rollout.rollout_policy import Sampling
from pipeline.rollout.sample_rollout import roll_out
from pipeline.rollout.sample_store import SampleStore, record_bytes, records_of_evaluation, segments
from pipeline.rollout.turn_timer import TurnTimer
from pipeline.transport.record_wire import decode_record, encode_record
from pipeline.transport.sample_records import Sample
from pipeline.transport.turn_times import EngineSeconds, TurnTimes, sum_of
from tests.fakes.inline_calls import InlineCalls
from tests.fakes.scripted_server import Answer, Script, always, ask, choice, client_and, run
from tests.unit.environments.test_tool_task import TINY_TEXT, tools
from tests.unit.rollout.test_sample_store import patience as patience

CHAT = ChatTokenizer(TINY_TEXT)


def timed(seconds: Sequence[Any], *choices: dict[str, Any]) -> Answer:
    """A server that reports these times."""

    async def respond(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"request_id": "r", "choices": list(choices), "usage": {"choice_seconds": seconds}})

    return respond


def an_episode(tokens: Sequence[int], sampled: Sequence[int], *branches: EpisodeBranch) -> Episode:
    return Episode(tuple(tokens), tuple(sampled), (0.0,) * len(tokens), turns=1, branches=branches)


def places(timer: TurnTimer, episode: Episode) -> list[tuple[int, int]]:
    return [(turn.row, turn.start) for turn in timer.turns_of(episode)]


def test_each_turn_belongs_to_the_tokens_that_it_sampled() -> None:
    timer = TurnTimer()
    timer.add(2, (7, 8), "a:1", timer.now)
    timer.add(5, (9,), "b:1", timer.now)
    episode = an_episode([1, 2, 7, 8, 3, 9], [0, 0, 1, 1, 0, 1])
    assert [(turn.start, turn.server) for turn in timer.turns_of(episode)] == [(2, "a:1"), (5, "b:1")]


def test_a_turn_that_the_task_dropped_has_no_times() -> None:
    timer = TurnTimer()
    for tokens in ((7, 8), (9, 8), (), (5,)):
        timer.add(2, tokens, "a:1", timer.now)
    timer.add(9, (5,), "a:1", timer.now)  # behind the end of the row
    assert places(timer, an_episode([1, 2, 9, 8], [0, 0, 1, 1])) == [(0, 2)]
    assert places(timer, an_episode([1, 2, 9, 8], [0, 0, 0, 1])) == []


def test_turns_of_branches_that_begin_alike_are_told_apart_by_their_tokens() -> None:
    """Both rows begin with token 7; each turn goes to the row that has all of it, and none is counted twice."""
    timer = TurnTimer()
    for server, tokens in (("second", (7, 9, 9)), ("first", (7, 8)), ("shared", (6,))):
        timer.add(1 if server == "shared" else 2, tokens, server, timer.now)
    branch = EpisodeBranch(of=0, shared=2, tokens=(7, 9, 9), sampled=(1, 1, 1), logprobs=(0.0,) * 3)
    episode = an_episode([1, 6, 7, 8], [0, 1, 1, 1], branch)
    assert [(turn.server, turn.row, turn.start) for turn in timer.turns_of(episode)] == [
        ("second", 1, 2),
        ("first", 0, 2),
        ("shared", 0, 1),
    ]


def fail_slowly(timer: TurnTimer) -> None:
    with timer.tool():
        time.sleep(0.02)
        raise ValueError("no tool")


def test_tools_count_for_the_turn_before_them_also_if_they_fail() -> None:
    timer = TurnTimer()
    with timer.tool():
        pass  # before the first turn: of nobody
    timer.add(1, (7,), "a:1", timer.now, EngineSeconds(0.1, 0.2, 0.300049))
    for _ in range(2):
        with pytest.raises(ValueError, match="no tool"):
            fail_slowly(timer)
    timer.add(3, (8,), "a:1", timer.now)
    first, second = timer.turns_of(an_episode([1, 7, 2, 8], [0, 1, 0, 1]))
    assert first.tools is not None
    assert 0.04 <= first.tools < 5
    assert (first.queue, first.prefill, first.decode) == (0.1, 0.2, 0.3), "rounded to a tenth of a millisecond"
    assert (second.tools, second.queue, second.prefill, second.decode) == (None,) * 4
    assert second.begin >= first.begin + first.tools


def test_the_times_of_a_turns_requests_are_added() -> None:
    one, other = EngineSeconds(1, 2, 3), EngineSeconds(0.5, 0.5, 0.5)
    assert sum_of(one, other) == (1.5, 2.5, 3.5)
    assert sum_of(None, other) == sum_of(other, None) == other
    assert sum_of(None, None) is None


def test_a_server_that_reports_times_reports_them_of_each_choice() -> None:
    async def asked(*seconds: Any) -> Any:
        script = Script([timed(seconds, choice([7]), choice([8], index=1))])
        async with client_and(script) as client:
            return [completion.engine_seconds for completion in await ask(client, n=2)]

    assert run(asked([0.1, 0.2, 0.3], None)) == [(0.1, 0.2, 0.3), None]
    assert run(asked([0.1, 0.2, 0.3])) == [None, None], "no choice gets another one's times"
    assert run(asked()) == [None, None]


def test_a_request_that_was_cut_off_has_the_times_of_both_parts() -> None:
    parts = [timed([[0.1, 0.2, 0.3]], choice([7], "abort")), timed([[1, 1, 1]], choice([8, 9, 9]))]

    async def asked() -> Any:
        async with client_and(Script(parts)) as client:
            (completion,) = await ask(client, tokens=4)
            return completion.engine_seconds

    assert run(asked()) == pytest.approx((1.1, 1.2, 1.3))


def an_episode_with_a_tool() -> Sample:
    """Two turns with a calculator between them, from a server over HTTP."""
    task = tools(tool_call_syntax="short", system="", tools=["calculator"])
    prompt = Prompt(({"role": "user", "content": "37*52"},), "1924", tools=task.schemas)
    turns = [[*CHAT.encode("[calculator:37*52]"), 2], [*CHAT.encode("1924"), 2]]
    script = Script([timed([[0.001, 0.01, 0.1]], choice(turns[0], "stop")), always(choice(turns[1], "stop"))])

    async def played() -> Sample:
        async with client_and(script) as client:
            rendered = RenderedPrompt(prompt, CHAT.render(prompt.messages, prompt.tools))
            sampling = Sampling(1.0, 64, 256, 60)
            (ended,) = await roll_out(task, InlineCalls(task, TINY_TEXT), CHAT, client, sampling, rendered, 1)
            sample = ended.scored(Score(1.0))
            assert isinstance(sample, Sample), sample
            return sample

    return asyncio.run(asyncio.wait_for(played(), 60))


def test_an_episode_with_tools_has_the_times_of_its_turns_on_the_wire_and_on_disk(tmp_path: Path) -> None:
    sample = an_episode_with_a_tool()
    first, second = sample.turn_times
    assert (first.queue, first.prefill, first.decode) == (0.001, 0.01, 0.1)
    assert first.tools is not None
    assert second.tools is second.queue is None
    mask = sample.sampled_array()
    assert [mask[turn.start - 1 : turn.start + 1].tolist() for turn in (first, second)] == [[0, 1], [0, 1]]
    assert second.begin >= first.begin + first.request + first.tools - 1e-3
    assert sample.seconds >= second.begin + second.request - 1e-3
    assert decode_record(encode_record(sample), Sample) == sample
    with SampleStore(tmp_path, "a-0", 1 << 20) as store:
        store.add(records_of_evaluation([[sample]], "tools", "hard"))
    (row,) = [row for file in segments(tmp_path) for row in parquet.read_table(file).to_pylist()]
    stored = [TurnTimes(**turn) for turn in row["turn_times"]]
    assert [(turn.row, turn.start, turn.server) for turn in stored] == [
        (0, turn.start, turn.server) for turn in sample.turn_times
    ]
    assert stored[0].decode == pytest.approx(0.1)


def test_an_ended_episode_that_a_lost_actor_recorded_has_its_times() -> None:
    episode, times = an_episode([1, 7], [0, 1]), (TurnTimes(0, 1, "a:1", 0.0, 0.5, 0.1, 0.1, 0.1, None),)
    written = msgspec.msgpack.encode(Ended(episode, 1.0, times))
    assert msgspec.msgpack.decode(written, type=Ended).turn_times == times
    older = msgspec.msgpack.encode({"type": "ended", "episode": episode, "seconds": 1.0})
    assert msgspec.msgpack.decode(older, type=Ended).turn_times == ()


def test_times_add_few_bytes_to_a_sample() -> None:
    sample = an_episode_with_a_tool()
    bare = msgspec.structs.replace(sample, turn_times=())
    each = (len(encode_record(sample)) - len(encode_record(bare))) / len(sample.turn_times)
    assert each < 80
    (row,) = records_of_evaluation([[sample]], "tools", "hard")
    assert record_bytes(row) == 200 + 9 * row["length"] + 80
