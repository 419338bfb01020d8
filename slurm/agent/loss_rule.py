"""The rule by which an agent counts as lost within seconds, from its TCP link and its heartbeat file.

Owns what each observation of a link means, and the confirmation before anyone acts on it. The kernel of a node answers
for a process that cannot: it refuses connections to a process that has ended, and accepts them for one that is stopped
or slow. So only two observations suggest a loss:

| sign | observation | meaning |
|---|---|---|
| `answers` | the agent answers with the proof of its rank | it runs, and reaches the shared file system |
| `accepts` | a connection, without an answer in time | it is stopped or slow, or its disk is away |
| `refuses` | the node refuses the connection | its process has ended |
| `unreachable` | no connection within a second | its node has vanished, or the network between |
| `unknown` | this agent cannot connect at all | nothing |

A rank is lost if all of this holds:

1. Since its last answer, every attempt to connect was refused, for `REFUSED_SECONDS`; or some were unreachable, and all
   failed for `UNREACHABLE_SECONDS`.
2. Its heartbeat file was read at each of these attempts, and was never touched after the first of them. An agent that
   is not asked any more touches its file every `LATE_SECONDS` for a while (`agent_heartbeat`).
3. No other rank that this agent asks can reach it (`control_link`).

A touched file, or a rank that reaches it, ends the suspicion until the agent answers again. Whatever this rule does not
show as a loss is left to the heartbeat's timeout of minutes (`agent_heartbeat`). Must not know sockets or files.

    rule = LossRule(clock, unproven_seconds=touch_interval)
    if rule.suspects(sign): touched = …          # the time of the last touch; None if the disk fails here
    if rule.look(sign, touched): …               # confirmed, but for the other ranks
"""

from typing import Literal

from pipeline.utils.waiting import Clock
from slurm.agent.liveness import StallTimer

LinkSign = Literal["answers", "accepts", "refuses", "unreachable", "unknown"]

LOOK_SECONDS = 1.0
"""Pause between two looks at a link."""
REFUSED_SECONDS = 5.0
"""Seconds of refused connections: enough for an agent that runs to notice the lost link and touch its file twice."""
UNREACHABLE_SECONDS = 20.0
"""Seconds without any connection: a switch that restarts a port, or a lost packet, takes less."""
LATE_SECONDS = 2.0
"""Seconds after the last question when an agent touches its heartbeat file, and between the following touches."""
LATE_TOUCHES = 4
"""Touches in place of a lost link. Its monitor may need three seconds until it first reads the file, and the touch that
excuses the agent must come later."""
MAX_LOOK_SECONDS = 5.0
"""Most seconds that one look adds: one that comes later was delayed on this side."""


class LossRule:
    """The suspicion that one rank is lost, as one other rank observes it."""

    def __init__(self, clock: Clock, unproven_seconds: float = 0.0) -> None:
        """`unproven_seconds` are added while the rank has never answered here: it does not expect questions yet, so
        only its regular touches show that it runs."""
        self._timer, self._unproven = StallTimer(clock, MAX_LOOK_SECONDS), unproven_seconds
        self._period = 0
        self._first_touch: int | None = None
        self._unreachable = self._excused = False

    def suspects(self, sign: LinkSign) -> bool:
        """Whether a look with this sign needs the heartbeat file."""
        return sign in ("refuses", "unreachable") and not self._excused

    def excuse(self) -> None:
        """End the suspicion until the rank answers again, since something else shows that it runs."""
        self._excused = True

    def look(self, sign: LinkSign, touched: int | None) -> str:
        """Record a look. Returns the cause of the loss in one line; empty while the rank is not lost.

        `touched` identifies the last touch of the heartbeat file (0: there is no file); None if it cannot be read.
        """
        if sign == "answers":
            self._excused, self._unproven = False, 0.0
        if not self.suspects(sign) or touched is None:
            self._begin_period(None)
            return ""
        if self._first_touch is None:
            self._begin_period(touched)
        if touched != self._first_touch:
            self.excuse()
            return ""
        self._unreachable |= sign == "unreachable"
        seconds = self._timer.look(self._period)
        if seconds < self._unproven + (UNREACHABLE_SECONDS if self._unreachable else REFUSED_SECONDS):
            return ""
        observed = "its node is unreachable" if self._unreachable else "its process has ended: its node refuses it"
        return f"{observed}, no connection for {seconds:.0f} s, and its heartbeat stopped"

    def _begin_period(self, touched: int | None) -> None:
        self._period += 1
        self._first_touch, self._unreachable = touched, False
        self._timer.look(self._period)
