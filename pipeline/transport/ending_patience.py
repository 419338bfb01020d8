"""How long an attempt that is ending waits for a backend that is away.

Owns the bound. An attempt that is told to end (`draining`) must commit within `cluster.grace_seconds`, so a wait for
Redis may take `PATIENCE_FRACTION` of the grace only. The rest is for the step under way, the commit, and one exchange
that blocks until its socket's timeout. Must not know the backends.
"""

import math
import time
from collections.abc import Callable

from pipeline.run.events import Event, EventPoller
from pipeline.utils.waiting import CLOCK, Clock

PATIENCE_FRACTION = 0.25


class ShutdownPatience:
    """What the events of an attempt leave of the patience with a backend; `grace` is in seconds."""

    def __init__(
        self, listener: EventPoller, grace: float, clock: Clock = CLOCK, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._listener, self._grace, self._clock, self._wall_clock = listener, grace, clock, wall_clock
        self._noticed: float | None = None

    def time_left(self) -> float:
        """Seconds: infinite while the attempt goes on, 0 once it has failed."""
        heard = self._listener.poll()
        if "failed" in heard:
            return 0.0
        draining = heard.get("draining")
        return math.inf if draining is None else max(0.0, PATIENCE_FRACTION * self._grace - self._elapsed(draining))

    def _elapsed(self, draining: Event) -> float:
        """Seconds since the attempt was told to end.

        The event may be older than this process's first look at it, and may be dated by a clock that is behind: the
        longer time counts.
        """
        now = self._clock.now()
        self._noticed = now if self._noticed is None else self._noticed
        return max(now - self._noticed, self._wall_clock() - draining.time)
