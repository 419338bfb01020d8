"""Fairness between sessions, and samples of clients that are silent or gone."""

import asyncio
from pathlib import Path

from pipeline.tinker.entities import SampledWeights, SamplingSession
from pipeline.tinker.sample_queue import UNFETCHED_SECONDS, SampleQueue
from pipeline.tinker.tinker_records import Failed
from tests.unit.tinker.sampling_case import (
    SEQUENCES,
    Script,
    with_servers,
)


def a_sampler(session: str) -> SamplingSession:
    return SamplingSession(f"{session}:sample:0", "ada", "tiny")


async def ask(sampling: SampleQueue, session: str, number: int) -> str:
    body = {"prompt": {"chunks": [{"tokens": [ord(session), 2, 3]}]}, "num_samples": 1}
    return await sampling.accept(f"{session}:sample:0:{number}", a_sampler(session), SampledWeights(), number, body)


def sessions_asked(script: Script) -> list[str]:
    """Whose samples a server was asked for, in its order."""
    return [chr(body["token_ids"][0]) for _, body in script.asked]


def test_a_flood_of_one_session_holds_up_no_other_and_servers_get_what_they_can_run(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        (script,) = scripts
        script.gate.clear()
        flood = [await ask(sampling, "f", number) for number in range(500)]
        other = await ask(sampling, "o", 0)
        while len(script.asked) < SEQUENCES:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert sessions_asked(script) == ["f"] * SEQUENCES, "what it can run at once, and no more"
        script.gate.set()
        await asyncio.wait_for(sampling.result(other), 30)
        assert sessions_asked(script).index("o") <= 2 * SEQUENCES
        await asyncio.wait_for(asyncio.gather(*(sampling.result(id) for id in flood)), 30)

    with_servers(tmp_path, play, sequences=SEQUENCES)


def test_samples_of_a_silent_session_leave_the_servers_and_are_done_when_it_is_back(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        (script,) = scripts
        script.gate.clear()
        ids = [await ask(sampling, "f", number) for number in range(3 * SEQUENCES)]
        waiting = [asyncio.create_task(sampling.result(id)) for id in ids]
        while len(script.asked) < SEQUENCES:
            await asyncio.sleep(0.01)
        sampling.set_silent("f", is_silent=True)
        other = asyncio.create_task(sampling.result(await ask(sampling, "o", 0)))
        script.gate.set()
        assert isinstance(await asyncio.wait_for(other, 10), bytes)
        assert len(script.asked) == SEQUENCES + 1
        assert not any(each.done() for each in waiting)
        sampling.set_silent("f", is_silent=False)
        assert all(isinstance(each, bytes) for each in await asyncio.wait_for(asyncio.gather(*waiting), 30))

    with_servers(tmp_path, play, sequences=SEQUENCES)


def test_samples_of_a_client_that_is_gone_are_given_up_and_never_asked_for(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        (script,) = scripts
        script.gate.clear()
        ids = [await ask(sampling, "f", number) for number in range(3 * SEQUENCES)]
        other = await ask(sampling, "o", 0)
        while len(script.asked) < SEQUENCES:
            await asyncio.sleep(0.01)
        sampling.set_silent("f", is_silent=True)
        sampling.cancel_session("f", "no heartbeat")
        script.gate.set()
        assert isinstance(await asyncio.wait_for(sampling.result(other), 10), bytes)
        assert [await sampling.result(id) for id in ids] == [Failed("no heartbeat", "user")] * len(ids)
        assert len(script.asked) == SEQUENCES + 1

    with_servers(tmp_path, play, sequences=SEQUENCES)


def test_a_gateway_that_starts_does_again_only_what_a_client_asks_for(tmp_path: Path) -> None:
    async def accept(sampling: SampleQueue, scripts: list[Script]) -> None:
        sampling.set_servers(None)
        for number in range(100):
            await ask(sampling, "f", number)
        await ask(sampling, "o", 0)

    async def answer(sampling: SampleQueue, scripts: list[Script]) -> None:
        assert isinstance(await asyncio.wait_for(sampling.result("o:sample:0:0"), 10), bytes)
        assert await ask(sampling, "f", 1) == "f:sample:0:1", "a submission that is retried"
        assert isinstance(await asyncio.wait_for(sampling.result("f:sample:0:1"), 10), bytes)
        assert sessions_asked(scripts[0]) == ["o", "f"]
        for id in list(sampling._jobs):
            sampling._jobs[id].ended -= UNFETCHED_SECONDS + 1
        await sampling.sweep()
        assert set(sampling._jobs) == {"o:sample:0:0", "f:sample:0:1"}, "the others are forgotten"

    with_servers(tmp_path, accept)
    with_servers(tmp_path, answer)
