"""The states of one role on one rank, the end of an attempt, and the shutdown order of a run.

Owns the states of a role as a table of transitions, which only `advance` applies, the end that events mean, and the
order in which roles stop.
Pure: no process, file or clock.
"""

from collections.abc import Sequence
from typing import Literal

from pipeline.errors import InvalidTransitionError
from pipeline.run.events import EventName
from pipeline.topology.plan import Placement, RoleName, World

State = Literal["waiting", "starting", "ready", "restarting", "stopping", "stopped", "failed"]
RoleEvent = Literal[
    "start",
    "became_ready",
    "finished",
    "stop_requested",
    "ended",
    "crashed",
    "startup_timeout",
    "hung",
    "replaced",
    "taken_over",
]

TRANSITIONS: dict[tuple[State, RoleEvent], State] = {
    ("waiting", "start"): "starting",
    ("waiting", "stop_requested"): "stopped",
    ("starting", "became_ready"): "ready",
    ("starting", "stop_requested"): "stopping",
    ("starting", "finished"): "stopped",
    ("starting", "crashed"): "failed",
    ("starting", "startup_timeout"): "failed",
    ("starting", "hung"): "failed",
    ("ready", "stop_requested"): "stopping",
    ("ready", "finished"): "stopped",
    ("ready", "crashed"): "failed",
    ("ready", "hung"): "failed",
    ("ready", "replaced"): "restarting",
    ("starting", "replaced"): "restarting",
    ("restarting", "start"): "starting",
    ("restarting", "crashed"): "failed",
    ("restarting", "stop_requested"): "stopped",
    ("stopping", "ended"): "stopped",
    **{(state, "taken_over"): "stopped" for state in ("waiting", "starting", "ready", "restarting", "stopping")},
}
"""The events that each state accepts, and the next state.

A role that exits in the state `stopping` has `ended`, with any exit code. A role that exits earlier has `finished` if
the attempt's end was published and the exit code is 0. Otherwise it has `crashed`, or is `replaced` if
`recovery_policy` allows a restart: it is then `restarting` until its new process starts. It is `taken_over` if another
node has its place (`node_takeover`)."""

End = Literal["finished", "preempted", "failed"]
ENDINGS: tuple[tuple[EventName, End], ...] = (
    ("failed", "failed"),
    ("training_finished", "finished"),
    ("draining", "preempted"),
)
"""The end that each event means, strongest first. Events after `training_finished` do not count."""

SHUTDOWN_ORDER: tuple[frozenset[RoleName], ...] = (
    frozenset({"actor", "preprocessor"}),
    frozenset({"trainer"}),
    frozenset({"inference"}),
    frozenset({"redis"}),
)
"""The stages of a shutdown, so that no role loses a service that it still uses."""

_STAGES = {role: stage for stage, roles in enumerate(SHUTDOWN_ORDER) for role in roles}


def advance(role: str, state: State, event: RoleEvent) -> State:
    """The state after `event`; `InvalidTransitionError` if the table does not have the transition."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InvalidTransitionError(role, state, event) from None


def shutdown_stage(role: RoleName) -> int:
    """Index of the role in `SHUTDOWN_ORDER`."""
    return _STAGES[role]


def must_wait_for(placement: Placement, world: World, *, failed: bool = False) -> tuple[Placement, ...]:
    """The placements, on any rank, that must be down before this one is asked to stop.

    In a failed attempt only Redis waits, since the trainer may still save a checkpoint; no role needs samples any more.
    """
    if failed and placement.role != "redis":
        return ()
    stage = shutdown_stage(placement.role)
    return tuple(other for other in world.placements if shutdown_stage(other.role) < stage)


def shutdown_reason(events: Sequence[EventName]) -> End | None:
    """The end of an attempt with these events, in this order; None while no event ends it."""
    if "training_finished" in events:  # a later failure can prevent nothing
        events = events[: events.index("training_finished") + 1]
    return next((end for event, end in ENDINGS if event in events), None)
