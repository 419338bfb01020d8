"""Rank 0 of the trainer, whatever it trains: its numbers, how it hears the end, and how it tells it.

Owns what an attempt that trains a run's own steps (`session`) and one that does the jobs of files (`offline_session`)
have in common. Must not know what is trained.
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
    """The controller's part of one attempt."""

    def __init__(self, context: RoleContext, dispatch: RankGroup) -> None:
        self._context, self._dispatch, self._config = context, dispatch, context.config
        self._listener = EventPoller(context.events, ranks=1 + max(place.rank for place in context.world.placements))
        self._numbers: dict[str, float] = {}
        """What every further report of the role's state says too."""

    def run(self) -> None:
        """Train what is left; returns without `training_finished` when the attempt is ending."""
        raise NotImplementedError

    def _open_sinks(self, opened: ExitStack, check: Callable[[], None]) -> MetricSinks:
        """Where the run's numbers go until `opened` closes; `check` as in `MetricSinks`."""
        paths = self._context.paths
        tracking = tracking_sinks(self._config, paths)
        sinks = MetricSinks(self._context.run.metrics, paths.attempt, [Console(), *tracking], check=check)
        return opened.enter_context(sinks)

    def _get_ready(self, detail: str) -> None:
        """From now on events say when to commit and end, and signals do not."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._context.announce("ready", detail)

    @contextmanager
    def _warming_up(self) -> Iterator[None]:
        """What people see of a warm-up: that it goes on, and when the first of the attempt was, in seconds since the
        epoch."""
        began = time.time()
        self._context.report("ready", "warming up", **self._numbers)
        yield
        self._numbers = {"warm_up/began": began, "warm_up/ended": time.time()} | self._numbers
        self._context.report("ready", "warmed up", **self._numbers)

    def _pulse(self) -> None:
        """Called while the controller waits between two operations: show the ranks that it lives.

        Raises `Interrupted` when the attempt is ending.
        """
        self._dispatch.keepalive()
        if (ending := self._ending()) is not None:
            detail = f" ({ending.detail})" if ending.detail else ""
            raise Interrupted(f"{ending.name} by {ending.by}{detail}")

    def _ending(self, at_once: bool = False) -> Event | None:
        """The event that ends the attempt, if it was heard; `at_once` as in `EventPoller.poll`."""
        heard = self._listener.poll(at_once)
        return heard.get("failed") or heard.get("draining")

    def _finish(self) -> None:
        """Give the devices back, then tell that the training is finished."""
        release_device(self._dispatch)
        by = self._context.placement.name
        retry_transient(
            "the end to be told", lambda: self._context.events.publish("training_finished", by), FS_OUTAGE_TIMEOUT
        )
