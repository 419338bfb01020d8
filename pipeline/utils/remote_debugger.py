"""Debuggers for a process without a terminal: pdb over a Unix socket, and debugpy for an IDE.

The socket is in a folder that only its owner can enter, since its client runs code as the owner. debugpy listens
on a port of 127.0.0.1 without a password, so every user of the node can attach to it.

    wait_for_pdb(say=log.warning)          # in the process: stops in the caller's frame once a client attaches
    python -m pipeline.utils.remote_debugger SOCKET        # the client, in a terminal of the same node

`quit`, and the end of the client, detach: the process continues. Each `breakpoint()` in the process waits for the next
client.
"""

import pdb
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

Say = Callable[[str], object]


class SocketPdb(pdb.Pdb):
    """pdb whose terminal is a socket's client."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        # Two files, since one for both would drop the input that it has read ahead at each write.
        reader = connection.makefile("r", encoding="utf-8", errors="replace")
        writer = connection.makefile("w", buffering=1, encoding="utf-8", errors="replace")
        # INT asks a role to end: pdb must not take it.
        super().__init__(stdin=reader, stdout=writer, nosigint=True)

    def interaction(self, frame: FrameType | None, traceback: TracebackType | None) -> None:
        """One stop. A client that has gone detaches."""
        try:
            super().interaction(frame, traceback)
        except OSError:
            self.detach()

    def detach(self) -> None:
        """Remove all breakpoints and let the process go on."""
        self.clear_all_breaks()
        self.set_continue()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # closing is not enough: pdb's files keep the socket open
        self._connection.close()

    def do_quit(self, arg: str) -> bool:
        """Detach, and let the process go on."""
        self.detach()
        return True

    do_q = do_exit = do_EOF = do_quit


def wait_for_pdb(say: Say) -> None:
    """Wait for a client and stop in the caller's frame; from now on `breakpoint()` does the same.

    `say` is called with the command that attaches.
    """
    path = Path(tempfile.mkdtemp(prefix="pdb-")) / "socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)

    def stop(frame: FrameType | None) -> None:
        say(f"waits for a debugger; attach on this node: {sys.executable} -m {__spec__.name} {path}")
        connection, _ = listener.accept()
        SocketPdb(connection).set_trace(frame)

    def hook(*args: object, **keywords: object) -> None:
        stop(sys._getframe(1))

    sys.breakpointhook = hook
    stop(sys._getframe(1))


def wait_for_debugpy(port: int, say: Say) -> None:
    """Wait until an IDE has attached to debugpy on this port of 127.0.0.1. The submission checks that it is there."""
    import debugpy

    debugpy.listen(("127.0.0.1", port))
    say(f"waits for an IDE: attach to debugpy at 127.0.0.1:{port} of this node")
    debugpy.wait_for_client()


def attach(path: Path) -> None:
    """Connect this terminal to the pdb at the socket, until either side ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        threading.Thread(target=_send_input, args=[connection], daemon=True).start()
        while received := connection.recv(1 << 16):
            sys.stdout.write(received.decode(errors="replace"))
            sys.stdout.flush()


def _send_input(connection: socket.socket) -> None:
    for line in sys.stdin:
        connection.sendall(line.encode())
    connection.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    attach(Path(sys.argv[1]))
