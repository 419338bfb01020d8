"""What the front remembers, over restarts of itself and of trainers."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from pipeline.tinker.api_errors import ApiError, NotFoundError
from pipeline.tinker.api_keys import Owner
from pipeline.tinker.checkpoint_catalog import MAX_EPHEMERAL, SNAPSHOT_SECONDS
from pipeline.tinker.durable_store import FAILURE_BYTES, Store
from pipeline.tinker.entities import SamplingSession
from pipeline.tinker.heartbeats import SILENT_SECONDS
from pipeline.tinker.model_requests import ModelEntry, SaveNote, save_body
from pipeline.tinker.retention import ENDED_SECONDS, SERVED_SECONDS, UNFETCHED_SECONDS
from pipeline.tinker.service_state import ModelRegistry
from pipeline.tinker.tinker_paths import WeightsPath
from pipeline.tinker.tinker_records import (
    Acknowledged,
    Adapter,
    Create,
    Failed,
    Pass,
    PassResult,
    SaveResult,
    Step,
    StepResult,
    Unload,
    Work,
    WorkResult,
)

ADA = Owner("ada", models=1)
SESSION_SECONDS = 3600.0
STEP = Step(0.1, 0.9, 0.95, 1e-8, 0.0, 0.0)
LOOK = Pass((), "cross_entropy", {}, backward=False)
_works = msgspec.msgpack.Decoder(Work)


def path_of(model: str) -> WeightsPath:
    return WeightsPath(model, "weights", "mine")


class Play:
    """A registry with a clock of its own, which can be started anew over its store."""

    def __init__(self, path: Path) -> None:
        self._path, self.now = path, 1000.0
        self.begin()

    def begin(self) -> None:
        self.kept = Store(self._path)
        self.registry = ModelRegistry(self.kept, lambda: self.now)

    def restart(self) -> None:
        self.kept.close()
        self.begin()

    @property
    def live(self) -> ModelEntry:
        (live,) = self.registry.models.values()
        return live

    def work(self) -> Work | None:
        body = self.registry.next_work()
        return None if body is None else _works.decode(body)

    async def model(self) -> str:
        session = await self.registry.open_session(ADA)
        made = await self.registry.make_model(ADA, session.id, 0, "tiny", Create(Adapter(4)))
        return made.model

    async def step(self, seq: int) -> None:
        await self.registry.accept(self.live, seq, lambda: STEP)

    async def done(self, seq: int, result: object = Acknowledged()) -> None:
        await self.registry.finish(WorkResult(f"{self.live.fact.id}:{seq}", result))  # type: ignore[arg-type]


def play(tmp_path: Path, story: Callable[[Play], Awaitable[None]]) -> None:
    async def run() -> None:
        stage = Play(tmp_path / "store.sqlite")
        await story(stage)
        stage.kept.close()

    asyncio.run(run())


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


def test_after_a_restart_of_the_front_a_settled_model_goes_on(tmp_path: Path) -> None:
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


def test_a_model_whose_unload_the_front_did_not_hear_of_is_unloaded_after_a_restart_and_never_lost(
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
        await stage.registry.shelf.add_sampler(SamplingSession(f"{session.id}:sample:0", "ada", "tiny"))
        await stage.registry.accept(stage.live, 4, lambda: save_body(path_of(model), 4, SaveNote(str(path_of(model)))))
        assert stage.work() is not None
        await stage.done(4, SaveResult(1))
        await stage.registry.end_session(session, "it is over")
        unload = stage.work()
        assert unload is not None
        await stage.registry.finish(WorkResult(unload.request, Acknowledged()))
        stage.now += ENDED_SECONDS + 1
        await stage.registry.sweep(1e9)
        assert (stage.registry.sessions, stage.registry.shelf.samplers, stage.registry.requests) == ({}, {}, {})
        assert set(stage.registry.models) == {model}, "its checkpoint is listed under it"
        (checkpoint,) = stage.registry.shelf.checkpoints.values()
        await stage.registry.shelf.remove(checkpoint)
        await stage.registry.sweep(1e9)
        assert not stage.registry.models
        assert not [each for kind in ("session", "model", "settled", "sampler") for each in stage.kept.facts(kind)]
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
        look = stage.registry._next_of
        stage.registry._next_of = lambda live: looked.append(live.fact.id) or look(live)  # type: ignore[method-assign,func-returns-value]
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


async def eleven_snapshots(stage: Play) -> list[str]:
    """The sampling clients of eleven snapshots of one model, in the order of their saves; a second lies between two."""
    model, samplers = await stage.model(), []
    await stage.registry.attach({})
    for seq in range(1, 12):
        path, sampler = (
            WeightsPath(model, "sampler_weights", f"passing-{seq}"),
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
    return [number for number, each in enumerate(samplers) if each in stage.registry.shelf.samplers]


def test_snapshots_stay_while_their_sampling_clients_use_them(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        samplers, shelf = await eleven_snapshots(stage), stage.registry.shelf
        await stage.registry.sweep(1e9)
        assert known_samplers(stage, samplers) == list(range(11)), "none of them is old"
        for _ in range(3):
            stage.now += SNAPSHOT_SECONDS - 60
            assert shelf.sampler(ADA, samplers[1])
            await stage.registry.sweep(1e9)
        assert known_samplers(stage, samplers) == [1, *range(11 - MAX_EPHEMERAL, 11)]
        with pytest.raises(NotFoundError, match="snapshot was not used"):
            shelf.sampler(ADA, samplers[0])
        stage.restart()
        await stage.registry.sweep(1e9)
        assert known_samplers(stage, samplers) == [1, *range(11 - MAX_EPHEMERAL, 11)], "a restart counts as a use"

    play(tmp_path, story)


def test_a_snapshot_with_an_open_sample_stays_and_so_do_its_files(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        samplers, shelf = await eleven_snapshots(stage), stage.registry.shelf
        removed: list[str] = []
        shelf.on_removed = removed.append
        folder = shelf.checkpoints[shelf.samplers[samplers[0]].path].folder
        shelf.open_folders = lambda: {folder}
        stage.now += SNAPSHOT_SECONDS + 20
        await stage.registry.sweep(1e9)
        assert known_samplers(stage, samplers) == [0, *range(3, 11)]
        await shelf.remove(shelf.checkpoints[shelf.samplers[samplers[0]].path])  # as its client may
        assert len(removed) == 2
        assert folder not in removed
        shelf.open_folders = frozenset
        await stage.registry.sweep(1e9)
        assert folder in removed

    play(tmp_path, story)


def test_snapshots_give_way_before_a_save_is_refused_for_want_of_room(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        samplers, shelf = await eleven_snapshots(stage), stage.registry.shelf
        stage.now += 1
        shelf.sampler(ADA, samplers[0])
        await shelf.make_room("ada", 101)
        assert known_samplers(stage, samplers) == [0, *range(2, 11)], "the one that was not used for longest"
        await shelf.make_room("ada", 10)
        assert known_samplers(stage, samplers) == list(range(3, 11))

    play(tmp_path, story)


def test_snapshots_of_a_session_that_is_forgotten_leave_no_files(tmp_path: Path) -> None:
    async def story(stage: Play) -> None:
        samplers, shelf = await eleven_snapshots(stage), stage.registry.shelf
        removed: list[str] = []
        shelf.on_removed = removed.append
        await stage.registry.end_session(stage.registry.sessions[stage.live.fact.session], "it is over")
        unload = stage.work()
        assert unload is not None
        await stage.registry.finish(WorkResult(unload.request, Acknowledged()))
        stage.now += ENDED_SECONDS + 1
        for _ in range(2):
            await stage.registry.sweep(1e9)
        assert (len(removed), known_samplers(stage, samplers), shelf.checkpoints) == (11, [], {})
        assert not stage.registry.models

    play(tmp_path, story)
