"""Ports that this machine's processes listen on.

Owns listening on a port that `pipeline.system.process.hold_port` holds, and the description of the process that listens
on a port, for messages. Only the owner of a process, or root, can see its id.
"""

import pwd
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

NOBODY = "no process of this machine"
_PROC = Path("/proc")
_LISTENING = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def listen_on_held(address: str, port: int, backlog: int = 1024) -> socket.socket:
    """A socket that listens on a held port. The kernel admits it beside the holder because both allow SO_REUSEPORT and
    belong to the same user; nobody else can listen there."""
    return socket.create_server((address, port), backlog=backlog, reuse_port=True)


def who_listens(port: int) -> str:
    """The processes of this machine that listen on a TCP port: `uid 1000 (ann), pid 4711 (python3)`."""
    found = [f"uid {uid} ({_name_of(uid)}), {_process_of(inode)}" for uid, inode in _listeners(port)]
    return "; ".join(dict.fromkeys(found)) or NOBODY


def _listeners(port: int) -> Iterator[tuple[int, str]]:
    """User id and inode of each socket that listens on the port."""
    for table in ("net/tcp", "net/tcp6"):
        with suppress(OSError):
            for line in (_PROC / table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    yield int(words[7]), words[9]


def _process_of(inode: str) -> str:
    wanted = f"socket:[{inode}]"
    for folder in _PROC.iterdir():
        with suppress(OSError):  # ended meanwhile, or somebody else's
            if folder.name.isdecimal() and any(str(fd.readlink()) == wanted for fd in (folder / "fd").iterdir()):
                return f"pid {folder.name} ({(folder / 'comm').read_text().strip()})"
    return "a pid that this user cannot see"


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "no name"
