"""How long an election takes and what it asks of the filesystem, for growing clusters.

    python -m tests.bench.bench_rendezvous [RANKS ...]

Exits with 1 unless the operations are linear in the ranks: a rank of the largest cluster needs at most 1.5 times those
of a rank among 64 (or of the smallest cluster asked for, if that is larger).

All ranks take turns in this one process on real files below the temporary directory; on a cluster each does its own
share at the same time. `leader` is what rank 0 does: node record, claim, lease, all node records, the assignment, the
world. `others` is the mean of the other ranks: node record, looks, and the world, read and checked (it names every
rank). An election lasts about as long as these two and the longest pause between two looks. An operation is one
creation, replacement, reading or listing.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.topology.plan import NodeBundle, NodeInfo, Plan, RoleProcess
from pipeline.utils.shared_dir import FileSharedDir
from slurm.rendezvous.rank_meeting import Rendezvous, pauses
from tests.bench.tables import judge, markdown
from tests.fakes.ranks import make_node_infos

SIZES = (4, 64, 1024, 4096)
SECONDS = 120.0
BASE, MOST_GROWTH = 64, 1.5


class CountingDirectory(FileSharedDir):
    """Counts its operations by kind."""

    def __init__(self, root: Path, counts: Counter[str]) -> None:
        super().__init__(root)
        self._counts = counts

    def create(self, name: str, document: Any) -> bool:
        self._counts["create"] += 1
        return super().create(name, document)

    def replace(self, name: str, document: Any) -> None:
        self._counts["replace"] += 1
        super().replace(name, document)

    def read(self, name: str, kind: type) -> Any:
        self._counts["read"] += 1
        return super().read(name, kind)

    def names(self, folder: str = "") -> tuple[str, ...]:
        self._counts["list"] += 1
        return super().names(folder)


@dataclass
class Turn:
    """A rank in the round: when it may act again, its present pause, and the seconds it worked so far."""

    meeting: Rendezvous
    due: float = 0.0
    pause: float = 0.0
    worked: float = 0.0

    def take(self, first: float, longest: float) -> None:
        begun = time.monotonic()
        self.meeting.round()
        self.pause = min(max(first, self.pause * 1.5), longest)
        self.worked += time.monotonic() - begun
        self.due = time.monotonic() + self.pause


@dataclass(frozen=True)
class Result:
    """One election: seconds of the leader's work, of the others' mean, of all together; operations by kind."""

    ranks: int
    leader: float
    others: float
    pause: float
    together: float
    counts: Counter[str]

    @property
    def per_rank(self) -> float:
        return sum(self.counts.values()) / self.ranks

    def row(self) -> tuple[object, ...]:
        kinds = (self.counts[kind] for kind in KINDS)
        return self.ranks, self.leader, self.others, self.pause, self.together, *kinds, self.per_rank


KINDS = ("create", "replace", "read", "list")
COLUMNS = ("ranks", "leader s", "others s", "longest pause s", "together s", *KINDS, "operations a rank")


def elect(ranks: int, root: Path) -> Result:
    """One election of so many ranks in a fresh directory."""
    seats = tuple(
        NodeBundle(roles=(RoleProcess(role="inference", index=index, gpus=8, ports=1),)) for index in range(ranks)
    )
    plan, counts = Plan(ranks=ranks, bundles=seats), Counter[str]()
    directory, lease = CountingDirectory(root, counts), SECONDS / 8
    first, longest = pauses(ranks, lease)
    turns = [
        Turn(Rendezvous(directory, plan, node_info, "run-1", SECONDS, _answer, lease))
        for node_info in make_node_infos(ranks, gpus=8)
    ]
    begun, going = time.monotonic(), turns
    while going:
        for turn in going:
            if turn.due <= time.monotonic():
                turn.take(first, longest)
        going = [turn for turn in going if turn.meeting.world is None]
    leader, *others = (turn.worked for turn in turns)
    return Result(ranks, leader, sum(others) / len(others), longest, time.monotonic() - begun, counts)


def _answer(node_infos: Sequence[NodeInfo], witnesses: Sequence[NodeInfo]) -> Mapping[int, str]:
    """Every rank answers: the connect-back is not what is measured here."""
    return {node_info.rank: node_info.addresses[0] for node_info in node_infos}


def main(sizes: Sequence[int]) -> int:
    results = []
    for ranks in sorted(sizes):
        with tempfile.TemporaryDirectory() as folder:
            results.append(elect(ranks, Path(folder)))
    print(markdown(COLUMNS, [result.row() for result in results]))
    base = next((result for result in results if result.ranks >= BASE), results[-1])
    growth = results[-1].per_rank / base.per_rank
    rule = (
        f"{growth:.2f} times the operations a rank of {base.ranks} at {results[-1].ranks} ranks, at most {MOST_GROWTH}"
    )
    return judge(rule, growth <= MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]] or SIZES))
