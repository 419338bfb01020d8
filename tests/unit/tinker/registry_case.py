"""A registry of sessions and models and its clock, for tests."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from pipeline.tinker.api_keys import Owner
from pipeline.tinker.durable_store import Store
from pipeline.tinker.model_requests import ModelEntry
from pipeline.tinker.service_state import ModelRegistry
from pipeline.tinker.tinker_paths import WeightsPath
from pipeline.tinker.tinker_records import (
    Acknowledged,
    Adapter,
    Create,
    Pass,
    Step,
    Work,
    WorkResult,
)

ADA = Owner("ada", models=1)
STEP = Step(0.1, 0.9, 0.95, 1e-8, 0.0, 0.0)
LOOK = Pass((), "cross_entropy", {}, backward=False)
_works = msgspec.msgpack.Decoder(Work)


def path_of(model: str) -> WeightsPath:
    return WeightsPath(model, "weights", "mine")


class Play:
    """A registry and its clock, which can be restarted over its store."""

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
        body = self.registry.schedule.next_work()
        return None if body is None else _works.decode(body)

    async def model(self, rank: int = 4) -> str:
        session = await self.registry.open_session(ADA)
        made = await self.registry.make_model(ADA, session.id, 0, "tiny", Create(Adapter(rank)))
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
