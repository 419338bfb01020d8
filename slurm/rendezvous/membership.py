"""Who has come: the cards that a leader has collected.

Owns the cards of an attempt: their names, their publication, and their reading by a leader. Promises that a card is
read once when all goes well; that one of another attempt or rank, a torn one, and one whose rank does not answer are
looked at again in every pass and never believed; and that an address is one at which a rank of another node got an
answer, unless there are none. Knows nothing of the election.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import msgspec

from pipeline.errors import RendezvousError
from pipeline.topology.plan import NodeInfo
from pipeline.utils.shared_dir import SharedDir

NODES = "cards"
BATCH = 64  # cards between two looks at the lease
SHOWN = 12

FindAddresses = Callable[[Sequence[NodeInfo], Sequence[NodeInfo]], Mapping[int, str]]
"""For each card the address at which its rank answers, by rank; a rank that answers nowhere is absent. Who calls are
the cards given second, or the leader itself if there are none."""
WITNESSES = 3


def publish_node_info(directory: SharedDir, card: NodeInfo) -> bool:
    """True once the card is the one of its rank; False while a card is there that cannot be read yet.

    `RendezvousError` if another process has the rank.
    """
    name = _name(card.rank)
    if directory.create(name, card):
        return True
    other = directory.read(name, NodeInfo)
    if other is None or other == card:
        return other == card
    here, there = f"{card.hostname} pid {card.pid}", f"{other.hostname} pid {other.pid}"
    raise RendezvousError(
        f"rank {card.rank} of attempt {card.attempt} is taken: {here} came after {there} (attempt {other.attempt}); "
        "start one agent for each rank"
    )


def missing_ranks(directory: SharedDir, ranks: int) -> str:
    """The ranks that have published no card, as `ranks 3, 5-7`; empty if all have."""
    present = set(_listed(directory))
    return name_ranks([rank for rank in range(ranks) if rank not in present])


class Membership:
    """The cards that one leader has read and whose ranks were reached.

    The leader calls the ranks of other nodes itself. For those of its own node, itself among them, ranks that it has
    reached call: what a node reaches of itself may be nobody else's. When all that came are of its node, it calls them.

    while roster.gather():
        ...  # look at the lease
    world = assign(plan, roster.cards(), ...)
    """

    def __init__(
        self, directory: SharedDir, ranks: int, attempt: str, node: str, find_addresses: FindAddresses
    ) -> None:
        self._directory, self._ranks, self._attempt, self._node = directory, ranks, attempt, node
        self._find_addresses = find_addresses
        self._near: dict[int, NodeInfo] = {}
        self._queue: list[int] = []
        self._believed: dict[int, NodeInfo] = {}
        self._doubts: dict[int, str] = {}

    @property
    def complete(self) -> bool:
        """True once every rank has come, whether it is usable or not."""
        return len(self._believed) == self._ranks

    def gather(self) -> bool:
        """Read and verify the next batch of this pass; True while the pass has more."""
        if not self._queue:
            known = self._believed.keys() | self._near.keys()
            self._queue = [rank for rank in _listed(self._directory) if rank not in known and rank < self._ranks]
        batch, self._queue = self._queue[:BATCH], self._queue[BATCH:]
        self._verify([card for rank in batch if (card := self._read(rank))])
        if self._near and (self._witnesses() or len(self._believed) + len(self._near) == self._ranks):
            near, self._near = list(self._near.values()), {}
            self._believed |= self._reached(near, self._witnesses())
        return bool(self._queue)

    def cards(self) -> list[NodeInfo]:
        """A card for every rank; that of a rank that has not come, or is not believed, says so as its problem.

        Those of the leader's node count as long as no other node has come.
        """
        usable = self._believed | self._reached(list(self._near.values()), [])
        return [usable.get(rank) or self._absentee(rank) for rank in range(self._ranks)]

    def _read(self, rank: int) -> NodeInfo | None:
        """The card of a rank, if it is that rank's in this attempt."""
        card = self._directory.read(_name(rank), NodeInfo)
        if card and (card.rank, card.attempt) != (rank, self._attempt):
            self._doubts[rank] = f"its card is of rank {card.rank} of attempt {card.attempt}"
            return None
        return card

    def _verify(self, cards: Sequence[NodeInfo]) -> None:
        """Believe the cards whose ranks answer, each with the address that did, and those that excuse themselves."""
        self._believed |= {card.rank: card for card in cards if card.problems}
        sound = [card for card in cards if not card.problems]
        self._near |= {card.rank: card for card in sound if card.boot == self._node}
        self._believed |= self._reached([card for card in sound if card.boot != self._node], [])

    def _reached(self, cards: Sequence[NodeInfo], witnesses: Sequence[NodeInfo]) -> dict[int, NodeInfo]:
        """Those cards whose ranks answer, each with the address that did in front; of the others the reason is kept."""
        found = self._find_addresses(cards, witnesses) if cards else {}
        for card in cards:
            if card.rank not in found:
                tried = ", ".join(f"{address}:{card.probe_port}" for address in card.addresses) or "any address"
                asker = "to other nodes " if witnesses else ""
                self._doubts[card.rank] = f"{card.hostname} does not answer {asker}at {tried}"
        return {card.rank: _at(card, found[card.rank]) for card in cards if card.rank in found}

    def _witnesses(self) -> list[NodeInfo]:
        """Ranks of other nodes that were reached; a few, in case one of them falls silent."""
        reached = (card for card in self._believed.values() if card.boot != self._node and not card.problems)
        return list(islice(reached, WITNESSES))

    def _absentee(self, rank: int) -> NodeInfo:
        problem = self._doubts.get(rank, "no card appeared")
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
    """`rank 3` or `ranks 3, 5-7`, cut off after a dozen; empty for none."""
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


def _at(card: NodeInfo, address: str) -> NodeInfo:
    """The card with the address that was proved in front."""
    others = tuple(other for other in card.addresses if other != address)
    return msgspec.structs.replace(card, addresses=(address, *others))


def _name(rank: int) -> str:
    return f"{NODES}/{rank}.json"


def _listed(directory: SharedDir) -> list[int]:
    """Ranks whose cards are listed, ascending."""
    stems = (name.removesuffix(".json") for name in directory.names(NODES) if name.endswith(".json"))
    return sorted(int(stem) for stem in stems if stem.isdecimal())
