"""One simulated time for several processes.

The time and when each process wants to go on lie in a file that all map. The time moves only when every process sleeps,
and then to the moment at which the first of them goes on: however slowly a busy machine starts or runs a process, no
deadline of another one passes meanwhile, and a minute takes as long as the processes need for what they do in it. A
process that is starting counts as one that runs; one that has ended, or that the test has stopped, does not count.

    with SharedTime(tmp_path / "time", processes=4) as time:   # the test
        place = time.expect()                                  # a process will start here
    clock = SharedClock(path, place)                           # that process
"""

import math
import mmap
import struct
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline.utils.waiting import Clock

PAUSE = 0.002
"""Real seconds between two looks at the time."""
_RUNS, _AWAY = -math.inf, math.inf
_SIZE = struct.calcsize("d")


class _Times:
    """The file: the time, and for each process until when it sleeps."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")  # each is written at once

    @property
    def now(self) -> float:
        return self._numbers[0]

    @now.setter
    def now(self, seconds: float) -> None:
        self._numbers[0] = seconds

    def goes_on(self) -> list[float]:
        return list(self._numbers[1:])

    def set(self, place: int, goes_on: float) -> None:
        self._numbers[1 + place] = goes_on


class SharedTime:
    """The test's side: moves the time while the block runs."""

    def __init__(self, path: Path, processes: int) -> None:
        path.write_bytes(struct.pack(f"{1 + processes}d", 0.0, *[_AWAY] * processes))
        self._times, self._expected = _Times(path), 0
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._move, name="shared time", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def expect(self) -> int:
        """The place of a process that is about to be started; until it sleeps the time stands."""
        self._expected += 1
        self._times.set(self._expected - 1, _RUNS)
        return self._expected - 1

    def leave_out(self, place: int) -> None:
        """From now on the time does not wait for this process: it is gone, or stopped."""
        self._times.set(place, _AWAY)

    def take_in(self, place: int) -> None:
        """The time waits again for a process that is to go on."""
        self._times.set(place, _RUNS)

    def pass_by(self, seconds: float) -> None:
        """Move the time, where all processes are away."""
        with self._lock:
            assert all(goes_on == _AWAY for goes_on in self._times.goes_on()), "the time of others would jump"
            self._times.now += seconds

    def _move(self) -> None:
        while not self._over.wait(PAUSE):
            with self._lock:
                first = min(self._times.goes_on())
                if self._times.now < first < _AWAY:
                    self._times.now = first


class SharedClock(Clock):
    """The clock of one process."""

    def __init__(self, path: Path, place: int) -> None:
        self._times, self._place = _Times(path), place

    def now(self) -> float:
        return self._times.now

    def sleep(self, seconds: float) -> None:
        until = self._times.now + seconds
        self._times.set(self._place, until)
        while self._times.now < until:
            time.sleep(PAUSE)
        self._times.set(self._place, _RUNS)

    def leave(self) -> None:
        """The process ends."""
        self._times.set(self._place, _AWAY)
