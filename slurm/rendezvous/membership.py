"""The node records that a leader has collected and verified.

Owns the node records of an attempt: their names, their publication, and their verification by a leader. Promises that a
valid record is read once; that a record of another attempt or rank, a torn record, and a record whose rank does not
answer are read again in every pass and never used; and that a used address is one at which a rank of another node got
an answer, if there is another node. Must not know the election.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import msgspec

from pipeline.errors import RendezvousError
from pipeline.topology.plan import NodeInfo
from pipeline.utils.network_interfaces import LOOPBACK
from pipeline.utils.shared_dir import SharedDir

NODES = "nodes"
BATCH = 64  # node records between two polls of the lease
SHOWN = 12

FindAddresses = Callable[[Sequence[NodeInfo], Sequence[NodeInfo]], Mapping[int, str]]
"""Returns the address at which each record's rank answers, by rank; a rank that does not answer is absent.

The second argument has the records of the witnesses that connect; if it is empty, the leader connects itself."""
WITNESSES = 3


def publish_node_info(directory: SharedDir, node_info: NodeInfo) -> bool:
    """Publish a node record. Returns whether it is the record of its rank; False while an existing one is unreadable.

    `RendezvousError` if another process has the rank.
    """
    name = _name(node_info.rank)
    if directory.create(name, node_info):
        return True
    other = directory.read(name, NodeInfo)
    if other is None or other == node_info:
        return other == node_info
    here, there = f"{node_info.hostname} pid {node_info.pid}", f"{other.hostname} pid {other.pid}"
    raise RendezvousError(
        f"rank {node_info.rank} of attempt {node_info.attempt} is taken: "
        f"{here} came after {there} (attempt {other.attempt}); "
        "start one agent for each rank"
    )


def read_node_info(directory: SharedDir, rank: int) -> NodeInfo | None:
    """The node record of a rank; None if there is none (yet)."""
    return directory.read(_name(rank), NodeInfo)


def missing_ranks(directory: SharedDir, ranks: int) -> str:
    """The ranks without a node record, such as `ranks 3, 5-7`; empty if there are none."""
    present = set(_listed(directory))
    return name_ranks([rank for rank in range(ranks) if rank not in present])


class Membership:
    """The node records that one leader has read, and whose ranks it has reached.

    The leader connects to the ranks of other nodes itself. For the ranks of this node, including the leader, reached
    ranks of other nodes connect, since an address that a node reaches on itself may be unreachable from other nodes. If
    all ranks are on the leader's node, the leader connects to them.

        while membership.gather():
            ...  # poll the lease
        world = assign(plan, membership.node_infos(), ...)
    """

    def __init__(
        self, directory: SharedDir, ranks: int, attempt: str, node: str, find_addresses: FindAddresses
    ) -> None:
        self._directory, self._ranks, self._attempt, self._node = directory, ranks, attempt, node
        self._find_addresses = find_addresses
        self._local: dict[int, NodeInfo] = {}
        self._queue: list[int] = []
        self._verified: dict[int, NodeInfo] = {}
        self._problems: dict[int, str] = {}

    @property
    def complete(self) -> bool:
        """Whether every rank has a verified record, with or without problems."""
        return len(self._verified) == self._ranks

    def gather(self) -> bool:
        """Read and verify the next batch of this pass. Returns whether the pass has further records."""
        if not self._queue:
            known = self._verified.keys() | self._local.keys()
            self._queue = [rank for rank in _listed(self._directory) if rank not in known and rank < self._ranks]
        batch, self._queue = self._queue[:BATCH], self._queue[BATCH:]
        self._verify([node_info for rank in batch if (node_info := self._read(rank))])
        if self._local and (self._witnesses() or len(self._verified) + len(self._local) == self._ranks):
            local, self._local = list(self._local.values()), {}
            self._verified |= self._reached(local, self._witnesses())
        return bool(self._queue)

    def node_infos(self) -> list[NodeInfo]:
        """A node record for every rank; a missing or unverified rank has a record with that problem.

        While no other node has come, the leader connects to the ranks of its node.
        """
        usable = self._verified | self._reached(list(self._local.values()), [])
        return [usable.get(rank) or self._missing_node(rank) for rank in range(self._ranks)]

    def _read(self, rank: int) -> NodeInfo | None:
        """The node record of a rank; None unless it is of that rank and this attempt."""
        node_info = read_node_info(self._directory, rank)
        if node_info and (node_info.rank, node_info.attempt) != (rank, self._attempt):
            self._problems[rank] = f"its node record is of rank {node_info.rank} of attempt {node_info.attempt}"
            return None
        return node_info

    def _verify(self, node_infos: Sequence[NodeInfo]) -> None:
        """Accept records whose ranks answer, with that address first, and records that report problems."""
        self._verified |= {node_info.rank: node_info for node_info in node_infos if node_info.problems}
        sound = [node_info for node_info in node_infos if not node_info.problems]
        self._local |= {node_info.rank: node_info for node_info in sound if node_info.boot == self._node}
        self._verified |= self._reached([node_info for node_info in sound if node_info.boot != self._node], [])

    def _reached(self, node_infos: Sequence[NodeInfo], witnesses: Sequence[NodeInfo]) -> dict[int, NodeInfo]:
        """The records whose ranks answer, with that address first. For the other ranks, the problem is recorded."""
        addresses = self._find_addresses(node_infos, witnesses) if node_infos else {}
        for node_info in node_infos:
            if node_info.rank not in addresses:
                tried = (
                    ", ".join(f"{address}:{node_info.probe_port}" for address in node_info.addresses) or "any address"
                )
                asker = "to other nodes " if witnesses else ""
                problem = f"{node_info.hostname} does not answer {asker}at {tried}"
                if node_info.addresses == (LOOPBACK,):
                    problem += "; it has no other IPv4 address, and ranks on several nodes need one (not IPv6)"
                self._problems[node_info.rank] = problem
        return {
            node_info.rank: _at(node_info, addresses[node_info.rank])
            for node_info in node_infos
            if node_info.rank in addresses
        }

    def _witnesses(self) -> list[NodeInfo]:
        """A few reached ranks of other nodes, in case one of them stops answering."""
        reached = (
            node_info
            for node_info in self._verified.values()
            if node_info.boot != self._node and not node_info.problems
        )
        return list(islice(reached, WITNESSES))

    def _missing_node(self, rank: int) -> NodeInfo:
        problem = self._problems.get(rank, "no node record appeared")
        return NodeInfo(
            rank=rank,
            attempt=self._attempt,
            hostname="?",
            pid=0,
            boot="",
            addresses=(),
            probe_port=0,
            ports=(),
            problems=(problem,),
        )


def name_ranks(ranks: Sequence[int]) -> str:
    """A text such as `rank 3` or `ranks 3, 5-7`, truncated after a dozen spans; empty for none."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    if not spans:
        return ""
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in spans[:SHOWN]]
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(shown) + (", …" if len(spans) > SHOWN else "")


def _at(node_info: NodeInfo, address: str) -> NodeInfo:
    """The record with its verified address first."""
    others = tuple(other for other in node_info.addresses if other != address)
    return msgspec.structs.replace(node_info, addresses=(address, *others))


def _name(rank: int) -> str:
    return f"{NODES}/{rank}.json"


def _listed(directory: SharedDir) -> list[int]:
    """The ranks whose records are listed, ascending."""
    stems = (name.removesuffix(".json") for name in directory.names(NODES) if name.endswith(".json"))
    return sorted(int(stem) for stem in stems if stem.isdecimal())
