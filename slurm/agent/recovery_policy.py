"""The consequence of a role's end before the attempt's end: its restart in place, or the end of the attempt.

Owns the table of roles and kinds of end, and the budget of each role. A role is restarted if the table has a restart
for this kind of end, the budget is not used up, and the process that ended had made progress: it was ready, and if it
is a trainer it had completed a step. Without progress the same cause would end the next process too. A server is an
exception, since its cause may be its node's: it may also fail at its start. A server without budget is abandoned, and
the attempt continues while the others are enough (`ServerQuorum`). Pure: no process, file or clock.

    budget = RestartBudget.from_config("actor", config)
    if budget.allows("signal", progressed=True):
        budget.used += 1
        pause = budget.next_pause(ready_seconds=40.0)
"""

from dataclasses import dataclass
from typing import Literal

from pipeline.config import RunConfig
from pipeline.topology.plan import RoleName

EndKind = Literal["early", "exit", "signal", "hang", "final"]
"""How a role ended:

| kind | observation |
|---|---|
| `early` | exit code 0, although the attempt continues |
| `exit` | another exit code |
| `signal` | killed by a signal |
| `hang` | stopped, stuck, or without progress |
| `final` | after the role's own report of an error that a restart would meet again (`RollcallError.is_final`) |
"""
_PASSING: frozenset[EndKind] = frozenset({"early", "exit", "signal", "hang"})


@dataclass(frozen=True)
class RecoveryRule:
    """A row of the table.

    Attributes:
        restarts: the kinds of end after which the role is restarted; the others end the attempt.
        pauses: seconds before the first restart, and before any later one. Each pause is half again as long; after a
            process that was ready for longer than the last pause, the first one comes again.
        retries_start: whether a process may fail before it is ready, within the budget.
        completes_steps: whether its progress is a completed step, not only that it was ready.
    """

    restarts: frozenset[EndKind]
    pauses: tuple[float, float]
    retries_start: bool = False
    completes_steps: bool = False


RECOVERY: dict[RoleName, RecoveryRule] = {
    # The memory of a GPU may become free late, and a node may be slow to read the model or to compile.
    "inference": RecoveryRule(_PASSING, (1.0, 30.0), retries_start=True),
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
    """

    role: RoleName
    limit: int
    used: int = 0
    _pause: float = 0.0

    @classmethod
    def from_config(cls, role: RoleName, config: RunConfig, seats: int = 1) -> "RestartBudget":
        """The budget of a role with `seats` placements: `recovery.<role>`.

        0 for a trainer on several nodes, whose agents would have to agree on each restart, and for one that executes
        job files or serves the Tinker API, which have their own restarts.
        """
        is_shared = role == "trainer" and (seats > 1 or config.serve.enabled or bool(config.training.jobs))
        return cls(role, 0 if is_shared else getattr(config.recovery, role))

    def allows(self, kind: EndKind, *, progressed: bool) -> bool:
        """Whether the role is restarted after an end of this kind."""
        rule = RECOVERY[self.role]
        return kind in rule.restarts and (progressed or rule.retries_start) and self.used < self.limit

    def next_pause(self, ready_seconds: float) -> float:
        """The pause before the restart of a process that was ready for `ready_seconds` (0: it never was)."""
        first, longest = RECOVERY[self.role].pauses
        repeated = self._pause and ready_seconds <= self._pause
        self._pause = min(1.5 * self._pause, longest) if repeated else first
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
