"""What an agent leaves on disk about itself: that it lives, and that it is down.

Owns `attempts/<attempt>/alive/<rank>`, touched every few seconds for as long as the agent's process runs, and
`down/agent.<rank>`, its last word. Promises that a filesystem which fails for a while ends neither the agent nor the
touches. A rank whose agent is gone without its last word is lost: it was killed, or died with its node.
"""

import threading
from types import TracebackType

from pipeline import files
from pipeline.paths import AttemptPaths
from slurm.directory import FileDirectory

TOUCH_SECONDS = 5.0


class SignsOfLife:
    """Touches the file of a rank while the block runs."""

    def __init__(self, paths: AttemptPaths, rank: int, seconds: float = TOUCH_SECONDS) -> None:
        self._file, self._seconds = paths.alive / str(rank), seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="alive", daemon=True)

    def __enter__(self) -> "SignsOfLife":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(timeout=1.0)  # a touch may hang with its filesystem

    def _live(self) -> None:
        while True:
            self._touch()
            if self._over.wait(self._seconds):
                return

    def _touch(self) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()
        except OSError:
            return  # whoever watches sees that the sign is late


def leave(paths: AttemptPaths, rank: int) -> None:
    """Say that this rank's agent and everything that it started is down."""
    files.write_document(paths.down(f"agent.{rank}"), "left")


def lost_ranks(paths: AttemptPaths, ranks: int) -> tuple[int, ...]:
    """The ranks, of so many, that did not say that they are down; in order. While agents live, they are among them.

    Lists the folder, so that a mark which was absent a moment ago on this machine is seen.
    """
    attempt = FileDirectory(paths.root)
    attempt.names()
    marks = attempt.names(paths.down("agent").parent.name)
    return tuple(rank for rank in range(ranks) if paths.down(f"agent.{rank}").name not in marks)
