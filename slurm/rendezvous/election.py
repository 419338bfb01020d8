"""Who leads: the election as a state machine.

Owns the rules by which the ranks of one attempt agree on one leader at a time. Promises nothing about files: `step` is
a pure function that is told what happened and answers what to do next, so every interleaving can be tried in memory.
Must not know directories, cards or clocks; `slurm.rendezvous.rank_meeting` performs the actions and reports the events.

    member, action = begin_election(rank, ranks, lease, now)
    while action.name != "settle":
        member, action = step(member, perform(action), clock.now())

The rules:
- An epoch belongs to the one rank whose exclusive claim of it succeeded. Epochs only grow.
- A leader renews its lease by counting its beat up. Observers judge the lease by their own clock, from the moment
  they saw it move last; clocks of two machines are never compared.
- Where a lease stands still, the next epoch may be claimed. Rank 0 opens the first epoch at once; in all other cases
  a rank waits one to two leases, low ranks first, so that thousands do not claim at the same moment.
- A deposed leader may wake up and still publish: the verdict is created exclusively, so there is one whoever wins.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from pipeline.errors import InvalidTransitionError

RENEWALS_PER_LEASE = 4


class Phase(StrEnum):
    """Where a rank stands."""

    JOINING = "joining"
    WATCHING = "watching"
    CLAIMING = "claiming"
    LEADING = "leading"
    SETTLED = "settled"


ActionName = Literal["join", "look", "claim", "renew", "gather", "publish", "rest", "settle"]
EventName = Literal[
    "joined",  # my card is published
    "contested",  # a card of my rank is there and cannot be read yet
    "saw",  # a look showed no verdict; `epoch` and `beat` of the newest leader, 0 and -1 where there is none
    "saw_verdict",  # a look showed the world, or its refusal
    "won",  # my claim of `epoch` succeeded
    "lost",  # `epoch` was claimed by another
    "renewed",  # my lease is written
    "more",  # a batch of cards was read and others wait
    "waiting",  # all cards that are there were read, and some are missing
    "ready",  # the cards suffice for a verdict
    "published",  # a verdict is there, mine or another's
    "rested",  # the pause is over
]
Signal = Literal[EventName, "followed", "vacant", "leads", "due", "deposed"]


@dataclass(frozen=True)
class Action:
    """What to do next; `claim`, `renew` and `publish` are for `epoch`, `renew` writes `beat`."""

    name: ActionName
    epoch: int = 0
    beat: int = 0


@dataclass(frozen=True)
class ElectionEvent:
    """What came of an action; `epoch` and `beat` belong to `saw`, `won` and `lost`."""

    name: EventName
    epoch: int = 0
    beat: int = -1


@dataclass(frozen=True)
class Member:
    """One rank's knowledge of the election.

    Attributes:
        rank, ranks: its place, and how many there are.
        lease: seconds for which a lease may stand still.
        epoch, beat: the newest epoch known to be claimed (0: none) and the last beat seen of its lease, mine if I lead.
        moved: when these changed last, in seconds of this rank's own clock.
    """

    rank: int
    ranks: int
    lease: float
    moved: float
    phase: Phase = Phase.JOINING
    epoch: int = 0
    beat: int = -1

    def patience(self) -> float:
        """Seconds for which nothing may move before this rank claims the next epoch."""
        if self.epoch == 0 and self.rank == 0:
            return 0.0
        return self.lease * (1 + self.rank / self.ranks)


TRANSITIONS: Mapping[tuple[Phase, Signal], Phase] = {
    (Phase.JOINING, "joined"): Phase.WATCHING,
    (Phase.JOINING, "contested"): Phase.JOINING,
    (Phase.JOINING, "rested"): Phase.JOINING,
    (Phase.WATCHING, "followed"): Phase.WATCHING,
    (Phase.WATCHING, "rested"): Phase.WATCHING,
    (Phase.WATCHING, "vacant"): Phase.CLAIMING,
    (Phase.WATCHING, "saw_verdict"): Phase.SETTLED,
    (Phase.CLAIMING, "won"): Phase.LEADING,
    (Phase.CLAIMING, "lost"): Phase.WATCHING,
    (Phase.LEADING, "leads"): Phase.LEADING,
    (Phase.LEADING, "due"): Phase.LEADING,
    (Phase.LEADING, "renewed"): Phase.LEADING,
    (Phase.LEADING, "more"): Phase.LEADING,
    (Phase.LEADING, "waiting"): Phase.LEADING,
    (Phase.LEADING, "ready"): Phase.LEADING,
    (Phase.LEADING, "published"): Phase.LEADING,
    (Phase.LEADING, "rested"): Phase.LEADING,
    (Phase.LEADING, "deposed"): Phase.WATCHING,
    (Phase.LEADING, "saw_verdict"): Phase.SETTLED,
}

# What a signal makes a rank do; a joining rank that rested joins again instead.
ACTIONS: Mapping[Signal, ActionName] = {
    "joined": "look",
    "contested": "rest",
    "rested": "look",
    "followed": "rest",
    "vacant": "claim",
    "won": "renew",
    "lost": "look",
    "leads": "gather",
    "due": "renew",
    "renewed": "gather",
    "more": "look",
    "waiting": "rest",
    "ready": "publish",
    "published": "rest",
    "deposed": "rest",
    "saw_verdict": "settle",
}


def begin_election(rank: int, ranks: int, lease: float, now: float) -> tuple[Member, Action]:
    """A rank that has not done anything yet, and its first action."""
    return Member(rank=rank, ranks=ranks, lease=lease, moved=now), Action("join")


def step(member: Member, event: ElectionEvent, now: float) -> tuple[Member, Action]:
    """The rank after `event`, seen at `now` (seconds of its own clock), and what it does next.

    `InvalidTransitionError` if the event cannot happen in the rank's phase.
    """
    signal = _signal(member, event, now)
    phase = transition(member.phase, signal)
    member = replace(_informed(member, event, signal, now), phase=phase)
    if phase is Phase.JOINING and signal == "rested":
        return member, Action("join")
    epoch = member.epoch + 1 if signal == "vacant" else member.epoch
    return member, Action(ACTIONS[signal], epoch, member.beat)


def transition(phase: Phase, signal: Signal) -> Phase:
    """The phase that follows; the one place where an impossible event is refused."""
    try:
        return TRANSITIONS[phase, signal]
    except KeyError:
        raise InvalidTransitionError("election", phase, signal) from None


def _signal(member: Member, event: ElectionEvent, now: float) -> Signal:
    """What an event means to this rank: a look means different things to a leader and to an observer."""
    if event.name != "saw":
        return event.name
    still = now - member.moved
    if member.phase is Phase.LEADING:
        if event.epoch > member.epoch:
            return "deposed"
        return "due" if still >= member.lease / RENEWALS_PER_LEASE else "leads"
    moves = _newer(member, event)
    return "vacant" if not moves and still >= member.patience() else "followed"


def _informed(member: Member, event: ElectionEvent, signal: Signal, now: float) -> Member:
    """The member with what the event tells about the newest leader."""
    if signal in ("won", "due"):
        # The renewal that follows writes this beat; counting before writing never repeats one.
        return replace(member, epoch=max(event.epoch, member.epoch), beat=member.beat + 1, moved=now)
    if event.name in ("saw", "lost") and _newer(member, event):
        return replace(member, epoch=event.epoch, beat=event.beat, moved=now)
    return member


def _newer(member: Member, event: ElectionEvent) -> bool:
    """A listing may be older than what this rank already knows: only growth counts."""
    return (event.epoch, event.beat) > (member.epoch, member.beat)
