"""The loop of a live display: read, show, pause.

Owns the order of these steps. Promises that the last reading is shown. The loop has no deadline, since a run has none;
the user may end the display at any time.
"""

from collections.abc import Callable
from typing import TypeVar

from pipeline.utils.waiting import Clock

T = TypeVar("T")


def show_until_last(
    look: Callable[[], tuple[T, bool]], show: Callable[[T, bool], None], pause: float, clock: Clock
) -> T:
    """Call `look` every `pause` seconds and show its readings up to the last one, which is returned."""
    while True:
        seen, last = look()
        show(seen, last)
        if last:
            return seen
        clock.sleep(pause)
