"""Samples of whole models, which servers hold one at a time."""

import asyncio
from pathlib import Path
from typing import Any

from pipeline.tinker.sample_queue import SampleQueue
from pipeline.tinker.server_weights import MAX_FAILED_LOADS, REMOVED
from pipeline.tinker.tinker_records import Failed, ServerFacts
from pipeline.utils.weights_route import LOAD
from tests.fakes.http_server import PASSWORD
from tests.unit.tinker.sampling_case import Script, sample, with_servers, write_adapter


def write_models(root: Path, *names: str) -> None:
    for name in names:
        (root / "weights" / name).mkdir(parents=True)
        (root / "weights" / name / "config.json").write_text("{}")


def loaded(script: Script) -> list[str]:
    return [Path(body["folder"]).name for path, body in script.asked if path == LOAD]


async def draw(sampling: SampleQueue, number: int, folder: str = "", *, whole: bool = True) -> Any:
    return await asyncio.wait_for(sample(sampling, number, folder, whole), 10)


def test_a_whole_model_is_loaded_once_into_a_server_of_its_own_while_it_is_paused(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        write_models(tmp_path, "a", "b")
        write_adapter(tmp_path, "small")
        for number, folder in enumerate(("a", "a", "b", "a")):
            assert isinstance(await draw(sampling, number, folder), bytes)
        assert isinstance(await draw(sampling, 8, whole=False), bytes)
        assert isinstance(await draw(sampling, 9, "small", whole=False), bytes)
        of_models, of_adapters = scripts
        change = ["/pause", LOAD, "/reset_prefix_cache", "/resume"]
        sampled = "/inference/v1/generate"
        assert [path for path, _ in of_models.asked[:6]] == [*change, sampled, sampled]
        assert loaded(of_models) == ["a", "b", "a"]
        assert {body["model"] for path, body in of_models.asked if path == sampled} == {"base"}
        assert [body.get("model") for _, body in of_adapters.asked] == ["base", None, "small"]

    with_servers(tmp_path, play, count=2, whole=1)


def test_a_model_stays_until_its_samples_end_and_others_come_in_turn(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        script = scripts[0]
        write_models(tmp_path, "a", "b")
        script.gate.clear()
        first = [asyncio.create_task(draw(sampling, number, "a")) for number in range(2)]
        while script.sampling < 2:
            await asyncio.sleep(0.01)
        other = asyncio.create_task(draw(sampling, 2, "b"))
        await asyncio.sleep(0.1)
        late = asyncio.create_task(draw(sampling, 3, "a"))
        await asyncio.sleep(0.1)
        assert (loaded(script), script.sampling) == (["a"], 2), "the late sample lets the other model go first"
        script.gate.set()
        assert all([isinstance(await each, bytes) for each in (*first, other, late)])
        assert loaded(script) == ["a", "b", "a"]

    with_servers(tmp_path, play, count=2, whole=1)


def test_two_models_stay_on_two_servers(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        write_models(tmp_path, "a", "b")
        for script in scripts:
            script.gate.clear()
        both = [asyncio.create_task(draw(sampling, number, "ab"[number])) for number in range(2)]
        while not all(script.sampling for script in scripts[:2]):
            await asyncio.sleep(0.01)
        for script in scripts:
            script.gate.set()
        await asyncio.gather(*both)
        for number in range(2, 8):
            assert isinstance(await draw(sampling, number, "ab"[number % 2]), bytes)
        assert sorted(loaded(script) for script in scripts[:2]) == [["a"], ["b"]]

    with_servers(tmp_path, play, count=3, whole=2)


def test_a_server_that_was_started_again_loads_the_model_before_it_answers(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        write_models(tmp_path, "a")
        assert isinstance(await draw(sampling, 0, "a"), bytes)
        scripts[0].folder = "another"  # as of its start
        assert isinstance(await draw(sampling, 1, "a"), bytes)
        assert loaded(scripts[0]) == ["a", "a"]

    with_servers(tmp_path, play, count=2, whole=1)


def test_a_model_that_no_server_takes_fails_its_sample_in_one_line(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        write_models(tmp_path, "a")
        assert await draw(sampling, 0, "gone") == Failed(REMOVED, "user")
        sampling.set_servers(ServerFacts(tuple(server.endpoint for server in sampling._servers), PASSWORD))
        refused = await draw(sampling, 1, "a")
        assert isinstance(refused, Failed)
        assert "whole models (serve.whole_servers" in refused.error

    with_servers(tmp_path, play, count=2, whole=1)


def test_a_flood_of_samples_of_whole_models_takes_no_place_of_adapters(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        write_models(tmp_path, "a")
        scripts[0].gate.clear()
        flood = [asyncio.create_task(draw(sampling, number, "a")) for number in range(40)]
        while not scripts[0].sampling:
            await asyncio.sleep(0.01)
        assert isinstance(await draw(sampling, 99, whole=False), bytes)
        scripts[0].gate.set()
        assert all([isinstance(await each, bytes) for each in flood])

    with_servers(tmp_path, play, count=2, whole=1)


def test_a_client_that_gives_up_does_not_cut_a_load_off(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        script = scripts[0]
        write_models(tmp_path, "a")
        script.load_gate.clear()
        asked = asyncio.create_task(draw(sampling, 0, "a"))
        while not loaded(script):
            await asyncio.sleep(0.01)
        sampling.cancel("s:sample:0:0")
        assert isinstance(await asked, Failed)
        other = asyncio.create_task(draw(sampling, 1, "a"))
        await asyncio.sleep(0.1)
        script.load_gate.set()
        assert isinstance(await other, bytes)
        assert [path for path, _ in script.asked].count(LOAD) == 1
        assert [path for path, _ in script.asked].count("/resume") == 1

    with_servers(tmp_path, play, count=2, whole=1)


def test_a_model_that_cannot_be_loaded_fails_its_sample_after_a_few_tries_and_no_other(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        write_models(tmp_path, "a", "b")
        scripts[0].statuses = [500] * MAX_FAILED_LOADS
        refused = await draw(sampling, 0, "a")
        assert isinstance(refused, Failed)
        assert "the server cannot load this model" in refused.error
        assert isinstance(await draw(sampling, 1, "b"), bytes)
        scripts[0].statuses = [500]
        assert isinstance(await draw(sampling, 2, "a"), bytes), "it is tried again"

    with_servers(tmp_path, play, count=2, whole=1)
