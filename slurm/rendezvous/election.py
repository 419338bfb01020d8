"""The election of a leader as a state machine.

Owns the rules by which the ranks of one attempt agree on one leader at a time. `step` is a pure function from an event
to the next action, so tests can run every interleaving in memory. Must not know directories, node records or clocks;
`slurm.rendezvous.rank_meeting` performs the actions and reports the events.

    member, action = begin_election(rank, ranks, lease, now)
    while action.name != "finish":
        member, action = step(member, perform(action), clock.now())

The rules:
- An epoch belongs to the one rank whose exclusive claim of it succeeded. Epochs only grow.
- A leader renews its lease by incrementing its beat. Observers time the lease with their own clock, since its last
  observed change; clocks of two machines are never compared.
- If a lease expires, another rank may claim the next epoch. Rank 0 claims the first epoch at once. In all other cases a
  rank waits one to two leases, low ranks first, so that thousands of ranks do not claim at the same time.
- A superseded leader may wake up and still publish. The verdict is created exclusively, so there is exactly one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from pipeline.errors import InvalidTransitionError

RENEWALS_PER_LEASE = 4


class Phase(StrEnum):
    """The phase of a rank in the election."""

    JOINING = "joining"
    WATCHING = "watching"
    CLAIMING = "claiming"
    LEADING = "leading"
    FINISHED = "finished"


ActionName = Literal["join", "look", "claim", "renew", "gather", "publish", "sleep", "finish"]
EventName = Literal[
    "joined",  # my node record is published
    "record_conflict",  # another node record of my rank exists and cannot be read yet
    "observed",  # a listing without a verdict; `epoch` and `beat` of the newest leader, 0 and -1 if there is none
    "world_published",  # the world is published, or its rejection
    "won",  # my claim of `epoch` succeeded
    "lost",  # another rank claimed `epoch`
    "renewed",  # my lease is written
    "more_records",  # a batch of node records was read, and further ones are listed
    "ranks_missing",  # all listed node records were read, and some ranks are missing
    "records_complete",  # the node records suffice for a verdict
    "published",  # a verdict exists, mine or another rank's
    "backoff_done",  # the pause is over
]
Signal = Literal[EventName, "followed", "lease_expired", "still_leading", "renewal_due", "superseded"]


@dataclass(frozen=True)
class Action:
    """The next action; `claim`, `renew` and `publish` are for `epoch`, and `renew` writes `beat`."""

    name: ActionName
    epoch: int = 0
    beat: int = 0


@dataclass(frozen=True)
class ElectionEvent:
    """The result of an action; `epoch` and `beat` belong to `observed`, `won` and `lost`."""

    name: EventName
    epoch: int = 0
    beat: int = -1


@dataclass(frozen=True)
class Member:
    """One rank's state in the election.

    Attributes:
        rank, ranks: its rank, and the number of ranks.
        lease: seconds without a change after which a lease expires.
        epoch, beat: the newest claimed epoch (0: none) and the last observed beat of its lease, the own one if leading.
        moved: the time of their last change, in seconds of this rank's clock.
    """

    rank: int
    ranks: int
    lease: float
    moved: float
    phase: Phase = Phase.JOINING
    epoch: int = 0
    beat: int = -1

    def patience(self) -> float:
        """Seconds without a change after which this rank claims the next epoch."""
        if self.epoch == 0 and self.rank == 0:
            return 0.0
        return self.lease * (1 + self.rank / self.ranks)


TRANSITIONS: Mapping[tuple[Phase, Signal], Phase] = {
    (Phase.JOINING, "joined"): Phase.WATCHING,
    (Phase.JOINING, "record_conflict"): Phase.JOINING,
    (Phase.JOINING, "backoff_done"): Phase.JOINING,
    (Phase.WATCHING, "followed"): Phase.WATCHING,
    (Phase.WATCHING, "backoff_done"): Phase.WATCHING,
    (Phase.WATCHING, "lease_expired"): Phase.CLAIMING,
    (Phase.WATCHING, "world_published"): Phase.FINISHED,
    (Phase.CLAIMING, "won"): Phase.LEADING,
    (Phase.CLAIMING, "lost"): Phase.WATCHING,
    (Phase.LEADING, "still_leading"): Phase.LEADING,
    (Phase.LEADING, "renewal_due"): Phase.LEADING,
    (Phase.LEADING, "renewed"): Phase.LEADING,
    (Phase.LEADING, "more_records"): Phase.LEADING,
    (Phase.LEADING, "ranks_missing"): Phase.LEADING,
    (Phase.LEADING, "records_complete"): Phase.LEADING,
    (Phase.LEADING, "published"): Phase.LEADING,
    (Phase.LEADING, "backoff_done"): Phase.LEADING,
    (Phase.LEADING, "superseded"): Phase.WATCHING,
    (Phase.LEADING, "world_published"): Phase.FINISHED,
}

# The action that follows each signal, except for a joining rank after its pause, which joins again.
ACTIONS: Mapping[Signal, ActionName] = {
    "joined": "look",
    "record_conflict": "sleep",
    "backoff_done": "look",
    "followed": "sleep",
    "lease_expired": "claim",
    "won": "renew",
    "lost": "look",
    "still_leading": "gather",
    "renewal_due": "renew",
    "renewed": "gather",
    "more_records": "look",
    "ranks_missing": "sleep",
    "records_complete": "publish",
    "published": "sleep",
    "superseded": "sleep",
    "world_published": "finish",
}


def begin_election(rank: int, ranks: int, lease: float, now: float) -> tuple[Member, Action]:
    """The initial state of a rank, and its first action."""
    return Member(rank=rank, ranks=ranks, lease=lease, moved=now), Action("join")


def step(member: Member, event: ElectionEvent, now: float) -> tuple[Member, Action]:
    """The rank's state after `event`, observed at `now` (seconds of its clock), and its next action.

    `InvalidTransitionError` if the event is impossible in the rank's phase.
    """
    signal = _signal(member, event, now)
    phase = transition(member.phase, signal)
    member = replace(_with_leader(member, event, signal, now), phase=phase)
    if phase is Phase.JOINING and signal == "backoff_done":
        return member, Action("join")
    epoch = member.epoch + 1 if signal == "lease_expired" else member.epoch
    return member, Action(ACTIONS[signal], epoch, member.beat)


def transition(phase: Phase, signal: Signal) -> Phase:
    """The next phase. Only this function refuses an impossible event."""
    try:
        return TRANSITIONS[phase, signal]
    except KeyError:
        raise InvalidTransitionError("election", phase, signal) from None


def _signal(member: Member, event: ElectionEvent, now: float) -> Signal:
    """The signal of an event for this rank: a listing is another signal for a leader than for an observer."""
    if event.name != "observed":
        return event.name
    still = now - member.moved
    if member.phase is Phase.LEADING:
        if event.epoch > member.epoch:
            return "superseded"
        return "renewal_due" if still >= member.lease / RENEWALS_PER_LEASE else "still_leading"
    moves = _is_newer(member, event)
    return "lease_expired" if not moves and still >= member.patience() else "followed"


def _with_leader(member: Member, event: ElectionEvent, signal: Signal, now: float) -> Member:
    """The member updated with the newest leader in the event."""
    if signal in ("won", "renewal_due"):
        # The renewal that follows writes this beat; counting before writing never repeats one.
        return replace(member, epoch=max(event.epoch, member.epoch), beat=member.beat + 1, moved=now)
    if event.name in ("observed", "lost") and _is_newer(member, event):
        return replace(member, epoch=event.epoch, beat=event.beat, moved=now)
    return member


def _is_newer(member: Member, event: ElectionEvent) -> bool:
    """Whether the event is newer than the member's state: an NFS listing may be older, so only growth counts."""
    return (event.epoch, event.beat) > (member.epoch, member.beat)
