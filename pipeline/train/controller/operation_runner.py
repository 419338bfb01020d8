"""The controller's side of one operation: order it, take part in it, hear how it went.

Owns what the controller knows between operations: whether one is running, whether the world is broken, and which parts
of which models are on the device. Promises that one operation runs at a time, that what it needs is on the device
before it begins, that what cannot travel harms nobody, and that a failure on any rank becomes one `TrainingError` with
the rank and its traceback. Must not know what operations do, nor how rows are cut.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pipeline.errors import TrainingError
from pipeline.train.controller import device_placement, rank_operations
from pipeline.train.controller.device_placement import Move, Requirements, Residence, State
from pipeline.train.controller.rank_process import STOP, Failure, Operation, RankState, write_orders
from pipeline.utils import heartbeat
from pipeline.utils.waiting import Clock


class OperationRunner:
    """Runs operations on all ranks, on this one too."""

    def __init__(self, site: RankState, colocated: bool, clock: Clock) -> None:
        self.site, self.colocated, self._clock = site, colocated, clock
        self.states: dict[Residence, State] = {}
        self.broken = False
        self._running = ""
        self._heard = clock.now()

    def run(
        self, name: str, operation: Operation, arguments: Sequence[tuple[Any, ...]], needs: Requirements
    ) -> list[Any]:
        """Run the operation, called `name` in reports, with each rank's arguments; its results in rank order."""
        return self._run(name, operation, arguments, device_placement.plan_moves(self.states, needs, self.colocated))

    def run_on_all(self, name: str, operation: Operation, *args: Any, needs: Requirements | None = None) -> list[Any]:
        """`run` with the same arguments on every rank."""
        return self.run(name, operation, [args] * self.site.ranks, needs or {})

    def empty_device(self) -> None:
        """Have every part of every model leave the device."""
        moves = device_placement.empty_device(self.states)
        self._run("offload_all", rank_operations.do_nothing, [()] * self.site.ranks, moves)

    @contextmanager
    def run_alongside(
        self,
        name: str,
        worker_operation: Operation,
        arguments: tuple[Any, ...],
        drain: Operation,
        left: tuple[Any, ...],
    ) -> Iterator[None]:
        """The other ranks run the operation `theirs`; the body is this rank's part of it, and `rest` runs what the body
        left undone.

        What the body raises is this rank's failure of the operation: the others are not waited for beyond the grace.
        """
        orders = write_orders(worker_operation, [arguments] * self.site.ranks)
        self._begin(name)
        self.site.send(orders)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a failure of the operation, which becomes a report
            self._end(rank_operations.raise_on_rank, (error,))
        except BaseException:
            self._end(drain, left)
            raise
        else:
            self._end(drain, left)

    def keepalive(self) -> None:
        """Show the ranks, if they have not heard from it for a while, and the agent that the controller lives."""
        heartbeat.beat()
        if self._clock.now() - self._heard > self.site.patience.control / 4:
            self.run_on_all("idle", rank_operations.do_nothing)

    def close(self) -> None:
        """End `serve` on all ranks."""
        if not self.broken:
            self.site.send([STOP] * self.site.ranks)

    def _run(
        self, name: str, operation: Operation, arguments: Sequence[tuple[Any, ...]], moves: tuple[Move, ...]
    ) -> list[Any]:
        given = [(moves, operation, *each) for each in arguments]
        orders = write_orders(rank_operations.run_after_moves, given)
        self._begin(name)
        self.states = device_placement.states_after(self.states, moves, known=False)
        self.site.send(orders)
        outcomes = self._end(rank_operations.run_after_moves, given[0])
        self.states = device_placement.states_after(self.states, moves)
        return outcomes

    def _begin(self, name: str) -> None:
        if self.broken or self._running:
            state = f"{self._running} is still running" if self._running else "the world is broken"
            raise TrainingError(f"{name} is not possible: {state}")
        self._running, self.broken = name, True

    def _end(self, operation: Operation, arguments: tuple[Any, ...]) -> list[Any]:
        """Run this rank's part, gather all outcomes, and raise the first failure."""
        name, self._running = self._running, ""
        try:
            outcomes = self.site.report(self.site.run(operation, arguments)) or []
        except (RuntimeError, TrainingError) as error:
            raise self._error(name, self.site.first_failure(), str(error)) from error
        self.broken = False
        self._heard = self._clock.now()
        if any(isinstance(outcome, Failure) for outcome in outcomes):
            raise self._error(name, self.site.first_failure())
        return outcomes

    @staticmethod
    def _error(name: str, failure: Failure | None, otherwise: str = "") -> TrainingError:
        if failure is None:
            return TrainingError(f"{name} failed: {otherwise}")
        reason = failure.text.strip().splitlines()[-1]
        return TrainingError(f"{name} failed on rank {failure.rank}: {reason}\n{failure.text}")
