"""The network interfaces of this machine.

Owns which interface has which IPv4 address, which of them others may reach, and which network a run uses. Promises to
look anew at every call, since links come and go. Knows no ranks and no ports.
"""

import socket
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path

import psutil

KEPT_SECONDS = 60
"""For which a client keeps an HTTP connection that it does not use. A server has to keep it for longer: one that closes
it when a request is on its way loses that."""
_SYSTEM = Path("/sys/class/net")


def interfaces() -> Iterator[tuple[str, IPv4Interface]]:
    """Name and address, with its network, of every interface that is up; an interface may have several."""
    state = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        if name in state and state[name].isup:
            for entry in entries:
                if entry.family == socket.AF_INET:
                    yield name, IPv4Interface(f"{entry.address}/{entry.netmask or 32}")


def interface_of(address: str) -> str | None:
    """The interface that carries this IPv4 address, as `eth0`; None if none does.

    The loopback interface carries all of its network: 127.0.0.7 too, although only 127.0.0.1 is written on it.
    """
    wanted = IPv4Address(address)
    for name, known in interfaces():
        if known.ip == wanted or (known.is_loopback and wanted in known.network):
            return name
    return None


def candidate_addresses() -> tuple[str, ...]:
    """Every IPv4 address of an interface that is up, the likeliest to be reached first.

    That is the one from which this machine calls out; bridges that lead to nothing but this machine's own containers
    come last. Which of them others reach is not known here: they are called back. Loopback only where there is no
    other.
    """
    found = [(name, str(interface.ip)) for name, interface in interfaces() if not interface.is_loopback]
    routed = _routed_address()
    found.sort(key=lambda pair: (_leads_inward(pair[0]), pair[1] != routed))
    return tuple(address for _, address in found) or ("127.0.0.1",)


def addresses_on(addresses: Sequence[str], network: str) -> tuple[str, ...]:
    """Those of this machine's addresses that are on `network`: an interface or a subnet; all if it is empty."""
    if not network:
        return tuple(addresses)
    if "/" in network:
        subnet = IPv4Network(network, strict=False)
        return tuple(address for address in addresses if IPv4Address(address) in subnet)
    return tuple(address for address in addresses if interface_of(address) == network)


def describe_interfaces() -> str:
    """The interfaces that are up, for people: `eth0 10.0.0.5/24, ib0 10.1.0.5/16`."""
    return ", ".join(f"{name} {interface}" for name, interface in interfaces())


def bound_to(address: str) -> dict[str, str]:
    """Variables that keep gloo and nccl on the interface of this address; none if no interface carries it.

    By themselves they take the interface of the hostname, or any that is up, which others may not reach.
    """
    name = interface_of(address)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}


def _leads_inward(name: str) -> bool:
    """Whether this is a bridge without a link to the outside, as docker0."""
    ports = _SYSTEM / name / "brif"
    return ports.is_dir() and not any(
        (_SYSTEM / port.name / kind).exists() for port in ports.iterdir() for kind in ("device", "bonding")
    )


def _routed_address() -> str:
    """The address from which this machine would call out, or ""; connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])
