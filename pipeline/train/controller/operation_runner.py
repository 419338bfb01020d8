"""The controller's side of one operation: send it to the ranks, execute rank 0's part, gather the outcomes.

Owns the controller's state between operations: the running operation, whether the world is broken, and the placement of
models. Promises that one operation runs at a time, that the needed parts are on the device before it begins, that
arguments which cannot be pickled leave the world intact, and that a failure on any rank becomes one `TrainingError`
with the rank and its traceback. Must not know the content of operations, nor the sharding of rows.
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
    """Runs operations on all ranks, including this one."""

    def __init__(self, site: RankState, colocated: bool, clock: Clock) -> None:
        self.site, self.colocated, self._clock = site, colocated, clock
        self.states: dict[Residence, State] = {}
        self.broken = False
        self._running = ""
        self._last_operation = clock.now()

    def run(
        self, name: str, operation: Operation, arguments: Sequence[tuple[Any, ...]], needs: Requirements
    ) -> list[Any]:
        """Run `operation` with the arguments of each rank; results in rank order. `name` is for reports."""
        return self._run(name, operation, arguments, device_placement.plan_moves(self.states, needs, self.colocated))

    def run_on_all(self, name: str, operation: Operation, *args: Any, needs: Requirements | None = None) -> list[Any]:
        """`run` with the same arguments on every rank."""
        return self.run(name, operation, [args] * self.site.ranks, needs or {})

    def empty_device(self) -> None:
        """Offload every part of every model."""
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
        """A block that is this rank's part of an operation, while the other ranks run `worker_operation`. `drain` runs
        at its end, with the arguments `left`, for the collectives that the block has not taken part in.

        An error in the block is this rank's failure of the operation: the other ranks get only the grace to finish.
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
        """Send the agent a heartbeat and, if the last operation is long ago, an empty operation to the ranks."""
        heartbeat.beat()
        # A rank that waits for an operation longer than `patience.control` takes the controller for dead.
        if self._clock.now() - self._last_operation > self.site.patience.control / 4:
            self.run_on_all("idle", rank_operations.do_nothing)

    def close(self) -> None:
        """End `serve` on all ranks."""
        if not self.broken:
            self.site.send([STOP] * self.site.ranks)

    def _run(
        self, name: str, operation: Operation, arguments: Sequence[tuple[Any, ...]], moves: tuple[Move, ...]
    ) -> list[Any]:
        with_moves = [(moves, operation, *rank_arguments) for rank_arguments in arguments]
        # Pickled before `_begin`: arguments that cannot be pickled raise here, while no rank is involved yet.
        orders = write_orders(rank_operations.run_after_moves, with_moves)
        self._begin(name)
        self.states = device_placement.states_after(self.states, moves, known=False)
        self.site.send(orders)
        outcomes = self._end(rank_operations.run_after_moves, with_moves[0])
        self.states = device_placement.states_after(self.states, moves)
        return outcomes

    def _begin(self, name: str) -> None:
        if self.broken or self._running:
            state = f"{self._running} is still running" if self._running else "the world is broken"
            raise TrainingError(f"{name} is not possible: {state}")
        # Broken until `_end` has every rank's outcome: an error in between leaves ranks in an unknown operation.
        self._running, self.broken = name, True

    def _end(self, operation: Operation, arguments: tuple[Any, ...]) -> list[Any]:
        """Run this rank's part, gather all outcomes, and raise the first failure, if there is one."""
        name, self._running = self._running, ""
        try:
            outcomes = self.site.report(self.site.run(operation, arguments)) or []
        except (RuntimeError, TrainingError) as error:
            raise self._error(name, self.site.first_failure(), str(error)) from error
        self.broken = False
        self._last_operation = self._clock.now()
        if any(isinstance(outcome, Failure) for outcome in outcomes):
            raise self._error(name, self.site.first_failure())
        return outcomes

    @staticmethod
    def _error(name: str, failure: Failure | None, otherwise: str = "") -> TrainingError:
        if failure is None:
            return TrainingError(f"{name} failed: {otherwise}")
        reason = failure.text.strip().splitlines()[-1]
        return TrainingError(f"{name} failed on rank {failure.rank}: {reason}\n{failure.text}")
