"""The loop of a trainer that serves: what it commits, and when. Gateway, models and commits are stand-ins."""

from pathlib import Path
from typing import Any, cast

import pytest

from pipeline.config import RunConfig
from pipeline.tinker.tinker_records import Adapter, Create, ServerFacts, Step, Unload, Work, WorkResult
from pipeline.train.loop.compile_warmup import WarmUp
from pipeline.train.loop.group_batches import Interrupted
from pipeline.train.service.service_loop import MAX_SAVES, ServiceLoop, save_is_due
from tests.fakes.configs import make_config

STEP = Step(0.1, 0.9, 0.95, 1e-8, 0.0, 0.0)


class Models:
    adapters: dict[str, Adapter] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.known: set[str] = set()

    def __contains__(self, id: str) -> bool:
        return id in self.known

    def create(self, id: str, adapter: Adapter) -> None:
        self.known.add(id)

    def warm_up(self, warm_up: WarmUp) -> None:
        """Nothing is compiled."""

    def remove(self, id: str) -> None:
        self.known.discard(id)

    def pending(self, id: str) -> bool:
        return False

    def step(self, id: str, body: Step) -> None:
        """One that went well."""


class Commits:
    idle, rest = True, 100.0

    def __init__(self, events: list[object]) -> None:
        self._events = events

    def start(self, models: Models, cursors: dict[str, int]) -> None:
        self._events.append(("commit", dict(cursors)))

    def collect(self) -> None:
        """None is under way."""

    finish = collect


class Link:
    """Hands out some work, then nothing more while the attempt ends."""

    def __init__(self, works: list[Work], events: list[object]) -> None:
        self.works, self.away, self._events = works, False, events

    def turn(
        self, cursors: Any, done: list[WorkResult], durable: Any, wait: float, *, ending: bool = False
    ) -> Work | None:
        if self.away:
            raise Interrupted("the attempt is ending")
        self._events.extend(each.request for each in done)
        return self.works.pop(0) if self.works and not ending else None

    def close(self) -> None:
        """Nothing is open."""


def play(tmp_path: Path, works: list[Work], seconds: float, *, away: bool = False) -> list[object]:
    """What reached the gateway and what was committed, in order, of an attempt that ends when all work is done."""
    events: list[object] = []
    config = make_config()
    serve = config.serve.model_copy(update={"checkpoint_seconds": seconds, "checkpoint_steps": 1 << 30})
    config = cast(RunConfig, config.model_copy(update={"serve": serve}))
    link = Link(works, events)
    rounds = len(works)

    def pulse() -> None:
        nonlocal rounds
        rounds -= 1
        if rounds < 0:
            link.away = away
            raise Interrupted("the attempt is ending")

    engine = ServiceLoop(cast(Any, None), config, tmp_path, str(tmp_path / "commits"), "one", ServerFacts(), pulse)
    inside = cast(Any, engine)
    inside._models, inside._commits, inside._link = Models(), Commits(events), link
    with pytest.raises(Interrupted):
        engine.run()
    return events


def work(seq: int, body: Any) -> Work:
    return Work(f"m:{seq}", "m", seq, body)


def test_the_last_commit_covers_only_what_the_gateway_has(tmp_path: Path) -> None:
    works = [work(0, Create(Adapter(4))), work(1, STEP)]
    assert play(tmp_path, list(works), 3600.0) == ["m:0", "m:1", ("commit", {"m": 1})]
    assert play(tmp_path, list(works), 3600.0, away=True) == ["m:0"], "without a gateway it is done again"


def test_a_commit_in_between_covers_only_what_the_gateway_has(tmp_path: Path) -> None:
    works = [work(0, Create(Adapter(4))), work(1, STEP)]
    assert play(tmp_path, works, 0.0) == ["m:0", ("commit", {"m": 0}), "m:1", ("commit", {"m": 1})]


def test_that_a_model_was_unloaded_is_committed(tmp_path: Path) -> None:
    works = [work(0, Create(Adapter(4))), work(1 << 40, Unload())]
    assert play(tmp_path, works, 0.0)[-1] == ("commit", {})


def test_commits_of_many_models_keep_a_distance_but_are_never_later_than_promised() -> None:
    serve = make_config().serve.model_copy(update={"checkpoint_seconds": 60.0, "checkpoint_steps": 20})
    long = 1 / MAX_SAVES
    assert save_is_due(serve, steps=20, waited=1.0, rest=long)
    assert not save_is_due(serve, steps=19, waited=1.0, rest=long)
    assert not save_is_due(serve, steps=200, waited=59.0, rest=long - 1)
    assert save_is_due(serve, steps=1, waited=60.0, rest=1.0)
