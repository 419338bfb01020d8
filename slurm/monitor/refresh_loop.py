"""The loop of whoever follows runs: look, show, pause.

Owns its order. Promises that what is shown last is what was seen last. It has no deadline: a run takes as long as it
takes, and whoever follows it may leave at any time.
"""

from collections.abc import Callable
from typing import TypeVar

from pipeline.utils.waiting import Clock

T = TypeVar("T")


def show_until_last(
    look: Callable[[], tuple[T, bool]], show: Callable[[T, bool], None], pause: float, clock: Clock
) -> T:
    """Show what `look` sees, every `pause` seconds, up to what it calls the last; that."""
    while True:
        seen, last = look()
        show(seen, last)
        if last:
            return seen
        clock.sleep(pause)
