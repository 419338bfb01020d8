"""The fraction of time in which a condition holds.

Owns `TimeFraction`. Knows nothing of the condition.
"""

import time
from collections.abc import Callable
from types import TracebackType


class TimeFraction:
    """The fraction of the time in which at least one `with fraction:` block was running.

    blocked = TimeFraction()
    with blocked:
        await room()
    blocked.pop()      # 0.25: a quarter of the time since the last call
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._inside = 0
        self._busy = 0.0
        self._since = self._last = now()

    def __enter__(self) -> None:
        self._count()
        self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._count()
        self._inside -= 1

    def pop(self) -> float:
        """The fraction since the last call; restarts the measurement."""
        self._count()
        elapsed = self._last - self._since
        fraction = self._busy / elapsed if elapsed > 0 else 0.0
        self._busy, self._since = 0.0, self._last
        return fraction

    def _count(self) -> None:
        now = self._now()
        if self._inside:
            self._busy += now - self._last
        self._last = now
