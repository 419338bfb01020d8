"""Loss of packets at sockets, injected without privileges.

Owns a filter that lets the kernel drop every packet that arrives at a socket (a classic BPF program, SO_ATTACH_FILTER).
The socket's owner meets what it meets at a broken network: no answer, retransmissions, timeouts. No packet is forged,
so a connection continues once the filter is removed. A filter drops what arrives; to cut both directions of a
connection, attach one at each end. The sockets of another process are reached through pidfd_getfd(2), which the kernel
grants to the same user where `kernel.yama.ptrace_scope` is 0, or 1 and the process is a descendant.

    socket = socket_of(pid, fd)     # a duplicate of another process's socket
    drop_packets(socket)
    ...
    pass_packets(socket)
"""

import ctypes
import errno
import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

_PIDFD_GETFD = 438  # the number of the system call on every architecture
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_RETURN_NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0), 8)  # BPF_RET | BPF_K with length 0
_LIBC = ctypes.CDLL(None, use_errno=True)


def drop_packets(end: socket.socket) -> None:
    """Drop every packet that arrives at the socket from now on, also before a connection is established."""
    program = struct.pack("HL", 1, ctypes.addressof(_RETURN_NOTHING))
    end.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def pass_packets(end: socket.socket) -> None:
    """Remove the filter of a socket, if it has one. Lost packets are sent again by their senders."""
    try:
        end.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise


def socket_of(pid: int, fd: int) -> socket.socket:
    """A duplicate of the socket `fd` of a process; it keeps the connection open until it is closed.

    `OSError`: the process or its descriptor is gone, or the kernel refuses access (EPERM).
    """
    process = os.pidfd_open(pid)
    try:
        duplicate = _LIBC.syscall(_PIDFD_GETFD, process, fd, 0)
        if duplicate < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(process)
    return socket.socket(fileno=duplicate)


def lose_new_connections(is_lost: Callable[[str], bool]) -> None:
    """Drop the packets of each connection that this process begins, by Python's sockets, to an address that is lost.

    Python reports `connect` to an audit hook (PEP 578) before the first packet leaves. A hook stays until its process
    ends.
    """

    def intercept(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "socket.connect":
            return
        end, address = arguments
        if isinstance(address, tuple) and isinstance(address[0], str) and is_lost(address[0]):
            drop_packets(end)

    sys.addaudithook(intercept)
