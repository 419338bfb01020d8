"""Which addresses a leader believes: those at which another node reached a rank."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from pipeline.topology.plan import NodeInfo
from pipeline.utils.shared_dir import FileSharedDir
from slurm.rendezvous.membership import Membership, publish_node_info
from tests.fakes.ranks import ATTEMPT, make_node_infos

DOCKER = "172.17.0.1"


class Wires:
    """Nodes that reach each other at their own addresses, and themselves at docker0's too."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int]]] = []

    def find(self, node_infos: Sequence[NodeInfo], witnesses: Sequence[NodeInfo]) -> Mapping[int, str]:
        self.calls.append(([node_info.rank for node_info in node_infos], [node_info.rank for node_info in witnesses]))
        return {
            node_info.rank: self._address(node_info, witnesses)
            for node_info in node_infos
            if node_info.boot != "cut off"
        }

    @staticmethod
    def _address(node_info: NodeInfo, witnesses: Sequence[NodeInfo]) -> str:
        elsewhere = bool(witnesses) or node_info.boot != "node of the leader"
        return next(address for address in node_info.addresses if not (elsewhere and address == DOCKER))


def a_card(rank: int, boot: str = "") -> NodeInfo:
    boot = boot or ("node of the leader" if rank == 0 else f"node {rank}")
    return msgspec.structs.replace(make_node_infos(rank + 1)[rank], boot=boot, addresses=(DOCKER, f"10.0.0.{rank}"))


def roster_of(folder: Path, ranks: int, wires: Wires, *node_infos: NodeInfo) -> tuple[Membership, FileSharedDir]:
    view = FileSharedDir(folder)
    for node_info in node_infos:
        assert publish_node_info(view, node_info)
    return Membership(view, ranks, ATTEMPT, "node of the leader", wires.find), view


def gathered(roster: Membership) -> list[str]:
    while roster.gather():
        pass
    return [
        node_info.addresses[0] if node_info.addresses else node_info.problems[0] for node_info in roster.node_infos()
    ]


def test_a_leader_is_where_another_node_reaches_it_and_not_where_it_reaches_itself(tmp_path: Path) -> None:
    wires = Wires()
    roster, _ = roster_of(tmp_path, 3, wires, a_card(0), a_card(1), a_card(2))
    assert gathered(roster) == ["10.0.0.0", "10.0.0.1", "10.0.0.2"]
    assert roster.complete
    assert wires.calls == [([1, 2], []), ([0], [1, 2])]


def test_a_leader_that_is_alone_so_far_waits_for_somebody_to_call_it(tmp_path: Path) -> None:
    wires = Wires()
    roster, view = roster_of(tmp_path, 2, wires, a_card(0))
    assert not roster.gather()
    assert not roster.complete
    assert wires.calls == []
    assert publish_node_info(view, a_card(1))
    assert gathered(roster) == ["10.0.0.0", "10.0.0.1"]


def test_ranks_of_one_node_call_themselves(tmp_path: Path) -> None:
    wires = Wires()
    roster, _ = roster_of(tmp_path, 2, wires, a_card(0), a_card(1, "node of the leader"))
    assert gathered(roster) == [DOCKER, DOCKER]
    assert roster.complete


def test_a_leader_whose_other_nodes_never_come_still_has_its_own(tmp_path: Path) -> None:
    roster, _ = roster_of(tmp_path, 2, Wires(), a_card(0))
    assert gathered(roster) == [DOCKER, "no node record appeared"]
    assert not roster.complete


def test_a_node_that_has_only_the_loopback_address_is_told_that_ranks_need_ipv4(tmp_path: Path) -> None:
    class Deaf(Wires):
        def find(self, node_infos: Sequence[NodeInfo], witnesses: Sequence[NodeInfo]) -> Mapping[int, str]:
            return {}

    without = msgspec.structs.replace(a_card(1), addresses=("127.0.0.1",))
    roster, _ = roster_of(tmp_path, 2, Deaf(), a_card(0), without)
    reason = "it has no other IPv4 address, and ranks on several nodes need one (not IPv6)"
    assert gathered(roster)[1:] == [f"node1 does not answer at 127.0.0.1:4000; {reason}"]


def test_a_leader_that_no_other_node_reaches_says_so(tmp_path: Path) -> None:
    class Deaf(Wires):
        def find(self, node_infos: Sequence[NodeInfo], witnesses: Sequence[NodeInfo]) -> Mapping[int, str]:
            return {} if witnesses else super().find(node_infos, witnesses)

    roster, _ = roster_of(tmp_path, 2, Deaf(), a_card(0), a_card(1))
    assert gathered(roster) == [f"node0 does not answer to other nodes at {DOCKER}:4000, 10.0.0.0:4000", "10.0.0.1"]
    assert not roster.complete
