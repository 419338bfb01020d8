"""An engine's steps and the weights that they have, in vLLM's classes; of servers see `test_weights`."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.inference.vllm import token_versions
from pipeline.inference.vllm.token_versions import note_versions, version_of_step

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


NOT_RECEIVED = 13
"""A version that does not arrive."""


class Engine:
    """One that schedules a step before it processes the one before, as vLLM's with asynchronous scheduling."""

    def __init__(self) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.core import EngineCore

        self._engine, self._scheduler = EngineCore, Scheduler
        self._queue: list[Any] = []

    def schedule(self) -> None:
        self._queue.append(self._scheduler.schedule(object()))

    def process(self) -> int | None:
        """The version that is told of the oldest step."""
        told: int | None = self._scheduler.update_from_output(object(), self._queue.pop(0), object())
        return told

    def call(self, method: str, **kwargs: Any) -> Any:
        return self._engine.collective_rpc(object(), method, None, (), kwargs)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Of a release that does not say versions by itself; what a model does is left out."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    served: list[int | None] = [None]

    def collective_rpc(self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        match method:
            case "update_weights":
                version = kwargs["update_info"]["version"]
                served[:] = [None if version == NOT_RECEIVED else version]
            case "served_weights":
                return [list(served), list(served)]
        return ["done"]

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        return version_of_step()

    monkeypatch.setattr(token_versions, "_FIELD", "_what_no_release_has")
    monkeypatch.setattr(
        token_versions, "_Engine", type("Engine", (), {"weights": None, "processed": None, "labels": False})
    )
    monkeypatch.setattr(EngineCore, "collective_rpc", collective_rpc)
    monkeypatch.setattr(Scheduler, "schedule", lambda self: SimpleNamespace())
    monkeypatch.setattr(Scheduler, "update_from_output", update_from_output)
    return Engine()


def update(engine: Engine, version: int) -> None:
    assert engine.call("begin_update") == ["done"]
    assert engine.call("update_weights", update_info={"version": version}) == ["done"]
    assert engine.call("finish_weight_update") == ["done"]


def test_a_step_has_the_weights_of_when_it_was_scheduled_though_it_is_processed_later(engine: Engine) -> None:
    note_versions()
    note_versions()
    engine.schedule()
    update(engine, 7)
    engine.schedule()
    assert engine.process() == -1
    update(engine, 8)
    update(engine, 5)  # a trainer that went back to an older commit
    engine.schedule()
    assert [engine.process(), engine.process()] == [7, 5]


def test_an_update_that_failed_changes_nothing(engine: Engine) -> None:
    note_versions()
    update(engine, 7)
    engine.call("update_weights", update_info={"version": NOT_RECEIVED})
    engine.call("finish_weight_update")
    engine.schedule()
    assert engine.process() == 7


def test_a_release_that_says_versions_itself_says_them_of_updates_without_a_pause_too(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself it labels with what it was told last: between an update and its end with the version before, and what
    was scheduled before the update with the new one."""
    from vllm.v1.engine.core import EngineCore

    def attach(self: Any, outputs: dict[int, Any]) -> None:
        outputs[0].weight_version = told

    def label() -> str:
        assert engine.process() is None, "log-probabilities carry no versions where vLLM has labels"
        outputs = {0: SimpleNamespace(weight_version=None)}
        EngineCore._attach_weight_version(object(), outputs)
        return str(outputs[0].weight_version)

    monkeypatch.setattr(token_versions, "_FIELD", "_attach_weight_version")
    monkeypatch.setattr(EngineCore, "_attach_weight_version", attach)
    note_versions()
    told = "default"
    engine.schedule()
    engine.call("update_weights", update_info={"version": 7})
    engine.schedule()
    assert [label(), label()] == ["default", "7"]
    told = "7"
    engine.schedule()
    engine.call("update_weights", update_info={"version": 8})
    engine.schedule()
    assert [label(), label()] == ["7", "8"]


def test_code_that_is_not_known_stays_as_it_is(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.engine.core import EngineCore

    def of_another_release(self: Any, method: str) -> None: ...

    monkeypatch.setattr(EngineCore, "collective_rpc", of_another_release)
    with caplog.at_level(logging.WARNING):
        note_versions()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert EngineCore.collective_rpc is of_another_release
    engine.schedule()
    assert engine.process() is None
