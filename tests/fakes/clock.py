"""A clock that moves only when told."""

from pipeline.utils.waiting import Clock


class FakeClock(Clock):
    """Starts at `start`; `sleep` moves it and is remembered."""

    def __init__(self, start: float = 0.0) -> None:
        self.time = start
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds
