"""The servers that the agents of an attempt have abandoned, and the end of the attempt when too few are left.

Owns the failures of this rank's servers that did not end the attempt. Each agent marks its own servers as down and
counts the marks of all: of two agents that abandon a server at the same time, the one that sees the other's mark ends
the attempt, also if a mark is visible late.

    losses = ServerLosses(contexts, marks)
    if losses.abandon(role.context.placement, failure):  …   # the attempt continues
    if failure := losses.fatal_failure():  …                 # in each round: too few servers are left
"""

from collections.abc import Sequence

import msgspec

from pipeline.roles.role_context import RoleContext
from pipeline.run.first_failure import FirstFailure
from pipeline.topology.plan import Placement
from slurm.agent.agent_heartbeat import ExitMarkers
from slurm.agent.recovery_policy import ServerQuorum


class ServerLosses:
    """The servers of an attempt that no agent restarts any more."""

    def __init__(self, contexts: Sequence[RoleContext], marks: ExitMarkers) -> None:
        """`contexts` are this rank's roles."""
        self._marks = marks
        self._failures: dict[str, FirstFailure] = {}
        self.follow(contexts)

    def follow(self, contexts: Sequence[RoleContext]) -> None:
        """Adopt these roles, and the placements in their revision of the world."""
        self._servers = contexts[0].world.of_role("inference") if contexts else ()
        self._quorum = ServerQuorum(len(self._servers), contexts[0].config.server_quorum if contexts else 0)

    def abandon(self, placement: Placement, failure: FirstFailure) -> str:
        """A note that the attempt continues without this role; empty if it cannot."""
        if placement.role != "inference" or not self._quorum.survives(len(self._down() | {placement.name})):
            return ""
        self._failures[placement.name] = failure
        return f"; {self._quorum.describe(len(self._down()))}"

    def fatal_failure(self) -> FirstFailure | None:
        """The failure of this rank that ends the attempt, since too few servers are left; None while enough are."""
        if not self._failures or self._quorum.survives(len(down := self._down())):
            return None
        *_, last = self._failures.values()
        return msgspec.structs.replace(last, cause=f"{last.cause}; {self._quorum.describe(len(down))}")

    def _down(self) -> set[str]:
        """The abandoned servers. Before the attempt's end a server is down only if its agent abandoned it."""
        return {server.name for server in self._servers if self._marks.is_down(server)} | self._failures.keys()
