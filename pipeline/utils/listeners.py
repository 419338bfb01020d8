"""Listening ports of this machine.

Functions to listen on a port that `pipeline.utils.subprocesses.hold_port` holds, to hold a given port, and to describe
the process that listens on a port. Only the owner of a process, or root, can see the process's id.
"""

import errno
import pwd
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

NO_LISTENER = "no process of this machine"
_PROC = Path("/proc")
_LISTENING = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def listen_on_held(address: str, port: int, backlog: int = 1024) -> socket.socket:
    """A socket that listens on a held port.

    The kernel admits it in addition to the holder because both set SO_REUSEPORT and belong to the same user. Other
    users cannot listen there.
    """
    return socket.create_server((address, port), backlog=backlog, reuse_port=True)


def hold_address(host: str, port: int) -> tuple[int, ExitStack]:
    """Hold a port at every address of `host`, as `pipeline.utils.subprocesses.hold_port` does. Port 0: any free one.

    Returns the port, and a stack that releases it when closed. `OSError` if another process has the port.
    """
    addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with ExitStack() as held:
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in addresses):
            holder = held.enter_context(_hold(family, (address[0], port, *address[2:])))
            port = holder.getsockname()[1]
        return port, held.pop_all()


def _hold(family: int, address: Any) -> socket.socket:
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            holder.bind(address)
        except OSError as error:
            # Connections of an earlier server (TIME_WAIT) can block an exclusive bind for a minute. If there is no
            # listener, bind with SO_REUSEADDR, as a restarted server does.
            states = _states(address[1])
            if error.errno != errno.EADDRINUSE or not states or _LISTENING in states:
                raise
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(address)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        holder.close()
        raise
    return holder


def listening_process(port: int) -> str:
    """The processes of this machine that listen on a TCP port: `uid 1000 (ann), pid 4711 (python3)`."""
    processes = [f"uid {uid} ({_name_of(uid)}), {_process_of(inode)}" for uid, inode in _listeners(port)]
    return "; ".join(dict.fromkeys(processes)) or NO_LISTENER


def _listeners(port: int) -> Iterator[tuple[int, str]]:
    """User id and inode of each socket that listens on the port."""
    yield from ((uid, inode) for state, uid, inode in _sockets(port) if state == _LISTENING)


def _states(port: int) -> set[str]:
    """The states of the port's sockets that listen, or have or had a peer. Bound sockets are in no table."""
    return {state for state, *_ in _sockets(port)}


def _sockets(port: int) -> Iterator[tuple[str, int, str]]:
    """State, user id and inode of each socket of the port."""
    for table in ("net/tcp", "net/tcp6"):
        with suppress(OSError):
            for line in (_PROC / table).read_text().splitlines()[1:]:
                words = line.split()
                if int(words[1].rpartition(":")[2], 16) == port:
                    yield words[3], int(words[7]), words[9]


def _process_of(inode: str) -> str:
    target = f"socket:[{inode}]"
    for folder in _PROC.iterdir():
        with suppress(OSError):  # a process that ended meanwhile, or belongs to another user
            if folder.name.isdecimal() and any(str(fd.readlink()) == target for fd in (folder / "fd").iterdir()):
                return f"pid {folder.name} ({(folder / 'comm').read_text().strip()})"
    return "a pid that this user cannot see"


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "no name"
