"""Thousands of ranks that meet in one process.

`Simulation` runs the real `Rendezvous` of every rank on a disk in memory, one action at a time in the order of a
simulated time, so that any interleaving and any death can be replayed from a seed.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from pipeline.errors import DeadlineError, RendezvousError
from pipeline.topology.plan import NodeInfo, Plan, World
from slurm.rendezvous.rank_meeting import Rendezvous, pauses
from tests.fakes.clock import FakeClock
from tests.fakes.disk import Crashed, Disk, Faults, View

RUN, ATTEMPT = "run-1", "12-1"
LATENCY = 0.002  # seconds of one operation


class SkewedClock(FakeClock):
    """A machine's own clock: the simulated time and an offset that no other machine knows."""

    def __init__(self, base: FakeClock, offset: float) -> None:
        super().__init__()
        self._base, self._offset = base, offset

    def now(self) -> float:
        return self._base.time + self._offset


@dataclass
class Rank:
    """One process that wants to take part: its node record, when it starts, and what became of it."""

    node_info: NodeInfo
    start: float
    view: View
    meeting: Rendezvous | None = None
    pause: float = 0.0
    world: World | None = None
    error: RendezvousError | DeadlineError | None = None
    dead: bool = False
    ended: float = 0.0

    @property
    def going(self) -> bool:
        return self.world is None and self.error is None and not self.dead


@dataclass
class Simulation:
    """All ranks of one attempt.

    Attributes:
        starts: seconds after which each of `node records` starts, 0 by default; a repeated rank is a twin process.
        silent: ranks whose beacon nobody reaches.
        view: makes a rank's view of the disk; replaced by mutants.
    """

    plan: Plan
    node_infos: Sequence[NodeInfo]
    faults: Faults = field(default_factory=Faults)
    seconds: float = 60.0
    lease: float = 2.0
    starts: Sequence[float] = ()
    silent: frozenset[int] = frozenset()
    view: Callable[..., View] = View
    ranks: list[Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.disk = Disk(self.clock, self.faults)
        self.random = Random(self.faults.seed)
        seen: set[int] = set()
        for place, node_info in enumerate(self.node_infos):
            start = self.starts[place] if self.starts else 0.0
            first = node_info.rank not in seen
            seen.add(node_info.rank)
            self.ranks.append(Rank(node_info, start, self.view(self.disk, node_info.rank, mortal=first)))

    def run(self) -> "Simulation":
        """Until every rank has its world, its error, or is dead."""
        agenda = [(rank.start, place) for place, rank in enumerate(self.ranks)]
        heapq.heapify(agenda)
        while agenda:
            self.clock.time, place = heapq.heappop(agenda)
            rank = self.ranks[place]
            pause = self._act(rank)
            if rank.going:
                heapq.heappush(agenda, (self.clock.time + pause, place))
            else:
                rank.ended = self.clock.time
        return self

    def _act(self, rank: Rank) -> float:
        """Let a rank perform one action; the seconds until its next."""
        before = rank.view.operations
        try:
            self._advance(rank)
        except Crashed:
            rank.dead = True
        except (RendezvousError, DeadlineError) as error:
            rank.error = error
        if rank.view.stalled:
            stalled, rank.view.stalled = rank.view.stalled, 0.0
            return stalled
        busy = LATENCY * (rank.view.operations - before) * self.random.uniform(0.5, 2)
        return busy + (self._rest(rank) if rank.meeting and rank.meeting.is_sleeping else 0.0)

    def _advance(self, rank: Rank) -> None:
        if rank.meeting is None:
            rank.meeting = self._begin(rank)
        rank.meeting.act()
        rank.world = rank.meeting.world
        if rank.world is None and self.clock.time > rank.start + self.seconds:
            raise DeadlineError("the world", self.seconds, rank.meeting.missing())

    def _begin(self, rank: Rank) -> Rendezvous:
        clock = SkewedClock(self.clock, self.random.uniform(-1e6, 1e6))
        return Rendezvous(rank.view, self.plan, rank.node_info, RUN, self.seconds, self._find, self.lease, clock)

    def _rest(self, rank: Rank) -> float:
        first, longest = pauses(self.plan.ranks, self.lease)
        rank.pause = min(max(first, rank.pause * 1.5), longest)
        return rank.pause

    def _find(self, node_infos: Sequence[NodeInfo], witnesses: Sequence[NodeInfo]) -> Mapping[int, str]:
        """The connect-back: whoever lives and is not silent answers, at its last address."""
        living = {rank.node_info.rank for rank in self.ranks if not rank.dead}
        return {
            node_info.rank: node_info.addresses[-1]
            for node_info in node_infos
            if node_info.rank in living - self.silent
        }


def make_node_infos(ranks: int, *, gpus: int = 0, ports: int = 4, attempt: str = ATTEMPT) -> list[NodeInfo]:
    """Healthy node records of a cluster of equal nodes, rank 0 first."""
    return [
        NodeInfo(
            rank=rank,
            attempt=attempt,
            hostname=f"node{rank}",
            pid=1000 + rank,
            boot=f"boot of node{rank}",
            addresses=("192.168.0.1", f"10.0.{rank // 256}.{rank % 256}"),
            probe_port=4000,
            ports=tuple(range(5000, 5000 + ports)),
            gpus=tuple(range(gpus)),
        )
        for rank in range(ranks)
    ]
