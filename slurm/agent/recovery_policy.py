"""The consequence of a role's end before the attempt's end: its restart in place, or the end of the attempt.

Owns the table of roles and kinds of end, and the budget of each role. A role is restarted if the table has a restart
for this kind of end and the budget is not used up, at its start and later. Two ends suggest that the next process would
meet the same cause, and are not followed by a restart: that of a trainer that was ready and completed no step, and an
error that reports itself as final (`Status.is_final`). A role that is not ready in time is started once more, a server
as often as its budget allows, since its cause may be its node's. A server without budget is abandoned, and the attempt
continues while the others are enough (`ServerQuorum`). Pure: no process, file or clock.

    budget = RestartBudget.from_config("actor", config)
    if budget.allows("signal"):
        budget.use("signal")
        pause = budget.next_pause(ready_seconds=40.0)
"""

import math
from dataclasses import dataclass
from typing import Literal

from pipeline.config import RunConfig
from pipeline.topology.plan import RoleName

EndKind = Literal["early", "exit", "signal", "hang", "late", "final"]
"""How a role ended:

| kind | observation |
|---|---|
| `early` | exit code 0, although the attempt continues |
| `exit` | another exit code |
| `signal` | killed by a signal |
| `hang` | stopped, stuck, or without progress |
| `late` | not ready within `cluster.startup_seconds` |
| `final` | after the report of an error that would recur (`pipeline.errors.would_recur`), or a refused command line |
"""
_PASSING: frozenset[EndKind] = frozenset({"early", "exit", "signal", "hang", "late"})
_START_PAUSE = 1.0
"""Least seconds before the restart of a process that never was ready: a port or a disk needs time to become free."""


@dataclass(frozen=True)
class RecoveryRule:
    """A row of the table.

    Attributes:
        restarts: the kinds of end after which the role is restarted; the others end the attempt.
        pauses: seconds before the first restart, and before any later one. Each pause is half again as long; after a
            process that was ready for longer than the last pause, the first one comes again.
        late_starts: the largest number of restarts after an end of the kind `late`.
        completes_steps: whether a process that was ready must have completed a step to be restarted.
    """

    restarts: frozenset[EndKind]
    pauses: tuple[float, float]
    late_starts: float = 1
    completes_steps: bool = False


RECOVERY: dict[RoleName, RecoveryRule] = {
    # The memory of a GPU may become free late, and a node may be slow to read the model or to compile.
    "inference": RecoveryRule(_PASSING, (1.0, 30.0), late_starts=math.inf),
    "actor": RecoveryRule(_PASSING, (1.0, 30.0)),
    "preprocessor": RecoveryRule(_PASSING, (1.0, 30.0)),
    # All other roles wait for Redis, for at most `FS_OUTAGE_TIMEOUT`.
    "redis": RecoveryRule(_PASSING, (0.2, 5.0)),
    "trainer": RecoveryRule(_PASSING, (0.2, 5.0), completes_steps=True),
}
"""The consequence of each role's end. The budget is `recovery.<role>`."""


@dataclass
class RestartBudget:
    """The restarts of one role in an attempt.

    Attributes:
        limit: the largest number of restarts.
        used: the number of restarts so far.
        late_starts: how many of these followed an end of the kind `late`.
    """

    role: RoleName
    limit: int
    used: int = 0
    late_starts: int = 0
    _pause: float = 0.0

    @classmethod
    def from_config(cls, role: RoleName, config: RunConfig, seats: int = 1) -> "RestartBudget":
        """The budget of a role with `seats` placements: `recovery.<role>`.

        0 for a trainer on several nodes, whose agents would have to agree on each restart, and for one that executes
        job files or serves the Tinker API, which have their own restarts.
        """
        is_shared = role == "trainer" and (seats > 1 or config.serve.enabled or bool(config.training.jobs))
        return cls(role, 0 if is_shared else getattr(config.recovery, role))

    def allows(self, kind: EndKind, *, is_stuck: bool = False) -> bool:
        """Whether the role is restarted after an end of this kind. `is_stuck`: it was ready, but without progress."""
        rule = RECOVERY[self.role]
        if is_stuck or (kind == "late" and self.late_starts >= rule.late_starts):
            return False
        return kind in rule.restarts and self.used < self.limit

    def use(self, kind: EndKind) -> None:
        """Count the restart after an end of this kind."""
        self.used += 1
        self.late_starts += kind == "late"

    def next_pause(self, ready_seconds: float) -> float:
        """The pause before the restart of a process that was ready for `ready_seconds` (0: it never was)."""
        first, longest = RECOVERY[self.role].pauses
        first = first if ready_seconds else max(first, _START_PAUSE)
        repeated = self._pause and ready_seconds <= self._pause
        self._pause = max(first, min(1.5 * self._pause, longest)) if repeated else first
        return self._pause

    def __str__(self) -> str:
        return f"restarted, {self.used} of recovery.{self.role}={self.limit}"


@dataclass(frozen=True)
class ServerQuorum:
    """How many of an attempt's servers may be abandoned: all but `needed` (`RunConfig.server_quorum`)."""

    servers: int
    needed: int

    def survives(self, abandoned: int) -> bool:
        """Whether the attempt continues without this number of servers."""
        return self.servers - abandoned >= self.needed

    def describe(self, abandoned: int) -> str:
        """The servers that are left, for the record of a server that is abandoned."""
        return f"abandoned: {self.servers - abandoned} of {self.servers} servers are left, and {self.needed} are needed"
