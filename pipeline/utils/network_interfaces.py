"""The network interfaces of this machine: their IPv4 addresses, and the addresses on a given network.

Every call reads the current state of the kernel, since links come and go.
"""

import socket
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path

import psutil

KEEPALIVE_SECONDS = 60
"""Seconds for which a client holds an unused HTTP connection. A server must hold it for longer: if the server closes
the connection while a request is on its way, this request is lost."""
LOOPBACK = "127.0.0.1"
"""The address of a machine without another IPv4 address."""
_SYSTEM = Path("/sys/class/net")


def interfaces() -> Iterator[tuple[str, IPv4Interface]]:
    """Name, and address with network, of every interface that is up. An interface may have several addresses."""
    state = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        if name in state and state[name].isup:
            for entry in entries:
                if entry.family == socket.AF_INET:
                    yield name, IPv4Interface(f"{entry.address}/{entry.netmask or 32}")


def interface_of(address: str) -> str | None:
    """The interface that carries this IPv4 address, such as `eth0`; None if there is none.

    The loopback interface carries its whole network, for example 127.0.0.7, although only 127.0.0.1 is assigned.
    """
    target = IPv4Address(address)
    for name, interface in interfaces():
        if interface.ip == target or (interface.is_loopback and target in interface.network):
            return name
    return None


def candidate_addresses() -> tuple[str, ...]:
    """The IPv4 addresses of all interfaces that are up, the one that is most probably reachable first.

    First is the source address of outgoing connections; last are bridges to this machine's containers. Whether other
    machines reach an address is found out by their probes. The loopback address is returned only if there is no other.
    """
    candidates = [(name, str(interface.ip)) for name, interface in interfaces() if not interface.is_loopback]
    routed = _routed_address()
    candidates.sort(key=lambda pair: (_leads_inward(pair[0]), pair[1] != routed))
    return tuple(address for _, address in candidates) or (LOOPBACK,)


def addresses_on(addresses: Sequence[str], network: str) -> tuple[str, ...]:
    """The addresses of this machine that are on `network`, an interface or a subnet. All if `network` is empty."""
    if not network:
        return tuple(addresses)
    if "/" in network:
        subnet = IPv4Network(network, strict=False)
        return tuple(address for address in addresses if IPv4Address(address) in subnet)
    return tuple(address for address in addresses if interface_of(address) == network)


def describe_interfaces() -> str:
    """The interfaces that are up, for messages: `eth0 10.0.0.5/24, ib0 10.1.0.5/16`."""
    return ", ".join(f"{name} {interface}" for name, interface in interfaces())


def bound_to(address: str) -> dict[str, str]:
    """Environment variables that bind gloo and NCCL to the interface of this address; empty if there is none.

    The libraries' default is the interface of the hostname, or any that is up, which other machines may not reach.
    """
    name = interface_of(address)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}


def _leads_inward(name: str) -> bool:
    """Whether this is a bridge without a link to the outside, such as docker0."""
    ports = _SYSTEM / name / "brif"
    return ports.is_dir() and not any(
        (_SYSTEM / port.name / kind).exists() for port in ports.iterdir() for kind in ("device", "bonding")
    )


def _routed_address() -> str:
    """The source address of outgoing connections, or "" if there is no route."""
    return address_towards("192.0.2.1")


def address_towards(host: str) -> str:
    """The source address of connections to `host`, or "" if there is no route. Sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # a datagram socket: chooses a route without sending anything
        except OSError:
            return ""
        return str(probe.getsockname()[0])
