"""Each agent monitors the next rank: by its link, and by its heartbeat file.

Owns the observation of one rank by another one, and the ring in which each agent has one monitor. A link shows within
seconds that a process has ended or a node has vanished (`loss_rule`). A stopped agent (SIGSTOP) keeps its connections,
and a node whose network is cut off may reach its disk: these are lost when the file has not been touched for minutes.
Promises that a failing disk of the observer makes no rank lost. Must not know sockets (`control_link`), nor the
consequence of a loss.
"""

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from pipeline.run.paths import AttemptPaths
from pipeline.run.poll_rates import TOUCH_SECONDS, touch_interval
from pipeline.utils.waiting import CLOCK, Clock
from slurm.agent.liveness import StallTimer
from slurm.agent.loss_rule import LOOK_SECONDS, LinkSign, LossRule


class Peers(Protocol):
    """The other agents, as this one reaches them over TCP."""

    def look(self, rank: int) -> LinkSign:
        """What the link to a rank shows now."""

    def is_reached(self, rank: int) -> bool:
        """Whether another rank reaches it, within seconds."""


class NoPeers:
    """Agents that are known by their files only."""

    def look(self, rank: int) -> LinkSign:
        return "unknown"

    def is_reached(self, rank: int) -> bool:
        return False


NO_PEERS = NoPeers()


class NeighborWatch:
    """Monitors the agent of the next rank while the block runs; the last rank monitors the first.

    In this ring each agent has one monitor, for any number of ranks. If several agents are stopped, at least one of
    them has a monitor that runs. `seconds` must include the visibility delay of NFS.
    """

    def __init__(
        self,
        paths: AttemptPaths,
        rank: int,
        ranks: int,
        seconds: float,
        report: Callable[[int, str], bool],
        peers: Peers = NO_PEERS,
    ) -> None:
        """`report` is called with the rank and the cause when it is lost: by its link (`loss_rule`), or since its
        heartbeat has not changed for `seconds`. It returns whether the attempt continues without that rank; then its
        next rank is monitored."""
        self._paths, self._rank, self._ranks, self._seconds = paths, rank, ranks, seconds
        self._peers = peers
        self.neighbor = self._check((rank + 1) % ranks)
        self._report, self._over = report, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="neighbor", daemon=True) if ranks > 1 else None

    def __enter__(self) -> "NeighborWatch":
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if self._thread:
            self._thread.join(timeout=1.0)  # a poll may hang on a dead file system

    def _watch(self) -> None:
        while not self._over.wait(min(LOOK_SECONDS, TOUCH_SECONDS)):
            if lost := self.neighbor.look():
                following = (self.neighbor.rank + 1) % self._ranks
                if not self._report(self.neighbor.rank, lost) or following == self._rank:
                    return
                self.neighbor = self._check(following)

    def _check(self, rank: int) -> "NeighborCheck":
        between = touch_interval(self._ranks)
        return NeighborCheck(self._paths, rank, self._seconds, peers=self._peers, touch_seconds=between)


class NeighborCheck:
    """One rank, observed by another rank: its link, and its heartbeat file when there is no answer.

    A network that fails makes no rank lost, since the file is read then.
    """

    def __init__(
        self,
        paths: AttemptPaths,
        rank: int,
        seconds: float,
        clock: Clock = CLOCK,
        *,
        peers: Peers = NO_PEERS,
        touch_seconds: float = 0.0,
    ) -> None:
        """Without an answer of the rank's agent, its file is read at most every `touch_seconds`, in which it is touched
        once; but at each look that suggests a loss."""
        self.rank = rank
        self._file, self._seconds = paths.sign_of_life(rank), seconds
        self._silence = StallTimer(clock, 2 * TOUCH_SECONDS)
        self._rule = LossRule(clock, touch_seconds)
        self._peers, self._answered = peers, 0
        self._touch_seconds, self._clock, self._read_at = touch_seconds, clock, float("-inf")
        self._sign = 0

    def look(self) -> str:
        """Why the rank counts as lost; empty while its heartbeat changes, and if the disk fails on this rank. Call it
        at least every `TOUCH_SECONDS`."""
        link = self._peers.look(self.rank)
        self._answered += link == "answers"
        is_due = link != "answers" and self._clock.now() - self._read_at >= self._touch_seconds
        if (is_due or self._rule.suspects(link)) and not self._read():
            self._rule.look(link, None)
            return ""
        if cause := self._rule.look(link, self._sign):
            if not self._peers.is_reached(self.rank):
                return cause
            self._rule.excuse()
        silent = self._silence.look((self._answered, self._sign))
        cause = f"no sign of life for {silent:.0f} s: its agent is stopped (SIGSTOP), or its node or its disk is away"
        return cause if silent > self._seconds else ""

    def _read(self) -> bool:
        """Read the time of the last touch; whether the disk allowed it."""
        try:
            with self._file.open("rb") as file:  # opening makes an NFS client fetch the time from its server
                self._sign = os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            self._sign = 0
        except OSError:
            return False
        self._read_at = self._clock.now()
        return True
