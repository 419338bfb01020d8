"""How long snapshots stay that sampling clients use."""

from pathlib import Path

import pytest

from pipeline.tinker.api_errors import NotFoundError
from pipeline.tinker.checkpoint_catalog import MAX_EPHEMERAL, MAX_WHOLE_EPHEMERAL, SNAPSHOT_SECONDS
from pipeline.tinker.model_requests import SaveNote, save_body
from pipeline.tinker.retention import ENDED_SECONDS
from pipeline.tinker.tinker_paths import WeightsPath
from pipeline.tinker.tinker_records import (
    Acknowledged,
    SaveResult,
    WorkResult,
)
from tests.unit.tinker.registry_case import ADA, Play, play


async def eleven_snapshots(stage: Play, rank: int = 4) -> list[str]:
    """The sampling clients of eleven snapshots of one model, in the order of their saves; a second lies between two."""
    model, samplers = await stage.model(rank), []
    await stage.registry.attach({})
    for seq in range(1, 12):
        path, sampler = (
            WeightsPath(model, "sampler_weights", f"ephemeral-{seq}"),
            f"{stage.live.fact.session}:sample:{seq}",
        )
        note = SaveNote(str(path), sampler=sampler)
        await stage.registry.accept(stage.live, seq, lambda path=path, seq=seq, note=note: save_body(path, seq, note))  # type: ignore[misc]
        samplers.append(sampler)
        stage.now += 1
        assert stage.work() is not None
        await stage.done(seq - 1, SaveResult(10) if seq > 1 else Acknowledged())
    assert stage.work() is not None
    await stage.done(11, SaveResult(10))
    return samplers


def known_samplers(stage: Play, samplers: list[str]) -> list[int]:
    """The numbers of those that can still be sampled from; does not use them."""
    return [number for number, each in enumerate(samplers) if each in stage.registry.catalog.samplers]


def test_snapshots_stay_while_their_sampling_clients_use_them(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        samplers, catalog = await eleven_snapshots(stage), stage.registry.catalog
        await stage.registry.sweep(1e9)
        assert known_samplers(stage, samplers) == list(range(11)), "none of them is old"
        for _ in range(3):
            stage.now += SNAPSHOT_SECONDS - 60
            assert catalog.sampler(ADA, samplers[1])
            await stage.registry.sweep(1e9)
        assert known_samplers(stage, samplers) == [1, *range(11 - MAX_EPHEMERAL, 11)]
        with pytest.raises(NotFoundError, match="snapshot was not used"):
            catalog.sampler(ADA, samplers[0])
        stage.restart()
        await stage.registry.sweep(1e9)
        assert known_samplers(stage, samplers) == [1, *range(11 - MAX_EPHEMERAL, 11)], "a restart counts as a use"

    play(tmp_path, story)


def test_a_snapshot_with_an_open_sample_stays_and_so_do_its_files(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        samplers, catalog = await eleven_snapshots(stage), stage.registry.catalog
        removed: list[str] = []
        catalog.on_removed = removed.append
        folder = catalog.checkpoints[catalog.samplers[samplers[0]].path].folder
        catalog.open_folders = lambda: {folder}
        stage.now += SNAPSHOT_SECONDS + 20
        await stage.registry.sweep(1e9)
        assert known_samplers(stage, samplers) == [0, *range(3, 11)]
        await catalog.remove(catalog.checkpoints[catalog.samplers[samplers[0]].path])  # as its client may
        assert len(removed) == 2
        assert folder not in removed
        catalog.open_folders = frozenset
        await stage.registry.sweep(1e9)
        assert folder in removed

    play(tmp_path, story)


def test_snapshots_give_way_before_a_save_is_refused_for_want_of_room(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        samplers, catalog = await eleven_snapshots(stage), stage.registry.catalog
        stage.now += 1
        catalog.sampler(ADA, samplers[0])
        await catalog.make_room("ada", 101)
        assert known_samplers(stage, samplers) == [0, *range(2, 11)], "the one that was not used for longest"
        await catalog.make_room("ada", 10)
        assert known_samplers(stage, samplers) == list(range(3, 11))

    play(tmp_path, story)


def test_snapshots_of_a_session_that_is_forgotten_leave_no_files(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        samplers, catalog = await eleven_snapshots(stage), stage.registry.catalog
        removed: list[str] = []
        catalog.on_removed = removed.append
        await stage.registry.end_session(stage.registry.sessions[stage.live.fact.session], "it is over")
        unload = stage.work()
        assert unload is not None
        await stage.registry.finish(WorkResult(unload.request, Acknowledged()))
        stage.now += ENDED_SECONDS + 1
        for _ in range(2):
            await stage.registry.sweep(1e9)
        assert (len(removed), known_samplers(stage, samplers), catalog.checkpoints) == (11, [], {})
        assert not stage.registry.models

    play(tmp_path, story)


def test_fewer_snapshots_of_a_whole_model_stay(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        samplers = await eleven_snapshots(stage, rank=0)
        stage.now += SNAPSHOT_SECONDS + 60
        await stage.registry.sweep(1e9)
        assert known_samplers(stage, samplers) == [*range(11 - MAX_WHOLE_EPHEMERAL, 11)]

    play(tmp_path, story)
