"""How an execution is told to end early, and says that it did.

Owns the file by which a launcher asks and rank 0 answers: signals reach the launcher alone, which may be told to end at
any moment, while only rank 0 knows when a step is whole. Promises that an answer means that what was done is committed.

    stop = Stop(folder / "stop")
    stop.ask()                  # the launcher
    if stop.asked: …            # rank 0, between two steps
    stop.answer()               # rank 0, its last act
    if stop.answered: …         # the launcher, when rank 0 is gone
"""

from pathlib import Path


class Stop:
    """One request to end early, at most; `path` is this execution's own and not there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._answer = path.with_name(f"{path.name}.answered")

    def ask(self) -> None:
        """Ask for an end after the step under way. Safe in a signal handler."""
        self.path.touch()

    @property
    def asked(self) -> bool:
        return self.path.exists()

    def answer(self) -> None:
        """Say that the execution ended because it was asked to."""
        self._answer.touch()

    @property
    def answered(self) -> bool:
        return self._answer.exists()
