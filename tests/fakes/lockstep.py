"""Several programs on one simulated time.

Each program runs in a thread of its own, but only one at a time: it runs until it sleeps or ends, and then the one
whose sleep is over first goes on. So whole agents can be run against each other without a real second, always in the
same order.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.utils.waiting import Clock


class StepClock(Clock):
    """The clock of one program: asleep, it lets the others run."""

    def __init__(self, steps: "Lockstep") -> None:
        self._steps = steps
        self.wakes = 0.0
        self.turn, self.rests = threading.Semaphore(0), threading.Semaphore(0)

    def now(self) -> float:
        return self._steps.time

    def sleep(self, seconds: float) -> None:
        self.wakes = self._steps.time + seconds
        self.rests.release()
        self.turn.acquire()


class Lockstep:
    """The time, and the programs that live in it."""

    def __init__(self) -> None:
        self.time = 0.0

    def run(self, programs: Sequence[Callable[[Clock], Any]], seconds: float = 3600.0) -> list[Any]:
        """What each program returned, or the exception that it raised; `AssertionError` if one goes on for longer."""
        results: list[Any] = [None] * len(programs)
        clocks = [StepClock(self) for _ in programs]
        going = set(range(len(programs)))

        def live(place: int) -> None:
            clocks[place].turn.acquire()
            try:
                results[place] = programs[place](clocks[place])
            except BaseException as error:  # noqa: BLE001 the test looks at it
                results[place] = error
            going.discard(place)
            clocks[place].rests.release()

        threads = [threading.Thread(target=live, args=(place,), daemon=True) for place in going]
        for thread in threads:
            thread.start()
        while going:
            place = min(going, key=lambda place: (clocks[place].wakes, place))
            assert clocks[place].wakes < seconds, f"program {place} goes on after {self.time:.0f} s"
            self.time = max(self.time, clocks[place].wakes)
            clocks[place].turn.release()
            clocks[place].rests.acquire()
        return results
