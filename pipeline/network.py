"""The network interfaces of this machine.

Owns which interface has which IPv4 address. Promises to look anew at every call, since links come and go. Knows no
ranks and no ports.
"""

import socket
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Interface

import psutil


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
