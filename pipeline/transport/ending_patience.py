"""The timeout for an unreachable backend while the attempt is ending.

Owns the bound. An attempt that must end (`draining`) has to save its checkpoint within `cluster.grace_seconds`, so
waiting for Redis may take only `PATIENCE_FRACTION` of the grace. The rest is for the step under way, the checkpoint,
and one exchange that blocks until its socket's timeout. Must not know the backends.
"""

import math
import time
from collections.abc import Callable

from pipeline.run.events import Event, EventPoller
from pipeline.utils.waiting import CLOCK, Clock

PATIENCE_FRACTION = 0.25


class ShutdownPatience:
    """The time that an attempt's events leave for a backend; `grace` is in seconds."""

    def __init__(
        self, listener: EventPoller, grace: float, clock: Clock = CLOCK, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._listener, self._grace, self._clock, self._wall_clock = listener, grace, clock, wall_clock
        self._noticed: float | None = None

    def time_left(self) -> float:
        """Seconds to wait for the backend: infinite while the attempt runs, 0 once it has failed."""
        events = self._listener.poll()
        if "failed" in events:
            return 0.0
        draining = events.get("draining")
        return math.inf if draining is None else max(0.0, PATIENCE_FRACTION * self._grace - self._elapsed(draining))

    def _elapsed(self, draining: Event) -> float:
        """Seconds since the attempt was asked to end.

        The event may have been written before this process first polled it, or with a clock that is behind. The longer
        of both measurements counts.
        """
        now = self._clock.now()
        self._noticed = now if self._noticed is None else self._noticed
        return max(now - self._noticed, self._wall_clock() - draining.time)
