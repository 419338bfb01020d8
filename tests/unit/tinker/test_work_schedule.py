"""What the trainer gets next: whose turn it is, and what of silent sessions."""

from pathlib import Path

from pipeline.tinker.api_keys import Owner
from pipeline.tinker.heartbeats import SILENT_SECONDS
from pipeline.tinker.tinker_records import (
    Acknowledged,
    Adapter,
    Create,
    Failed,
    Unload,
    WorkResult,
)
from tests.unit.tinker.registry_case import LOOK, STEP, Play, play

SESSION_SECONDS = 3600.0


def test_models_take_turns_and_those_without_work_are_not_looked_at(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        session = await stage.registry.open_session(Owner("ada"))
        for number in range(4):
            await stage.registry.make_model(Owner("ada"), session.id, number, "tiny", Create(Adapter(4)))
        models = list(stage.registry.models.values())
        await stage.registry.attach({})
        for live in models[:2]:
            for seq in (1, 2):
                await stage.registry.accept(live, seq, lambda: STEP)
        order = []
        while (work := stage.work()) is not None:
            order.append((int(work.model[-1]), work.seq))
        assert order == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
        looked: list[str] = []
        look = stage.registry.schedule._next_of
        stage.registry.schedule._next_of = lambda live: looked.append(live.fact.id) or look(live)  # type: ignore[method-assign,func-returns-value]
        await stage.registry.accept(models[3], 1, lambda: STEP)
        assert stage.work() is not None
        assert looked == [models[3].fact.id]

    play(tmp_path, story)


async def two_sessions(stage: Play, models: int) -> tuple[str, str]:
    """A session with so many models, and one with one: of each model a pass waits."""
    sessions = [(await stage.registry.open_session(Owner("ada"))).id for _ in range(2)]
    for session, number in [*((sessions[0], number) for number in range(models)), (sessions[1], 0)]:
        await stage.registry.make_model(Owner("ada"), session, number, "tiny", Create(Adapter(4)))
    await stage.registry.attach({})
    while (work := stage.work()) is not None:
        await stage.registry.finish(WorkResult(work.request, Acknowledged()))
    for live in stage.registry.models.values():
        await stage.registry.accept(live, 1, lambda: LOOK)
    return sessions[0], sessions[1]


def handed_out(stage: Play) -> list[str]:
    """The sessions of all that a trainer gets now, in its order, up to the first end of a model."""
    found = []
    while (work := stage.work()) is not None:
        found.append(stage.registry.models[work.model].fact.session)
        if isinstance(work.body, Unload):
            break
    return found


async def silence(stage: Play, seconds: float, but: str = "") -> None:
    """Let time pass in which nobody is heard of, but for one session."""
    for _ in range(int(seconds / 5)):
        stage.now += 5
        if but:
            stage.registry.heartbeats.beat(but)
        await stage.registry.look()


def test_a_session_of_many_models_has_no_more_turns_than_one_of_one(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        many, one = await two_sessions(stage, 4)
        assert handed_out(stage) == [many, one, many, many, many]

    play(tmp_path, story)


def test_what_a_silent_session_asked_for_waits_over_restarts_until_it_is_heard_of(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        silent, other = await two_sessions(stage, 2)
        await silence(stage, SILENT_SECONDS + 10, but=other)
        assert handed_out(stage) == [other]
        await stage.registry.attach({})
        assert set(handed_out(stage)) == {other}, "a trainer that comes works for those who are there"
        stage.restart()
        await stage.registry.attach({})
        assert set(handed_out(stage)) == {other}
        stage.registry.session(Owner("ada"), silent)  # a heartbeat
        assert handed_out(stage) == [silent] * 4
        await stage.registry.look()
        stage.restart()
        assert not stage.registry.heartbeats.is_silent(silent)

    play(tmp_path, story)


def test_what_a_session_asked_for_that_was_not_heard_of_for_long_is_never_done(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        lapsed: list[str] = []
        gone, other = await two_sessions(stage, 1)
        for seq in range(2, 2000):
            await stage.registry.accept(stage.registry.models[f"{gone}:train:0"], seq, lambda: LOOK)
        await silence(stage, SESSION_SECONDS + 10, but=other)
        stage.registry.on_lapsed = lambda session, why: lapsed.append(session)
        await stage.registry.sweep(SESSION_SECONDS)
        assert set(lapsed) == {gone}
        stage.restart()
        await stage.registry.attach({})
        works = []
        while (work := stage.work()) is not None:
            works.append((work.model.partition(":")[0], type(work.body)))
            await stage.registry.finish(WorkResult(work.request, Acknowledged()))
        assert [body for session, body in works if session == gone] == [Unload]
        result = stage.registry.result(stage.registry.requests[f"{gone}:train:0:1999"])
        assert isinstance(result, Failed)
        assert "session has ended" in result.error

    play(tmp_path, story)


def test_what_a_client_asked_for_before_it_finished_its_session_is_done(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        ended, other = await two_sessions(stage, 1)
        await stage.registry.end_session(stage.registry.sessions[ended], "its client finished it")
        await silence(stage, SILENT_SECONDS + 10, but=other)
        assert sorted(handed_out(stage)) == sorted([ended, other, ended]), "the pass of each, and the end of the model"

    play(tmp_path, story)


def test_a_step_that_waits_is_done_right_after_its_pass_and_a_second_pass_is_not(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        session = await stage.registry.open_session(Owner("ada"))
        for number in range(2):
            await stage.registry.make_model(Owner("ada"), session.id, number, "tiny", Create(Adapter(4)))
        await stage.registry.attach({})
        assert stage.work() is not None
        assert stage.work() is not None
        for live in stage.registry.models.values():
            for seq, body in enumerate((LOOK, LOOK, STEP, STEP, LOOK), 1):
                await stage.registry.accept(live, seq, lambda body=body: body)  # type: ignore[misc]
        order = []
        while (work := stage.work()) is not None:
            order.append((int(work.model[-1]), work.seq))
        assert order == [(0, 1), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3), (0, 4), (1, 4), (0, 5), (1, 5)]

    play(tmp_path, story)
