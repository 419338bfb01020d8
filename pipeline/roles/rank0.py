"""Rank 0 of the trainer, for every kind of training: its metrics, its check for the end, and its publication of it.

Owns the common part of an attempt that trains a run's steps (`trainer_session`), one that executes job files
(`offline_session`) and one that serves the API (`tinker_session`). Must not know what is trained.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from pipeline.roles.role_context import RoleContext
from pipeline.run.events import Event, EventPoller
from pipeline.run.metrics_log import Console, MetricSinks
from pipeline.tracking.metric_sinks import tracking_sinks
from pipeline.train.controller.device_release import release_device
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.group_batches import Interrupted
from pipeline.utils.fs_retry import FS_OUTAGE_TIMEOUT, retry_transient


class Rank0:
    """Rank 0's part of one attempt."""

    def __init__(self, context: RoleContext, dispatch: RankGroup) -> None:
        self._context, self._dispatch, self._config = context, dispatch, context.config
        ranks = 1 + max(placement.rank for placement in context.world.placements)
        self._listener = EventPoller(context.events, ranks=ranks)
        self._numbers: dict[str, float] = {}
        """Values that are added to every further report of the role's state."""

    def run(self) -> None:
        """Run the remaining work; returns without `training_finished` when the attempt is ending."""
        raise NotImplementedError

    def _open_sinks(self, opened: ExitStack, check: Callable[[], None]) -> MetricSinks:
        """The sinks of the run's metrics, until `opened` closes; `check` as in `MetricSinks`."""
        paths = self._context.paths
        tracking = tracking_sinks(self._config, paths)
        sinks = MetricSinks(self._context.run.metrics, paths.attempt, [Console(), *tracking], check=check)
        return opened.enter_context(sinks)

    def _get_ready(self, detail: str) -> None:
        """Report readiness. From now on events, not signals, trigger checkpoints and the end."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._context.announce("ready", detail)

    @contextmanager
    def _warming_up(self) -> Iterator[None]:
        """Report a warm-up: that it is running, and when the attempt's first one began and ended, in seconds since the
        epoch."""
        began = time.time()
        self._context.report("ready", "warming up", **self._numbers)
        yield
        self._numbers = {"warm_up/began": began, "warm_up/ended": time.time()} | self._numbers
        self._context.report("ready", "warmed up", **self._numbers)

    def _pulse(self) -> None:
        """Called while rank 0 waits between two operations: keeps the other ranks from timing out.

        Raises `Interrupted` when the attempt is ending.
        """
        self._dispatch.keepalive()
        if (ending := self._ending()) is not None:
            detail = f" ({ending.detail})" if ending.detail else ""
            raise Interrupted(f"{ending.name} by {ending.by}{detail}")

    def _ending(self, at_once: bool = False) -> Event | None:
        """The event that ends the attempt, if there is one; `at_once` as in `EventPoller.poll`."""
        events = self._listener.poll(at_once)
        return events.get("failed") or events.get("draining")

    def _finish(self) -> None:
        """Release the devices, then publish that the training is finished."""
        release_device(self._dispatch)
        by = self._context.placement.name
        retry_transient(
            "the end to be published", lambda: self._context.events.publish("training_finished", by), FS_OUTAGE_TIMEOUT
        )
