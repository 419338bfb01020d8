"""The controller's side of an operation that it takes part in itself, with a world of one written down."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from pipeline.errors import TrainingError
from pipeline.train.controller import rank_operations
from pipeline.train.controller.operation_runner import OperationRunner
from pipeline.train.controller.rank_process import Failure, RankState
from pipeline.utils.waiting import CLOCK


class World:
    """Stands in for a site; `ended` is how this rank's operations ended."""

    ranks = 1

    def __init__(self) -> None:
        self.ended: list[Any] = []

    def send(self, orders: Sequence[bytes]) -> None: ...

    def run(self, operation: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        try:
            self.ended.append(operation(self, *arguments))
        except OSError:
            self.ended.append(Failure(0, traceback.format_exc()))
        return self.ended[-1]

    def report(self, outcome: Any) -> list[Any]:
        return [outcome]

    def first_failure(self) -> Failure | None:
        return self.ended[-1] if isinstance(self.ended[-1], Failure) else None


def a_control() -> tuple[OperationRunner, World]:
    world = World()
    return OperationRunner(cast(RankState, world), False, CLOCK), world


def test_what_the_controllers_own_part_raises_is_told_as_its_failure() -> None:
    control, _ = a_control()
    with (
        pytest.raises(TrainingError, match="full_parameters failed on rank 0: OSError: disk full"),
        control.run_alongside("full_parameters", rank_operations.do_nothing, (), rank_operations.do_nothing, ()),
    ):
        raise OSError("disk full")
    assert not control.broken


def test_a_body_that_is_left_early_is_no_failure() -> None:
    control, world = a_control()
    with (
        pytest.raises(GeneratorExit),
        control.run_alongside("full_parameters", rank_operations.do_nothing, (), rank_operations.do_nothing, ()),
    ):
        raise GeneratorExit
    assert world.ended == [None]
    assert not control.broken
