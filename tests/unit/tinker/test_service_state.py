"""What the gateway remembers, over restarts of itself and of trainers."""

from pathlib import Path

import pytest

from pipeline.tinker.api_errors import ApiError
from pipeline.tinker.durable_store import FAILURE_BYTES
from pipeline.tinker.entities import SamplingSession
from pipeline.tinker.model_requests import SaveNote, save_body
from pipeline.tinker.retention import ENDED_SECONDS, SERVED_SECONDS, UNFETCHED_SECONDS
from pipeline.tinker.tinker_records import (
    Acknowledged,
    Adapter,
    Create,
    Failed,
    PassResult,
    SaveResult,
    StepResult,
    Unload,
    WorkResult,
)
from tests.unit.tinker.registry_case import ADA, LOOK, Play, path_of, play


async def three_steps(stage: Play) -> str:
    """A model with three steps, of which a commit covers two for good."""
    model = await stage.model()
    await stage.registry.attach({})
    for seq in (1, 2, 3):
        await stage.step(seq)
    for seq in range(4):
        assert stage.work() is not None
        await stage.done(seq)
    for cursor in (2, 3):
        await stage.registry.committed({model: cursor})
    return model


def test_a_result_that_nobody_fetches_is_kept_for_a_day_and_one_that_was_for_an_hour(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        model = await three_steps(stage)
        await stage.registry.note_served(stage.registry.requests[f"{model}:1"])
        stage.now += SERVED_SECONDS + 1
        await stage.registry.sweep(1e9)
        assert set(stage.live.requests) == {0, 2, 3}
        stage.now += UNFETCHED_SECONDS
        await stage.registry.sweep(1e9)
        assert set(stage.live.requests) == {3}, "a trainer may have to do it again"
        assert [each.id for each in stage.kept.requests()] == [f"{model}:3"]

    play(tmp_path, story)


def test_what_changes_no_model_is_kept_only_until_it_is_answered(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        model = await stage.model()
        await stage.registry.attach({})
        await stage.done(0)
        long = bytes(FAILURE_BYTES + 4)
        for seq in range(1, 4):
            await stage.registry.accept(stage.live, seq, lambda: LOOK)
            await stage.done(seq, PassResult([long], [0], {}))
            assert stage.kept.body(f"{model}:{seq}") is None
        stage.restart()
        await stage.registry.attach({})
        again = stage.work()
        assert again is not None
        assert (again.seq, again.answered) == (0, True)
        assert stage.work() is None
        found = stage.registry.result(stage.registry.requests[f"{model}:3"])
        assert isinstance(found, PassResult)
        assert found.logprobs == [long]

    play(tmp_path, story)


def test_after_a_restart_of_the_gateway_a_settled_model_goes_on(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        model = await three_steps(stage)
        stage.restart()
        await stage.registry.attach({model: 2})
        work = stage.work()
        assert work is not None
        assert (work.seq, work.answered) == (3, True)
        await stage.step(4)
        work = stage.work()
        assert work is not None
        assert (work.seq, stage.live.lost) == (4, "")

    play(tmp_path, story)


def test_a_trainer_with_an_older_commit_than_is_kept_loses_the_model_and_says_so(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        model = await three_steps(stage)
        for restart in (False, True):
            if restart:
                stage.restart()
            await stage.registry.attach({model: 1})
            assert stage.work() is None
            assert "older commit" in stage.live.lost
            await stage.registry.attach({model: 3})
            assert not stage.live.lost

    play(tmp_path, story)


def test_a_model_whose_unload_the_gateway_did_not_hear_of_is_unloaded_after_a_restart_and_never_lost(
    tmp_path: Path,
) -> None:
    async def story(stage: Play) -> None:
        await three_steps(stage)
        await stage.registry.unload(stage.live)
        work = stage.work()
        assert work is not None
        assert isinstance(work.body, Unload)
        stage.restart()  # before the trainer's answer
        await stage.registry.attach({})
        again = stage.work()
        assert again is not None
        assert isinstance(again.body, Unload)
        await stage.registry.finish(WorkResult(again.request, Acknowledged()))
        assert stage.live.fact.gone
        assert await stage.registry.open_session(ADA)

    play(tmp_path, story)


def test_a_model_that_could_not_be_made_takes_no_place(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        model = await stage.model()
        await stage.registry.attach({})
        assert stage.work() is not None
        await stage.done(0, Failed("there is no room " + "x" * FAILURE_BYTES, "user"))
        session = stage.live.fact.session
        for _ in range(2):
            failure = stage.registry.result(stage.registry.requests[f"{model}:0"])
            assert isinstance(failure, Failed)
            assert failure.error.startswith("there is no room")
            with_one = await stage.registry.make_model(ADA, session, 0, "tiny", Create(Adapter(4)))
            assert with_one.failure == failure, "a retry"
            with pytest.raises(ApiError, match="making it failed") as refused:
                await stage.step(1)
            assert refused.value.status == 410
            stage.restart()
        other = await stage.registry.make_model(ADA, session, 1, "tiny", Create(Adapter(4)))
        assert not other.answered, "ada may have one model"

    play(tmp_path, story)


def test_a_step_is_answered_once(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        model = await stage.model()
        await stage.registry.attach({})
        await stage.done(0)
        await stage.step(1)
        for rate in (1.0, 2.0):
            await stage.done(1, StepResult({"lr:mean": rate}))
        stage.restart()
        assert stage.registry.result(stage.registry.requests[f"{model}:1"]) == StepResult({"lr:mean": 1.0})

    play(tmp_path, story)


def test_an_ended_session_is_forgotten_with_its_models_unless_they_have_checkpoints(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        model = await three_steps(stage)
        session = stage.registry.sessions[stage.live.fact.session]
        await stage.registry.catalog.add_sampler(SamplingSession(f"{session.id}:sample:0", "ada", "tiny"))
        await stage.registry.accept(stage.live, 4, lambda: save_body(path_of(model), 4, SaveNote(str(path_of(model)))))
        assert stage.work() is not None
        await stage.done(4, SaveResult(1))
        await stage.registry.end_session(session, "it is over")
        unload = stage.work()
        assert unload is not None
        await stage.registry.finish(WorkResult(unload.request, Acknowledged()))
        stage.now += ENDED_SECONDS + 1
        await stage.registry.sweep(1e9)
        assert (stage.registry.sessions, stage.registry.catalog.samplers, stage.registry.requests) == ({}, {}, {})
        assert set(stage.registry.models) == {model}, "its checkpoint is listed under it"
        (checkpoint,) = stage.registry.catalog.checkpoints.values()
        await stage.registry.catalog.remove(checkpoint)
        await stage.registry.sweep(1e9)
        assert not stage.registry.models
        assert not [
            each for kind in ("session", "model", "committed_cursor", "sampler") for each in stage.kept.facts(kind)
        ]
        stage.restart()
        await stage.registry.attach({model: 2})
        again = stage.work()
        assert again is not None
        assert (again.model, again.body) == (model, Unload()), "a trainer may still have it from an old commit"
        assert stage.work() is None

    play(tmp_path, story)


def test_a_session_that_ended_is_known_for_a_while_and_while_a_trainer_has_its_model(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        await three_steps(stage)
        session = stage.registry.sessions[stage.live.fact.session]
        await stage.registry.end_session(session, "it is over")
        stage.now += ENDED_SECONDS - 1
        await stage.registry.sweep(1e9)
        with pytest.raises(ApiError, match="it is over"):
            stage.registry.session(ADA, session.id)
        stage.now += 2
        await stage.registry.sweep(1e9)
        assert set(stage.registry.sessions) == {session.id}
        unload = stage.work()
        assert unload is not None
        await stage.registry.finish(WorkResult(unload.request, Acknowledged()))
        await stage.registry.sweep(1e9)
        assert not stage.registry.sessions

    play(tmp_path, story)
