"""The partition that a user injects into a run, `faults=[partition:node[1]=20s@step=3]`: a node's packets are lost.

Owns the connections of this agent's processes that a partition cuts, and their filters (`pipeline.utils.packet_loss`).
Promises that connections within a node continue, and that every filter is removed when the partition ends or this rank
is down. New connections are cut by the processes that begin them (`pipeline.run.fault_conditions`); those that programs
other than Python begin are cut within `SCAN_SECONDS`.

An agent attaches a filter to its own end of each connection. The agent of the node that is cut off does so at the other
end too where it is on the same machine, as with virtual nodes. So both directions are cut.

    with NodePartition(paths, faults, rank, world.rank_of_address, lambda: processes_of(supervisor.roles)):
        supervisor.run()
"""

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from ipaddress import ip_address
from types import TracebackType
from typing import Any

import psutil

from pipeline.run.fault_conditions import condition_holds, crosses
from pipeline.run.fault_plan import NODE, Fault
from pipeline.run.paths import AttemptPaths
from pipeline.utils.packet_loss import drop_packets, pass_packets, socket_of
from slurm.agent import os_processes
from slurm.agent.role_process import SupervisedRole

SCAN_SECONDS = 0.25
"""Pause between two scans for new connections during a partition."""
Endpoint = tuple[str, int]
Ends = tuple[Endpoint, Endpoint]


class NodePartition:
    """Cuts the connections of one rank's processes while the block runs; idle without a planned partition."""

    def __init__(
        self,
        paths: AttemptPaths,
        faults: Iterable[Fault],
        rank: int,
        nodes: Mapping[str, int],
        processes: Callable[[], set[int]],
    ) -> None:
        """`nodes` has the rank of each address; `processes` are the ids of this rank's, now (`processes_of`)."""
        self._paths, self._rank, self._nodes, self._processes = paths, rank, nodes, processes
        self._faults = [fault for fault in faults if fault.target == NODE]
        self._cut: dict[Fault, dict[Ends, socket.socket]] = {fault: {} for fault in self._faults}
        self._refused, self._over = set[str](), threading.Event()
        self._thread = threading.Thread(target=self._scan, name="partition", daemon=True)

    def __enter__(self) -> "NodePartition":
        if self._faults:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if self._faults:
            self._thread.join()

    @property
    def cut_ends(self) -> int:
        """The number of ends of connections that have a filter of this agent."""
        return sum(map(len, self._cut.values()))

    def _scan(self) -> None:
        held = set[Fault]()
        while not self._over.wait(SCAN_SECONDS):
            holding = {fault for fault in self._faults if condition_holds(self._paths, fault)}
            for fault in holding | held:  # once more after the end: a connection may have begun just before it
                self._cut_connections(fault)
            for fault in held - holding:
                self._restore(fault)
            held = holding
        for fault in self._faults:
            self._restore(fault)

    def _cut_connections(self, fault: Fault) -> None:
        connections = {
            ends: connection for connection in psutil.net_connections("tcp") if (ends := _ends(connection)) is not None
        }
        own = self._processes()
        mine = {ends for ends, connection in connections.items() if connection.pid in own}
        local = {ends[0] for ends in mine}
        for here, there in mine:
            if there in local or not self._crosses(there[0], fault):
                continue
            both = [(here, there), (there, here)] if fault.index == self._rank else [(here, there)]
            for ends in both:
                if ends in connections and ends not in self._cut[fault]:
                    self._hold(fault, ends, connections[ends])

    def _crosses(self, address: str, fault: Fault) -> bool:
        """Whether the other end of a connection, which is not of this rank's processes, is beyond the partition.

        On one machine a client's address is no node's; its connection is cut by the agent of the node cut off.
        """
        other = self._nodes.get(address)
        if other is None:
            return fault.index == self._rank and ip_address(address).is_loopback
        return crosses(self._rank, other, fault.index)

    def _hold(self, fault: Fault, ends: Ends, connection: Any) -> None:
        if connection.pid is None:
            return
        try:
            end = socket_of(connection.pid, connection.fd)
            drop_packets(end)
        except OSError as error:
            if error.errno == errno.EPERM:
                self._explain(connection.pid)
            return  # else the process or its connection has ended
        self._cut[fault][ends] = end

    def _explain(self, pid: int) -> None:
        text = f"{os_processes.name_of(pid)}'s connections are not cut: the kernel refuses them to this agent"
        if text not in self._refused:
            self._refused.add(text)
            print(f"partition: {text}; see the sysctl kernel.yama.ptrace_scope", flush=True)

    def _restore(self, fault: Fault) -> None:
        ends = self._cut[fault]
        while ends:
            _, end = ends.popitem()
            pass_packets(end)
            end.close()


def processes_of(roles: Sequence[SupervisedRole]) -> set[int]:
    """This agent, its roles, and all processes below these."""
    leaders = {os.getpid()}
    for role in roles:
        leaders |= {role.pid, *role.monitor.worker_pids()} - {0}
    return leaders.union(*(os_processes.descendants(pid) for pid in leaders))


def _ends(connection: Any) -> Ends | None:
    """Both ends of a connection; None for a socket without a peer. IPv4 addresses in IPv6 sockets are IPv4."""
    if not connection.raddr:
        return None
    return _plain(connection.laddr), _plain(connection.raddr)


def _plain(address: Any) -> Endpoint:
    return address.ip.removeprefix("::ffff:"), address.port
