"""What an agent leaves on disk about itself: that it lives, and that it is down.

Owns `attempts/<attempt>/alive/<rank>`, touched every few seconds for as long as the agent's process runs, and the
folder `down/`, with a mark for each role that is down and, as an agent's last word, `agent.<rank>`. Promises that a
filesystem which fails for a while ends neither the agent nor the touches, and that whoever waits for marks lists their
folder, once for all of them. A rank whose agent is gone without its last word is lost: it was killed, or died with its
node. An agent that is stopped ends nothing, so each agent watches the signs of the next rank's (`NeighborWatch`).
"""

import os
import threading
from collections.abc import Callable
from types import TracebackType

from pipeline.run.paths import DOWN, AttemptPaths, down_mark
from pipeline.topology.plan import Placement
from pipeline.utils.fs_retry import FINAL_WRITE_TIMEOUT, retry_transient
from pipeline.utils.shared_dir import SharedDir
from pipeline.utils.waiting import CLOCK, Clock
from slurm.agent.liveness import StallTimer

TOUCH_SECONDS = 5.0


class HeartbeatFile:
    """Touches the file of a rank while the block runs."""

    def __init__(self, paths: AttemptPaths, rank: int, seconds: float = TOUCH_SECONDS) -> None:
        self._file, self._seconds = paths.sign_of_life(rank), seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="alive", daemon=True)

    def __enter__(self) -> "HeartbeatFile":
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


class NeighborWatch:
    """Watches the agent of the next rank, the last one that of the first, while the block runs.

    In a ring each agent is watched once, however many there are, and of those that are stopped together one has a
    watcher that runs. What is seen late by NFS clients is to be part of `seconds`.
    """

    def __init__(
        self, paths: AttemptPaths, rank: int, ranks: int, seconds: float, tell: Callable[[int, str], None]
    ) -> None:
        """`tell` is called once with the rank and what was seen, when its sign has not changed for `seconds`."""
        self.neighbor = NeighborCheck(paths, (rank + 1) % ranks, seconds)
        self._tell, self._over = tell, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="neighbor", daemon=True) if ranks > 1 else None

    def __enter__(self) -> "NeighborWatch":
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if self._thread:
            self._thread.join(timeout=1.0)  # a look may hang with its filesystem

    def _watch(self) -> None:
        while not self._over.wait(TOUCH_SECONDS):
            if lost := self.neighbor.look():
                self._tell(self.neighbor.rank, lost)
                return


class NeighborCheck:
    """The signs of life of one rank, as another one sees them."""

    def __init__(self, paths: AttemptPaths, rank: int, seconds: float, clock: Clock = CLOCK) -> None:
        self.rank = rank
        self._file, self._seconds = paths.sign_of_life(rank), seconds
        self._silence = StallTimer(clock, 2 * TOUCH_SECONDS)

    def look(self) -> str:
        """What is wrong with it, in words; empty while it shows that it lives, and where the disk fails here."""
        try:
            with self._file.open("rb") as file:  # an NFS client asks its server for the time only when it opens
                sign = os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            sign = 0
        except OSError:
            return ""
        silent = self._silence.look(sign)
        told = f"no sign of life for {silent:.0f} s: its agent is stopped (SIGSTOP), or its node or its disk is away"
        return told if silent > self._seconds else ""


class ExitMarkers:
    """Which roles and agents are down: the folder of marks, as it was when it was looked at last."""

    def __init__(self, attempt: SharedDir, pause: float, clock: Clock = CLOCK) -> None:
        """Looks at the disk at most every `pause` seconds, and only when it is asked."""
        self._attempt, self._pause, self._clock = attempt, pause, clock
        self._names: frozenset[str] = frozenset()
        self._due = float("-inf")

    def is_down(self, placement: Placement) -> bool:
        """Whether a role is down, or its agent has left and nothing of it can be up. False while the disk fails."""
        self._look()
        return not self._names.isdisjoint((placement.name, agent_name(placement.rank)))

    def _look(self) -> None:
        if self._clock.now() < self._due:
            return
        self._due = self._clock.now() + self._pause
        try:
            self._names = frozenset(self._attempt.names(DOWN))
        except OSError:
            return  # a mark that is seen later changes nothing but the time


def agent_name(rank: int) -> str:
    """What the agent of a rank is called where roles are called `trainer.0`."""
    return f"agent.{rank}"


def mark_down(attempt: SharedDir, rank: int, clock: Clock = CLOCK) -> None:
    """Say that this rank's agent and everything that it started is down; it does not fail where the disk does."""
    try:
        retry_transient(
            "the last word", lambda: attempt.replace(down_mark(agent_name(rank)), "left"), FINAL_WRITE_TIMEOUT, clock
        )
    except OSError as error:
        print(f"rollcall: agent {rank} could not say that it left: {error}", flush=True)


def unexited_ranks(attempt: SharedDir, ranks: int) -> tuple[int, ...]:
    """The ranks, of so many, that did not say that they are down; in order. While agents live, they are among them."""
    attempt.names()  # the folder of marks may itself be one that was absent a moment ago on this machine
    marks = attempt.names(DOWN)
    return tuple(rank for rank in range(ranks) if agent_name(rank) not in marks)
