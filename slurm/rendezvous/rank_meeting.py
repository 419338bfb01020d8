"""The rendezvous of the ranks of one attempt.

Owns the rendezvous directory of an attempt and every file in it: `nodes/<rank>.json` (the node records),
`claim-<epoch>.json`, `lease-<epoch>.json` and the verdict, `world.json`. Promises that `rendezvous` returns the same
world to every rank, or raises one clear error within its deadline; that stale, torn, late and foreign files never count
as live ones; and that only the leader reads all node records, so that the file operations grow linearly with the ranks.
Must not know roles and schedulers.

    world = rendezvous(FileSharedDir(paths.rendezvous), plan, node_info, run_id=paths.run_id, seconds=60)
"""

import secrets
from functools import partial

import msgspec

from pipeline.errors import RendezvousError
from pipeline.run.paths import WORLD
from pipeline.topology.assignment import assign, check_world
from pipeline.topology.plan import NodeInfo, Plan, World
from pipeline.utils.shared_dir import SharedDir
from pipeline.utils.waiting import CLOCK, Clock, wait_for
from slurm.rendezvous import election, probe_server
from slurm.rendezvous.election import Action, ElectionEvent
from slurm.rendezvous.membership import FindAddresses, Membership, missing_ranks, publish_node_info

# Fractions of the deadline. After the first, a leader forms a world without missing ranks if the spares suffice. After
# the second, it publishes a rejection, so that the ranks get the reason before their own deadlines.
PATIENCE, LAST_CALL = 0.5, 0.9
POLLS_PER_SECOND = 2000  # of all ranks together, on one file server


class LeaderClaim(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that claimed an epoch. Only the existence of the file decides."""

    epoch: int
    rank: int
    hostname: str
    pid: int


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A leader's heartbeat: a counter that only the leader increments."""

    epoch: int
    beat: int


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict that no world can be formed, with the reason."""

    attempt: str
    epoch: int
    leader: int
    refused: str


def rendezvous(
    directory: SharedDir,
    plan: Plan,
    node_info: NodeInfo,
    *,
    run_id: str,
    seconds: float,
    find_addresses: FindAddresses | None = None,
    lease: float | None = None,
    clock: Clock = CLOCK,
) -> World:
    """Publish `node_info`, take part in the election, and return the world once it is published.

    Args:
        directory: the attempt's directory.
        node_info: this rank's node record.
        seconds: the deadline of the rendezvous; its `DeadlineError` names the ranks without a node record.
        find_addresses: finds the addresses of ranks; `slurm.rendezvous.probe_server` by default.
        lease: seconds without a heartbeat after which a leader is replaced; an eighth of `seconds` by default.

    `RendezvousError` if the rank is taken, the leader rejected the ranks, the world does not fit this rank, or the
    directory cannot be read or written.
    """
    finder = find_addresses or partial(probe_server.find_addresses, run_id)
    lease = lease or seconds / 8
    participant = Rendezvous(directory, plan, node_info, run_id, seconds, finder, lease, clock)
    pause, longest_pause = pauses(plan.ranks, lease)
    try:
        return wait_for(
            f"the world of attempt {node_info.attempt}",
            participant.round,
            seconds,
            missing=participant.missing,
            pause=pause,
            longest_pause=longest_pause,
            clock=clock,
        )
    except OSError as error:
        where = f"{error.filename or 'the rendezvous'}: {error.strerror or error}"
        raise RendezvousError(f"cannot read or write {where}; every rank must be able to") from error


def pauses(ranks: int, lease: float) -> tuple[float, float]:
    """First and longest pause, in seconds, between two polls of a rank.

    They grow with the number of ranks, so that all ranks together make at most `POLLS_PER_SECOND`, and are short enough
    for a leader to renew its lease.
    """
    longest = min(max(0.5, ranks / POLLS_PER_SECOND), lease / election.RENEWALS_PER_LEASE)
    return max(0.02, longest / 10), longest


class Rendezvous:
    """One rank's part of the rendezvous: performs the actions of `slurm.rendezvous.election`, and reports their results
    as events."""

    def __init__(
        self,
        directory: SharedDir,
        plan: Plan,
        node_info: NodeInfo,
        run_id: str,
        seconds: float,
        find_addresses: FindAddresses,
        lease: float,
        clock: Clock = CLOCK,
    ) -> None:
        if not 0 <= node_info.rank < plan.ranks:
            raise RendezvousError(
                f"rank {node_info.rank} is outside the plan's {plan.ranks} ranks; submit the run again"
            )
        self._directory, self._plan, self._node_info, self._run_id = directory, plan, node_info, run_id
        self._seconds, self._find_addresses, self._clock = seconds, find_addresses, clock
        self._started = clock.now()
        self._member, self._action = election.begin_election(node_info.rank, plan.ranks, lease, self._started)
        self._membership = self._new_membership()
        self._verdict: World | Rejection | None = None
        self.world: World | None = None

    @property
    def is_sleeping(self) -> bool:
        """Whether the next action is a pause."""
        return self._action.name == "sleep"

    def round(self) -> World | None:
        """Perform actions until the next one is a pause. Returns the world once it is published."""
        self.act()
        while self.world is None and not self.is_sleeping:
            self.act()
        return self.world

    def act(self) -> None:
        """Perform the next action: a few reads, or one write."""
        event = self._perform(self._action)
        self._member, self._action = election.step(self._member, event, self._clock.now())

    def missing(self) -> str:
        """The ranks without a node record, as text."""
        return missing_ranks(self._directory, self._plan.ranks)

    def _perform(self, action: Action) -> ElectionEvent:
        match action.name:
            case "join":
                return ElectionEvent(
                    "joined" if publish_node_info(self._directory, self._node_info) else "record_conflict"
                )
            case "look":
                return self._look()
            case "claim":
                return self._claim(action.epoch)
            case "renew":
                self._directory.replace(f"lease-{action.epoch}.json", Lease(epoch=action.epoch, beat=action.beat))
                return ElectionEvent("renewed")
            case "gather":
                return self._gather(action.epoch)
            case "publish":
                # `create` fails if the file exists: of two leaders that overlap, the first one's world is the world.
                self._directory.create(WORLD, self._verdict)
                return ElectionEvent("published")
            case _:
                return ElectionEvent("backoff_done")

    def _look(self) -> ElectionEvent:
        names = self._directory.names()
        if WORLD in names and self._read_verdict():
            return ElectionEvent("world_published")
        # The newest claim, of a live or a lost leader. Its lease shows a beat that grows while the leader lives.
        epoch = max((_epoch(name) for name in names), default=0)
        lease = self._directory.read(f"lease-{epoch}.json", Lease) if epoch else None
        return ElectionEvent("observed", epoch, lease.beat if lease else -1)

    def _read_verdict(self) -> bool:
        """Whether the world could be read and validated; `RendezvousError` if it does not fit, or is a rejection."""
        world = self._directory.read(WORLD, World)
        if world is None:
            refusal = self._directory.read(WORLD, Rejection)
            if refusal:
                raise RendezvousError(f"rank {refusal.leader} could not form a world: {refusal.refused}")
            return False
        if world.run_id != self._run_id:
            raise RendezvousError(f"the world in this directory is of run {world.run_id}, not {self._run_id}")
        check_world(world, self._plan, self._node_info)
        self.world = world
        return True

    def _claim(self, epoch: int) -> ElectionEvent:
        # Exclusive creation decides between ranks that claim at the same time: one claim per epoch.
        claim = LeaderClaim(
            epoch=epoch, rank=self._node_info.rank, hostname=self._node_info.hostname, pid=self._node_info.pid
        )
        if not self._directory.create(f"claim-{epoch}.json", claim):
            return ElectionEvent("lost", epoch)
        self._membership = self._new_membership()
        return ElectionEvent("won", epoch)

    def _gather(self, epoch: int) -> ElectionEvent:
        if self._membership.gather():
            return ElectionEvent("more_records")
        self._verdict = self._decide(epoch)
        return ElectionEvent("records_complete" if self._verdict else "ranks_missing")

    def _decide(self, epoch: int) -> World | Rejection | None:
        """The verdict on the present node records; None while waiting for further ones can help."""
        share = (self._clock.now() - self._started) / self._seconds
        if not self._membership.complete and share < PATIENCE:
            return None
        try:
            return self._assign(epoch)
        except RendezvousError as error:
            if not self._membership.complete and share < LAST_CALL:
                return None
            return Rejection(
                attempt=self._node_info.attempt, epoch=epoch, leader=self._node_info.rank, refused=str(error)
            )

    def _assign(self, epoch: int) -> World:
        return assign(
            self._plan,
            self._membership.node_infos(),
            run_id=self._run_id,
            attempt=self._node_info.attempt,
            epoch=epoch,
            leader=self._node_info.rank,
            secret=secrets.token_hex(16),
        )

    def _new_membership(self) -> Membership:
        return Membership(
            self._directory, self._plan.ranks, self._node_info.attempt, self._node_info.boot, self._find_addresses
        )


def _epoch(name: str) -> int:
    """The epoch in `claim-<epoch>.json`; 0 for any other name."""
    number = name.removeprefix("claim-").removesuffix(".json")
    return int(number) if name == f"claim-{number}.json" and number.isdecimal() else 0
