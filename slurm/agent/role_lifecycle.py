"""The life of one role on one rank, and how a run comes down.

Owns the states of a role as a table of transitions with one choke point, and the order in which roles end. Pure: no
process, file or clock.
"""

from typing import Literal

from pipeline.errors import InvalidTransitionError
from pipeline.topology.plan import Placement, RoleName, World

State = Literal["waiting", "starting", "ready", "restarting", "stopping", "stopped", "failed"]
RoleEvent = Literal[
    "start", "became_ready", "finished", "asked_to_stop", "ended", "died", "overslept", "hung", "replaced"
]

TRANSITIONS: dict[tuple[State, RoleEvent], State] = {
    ("waiting", "start"): "starting",
    ("waiting", "asked_to_stop"): "stopped",
    ("starting", "became_ready"): "ready",
    ("starting", "asked_to_stop"): "stopping",
    ("starting", "finished"): "stopped",
    ("starting", "died"): "failed",
    ("starting", "overslept"): "failed",
    ("ready", "asked_to_stop"): "stopping",
    ("ready", "finished"): "stopped",
    ("ready", "died"): "failed",
    ("ready", "hung"): "failed",
    ("ready", "replaced"): "restarting",
    ("starting", "replaced"): "restarting",
    ("restarting", "start"): "starting",
    ("restarting", "died"): "failed",
    ("restarting", "asked_to_stop"): "stopped",
    ("stopping", "ended"): "stopped",
}
"""What may happen to a role in each state. A role that ends while it is `stopping` was told to, whatever its exit code;
one that ends before has `finished` if the end of the attempt was told and its exit code is 0, and `died` otherwise, or
is `replaced`, if it is one that others can do without for a while: then it is `restarting` until its new process is
started."""

REPLACEABLE: frozenset[RoleName] = frozenset({"inference"})
"""Roles whose process another can take the place of within an attempt: nothing is lost with a server but time."""

SHUTDOWN_ORDER: tuple[frozenset[RoleName], ...] = (
    frozenset({"actor", "preprocessor"}),
    frozenset({"trainer"}),
    frozenset({"inference"}),
    frozenset({"redis"}),
)
"""Order in which a run comes down: nobody loses what it still talks to."""

_STAGES = {role: stage for stage, roles in enumerate(SHUTDOWN_ORDER) for role in roles}


def advance(role: str, state: State, happening: RoleEvent) -> State:
    """The state after `happening`; `InvalidTransitionError` if the table does not have it."""
    try:
        return TRANSITIONS[state, happening]
    except KeyError:
        raise InvalidTransitionError(role, state, happening) from None


def shutdown_stage(role: RoleName) -> int:
    """Index of the role in `SHUTDOWN_ORDER`."""
    return _STAGES[role]


def must_wait_for(placement: Placement, world: World, *, failed: bool = False) -> tuple[Placement, ...]:
    """Those that have to be down, on any rank, before this one is asked to stop.

    In an attempt that failed nobody generates for anybody any more; only Redis waits, for the trainer may commit still.
    """
    if failed and placement.role != "redis":
        return ()
    stage = shutdown_stage(placement.role)
    return tuple(other for other in world.placements if shutdown_stage(other.role) < stage)
