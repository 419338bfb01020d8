"""A process that lets only peers with the secret through to a Unix socket.

For a server that can prove nothing by itself, such as Redis: it listens on a Unix socket in a folder of the owner's,
and the gate on the TCP port. Owns the handshake (`pipeline.utils.mutual_auth`) and the copying of bytes. Promises that
no byte reaches the server before its client has proved that it knows the secret, that a client knows the same about the
gate, and that a flood of strangers keeps no peer out (`pipeline.utils.connection_limits`). Reads nothing of what it
copies.
"""

import asyncio
import hmac
import os
import signal
import socket

from pipeline.utils import mutual_auth
from pipeline.utils.connection_limits import ConnectionLimiter, raise_open_files
from pipeline.utils.subprocesses import exit_with_parent

_BACKLOG = 1024


def start_gate(listening: socket.socket, server: str, secret: str, service: str) -> None:
    """Fork a process that admits clients of `listening` to the Unix socket `server`, until its parent ends.

    The secret stays in memory: it is in no argument and no environment.
    """
    parent = os.getpid()
    if os.fork():
        return
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the server; the kernel ends this process after it
        exit_with_parent()
        if os.getppid() == parent:
            raise_open_files()
            asyncio.run(Gate(server, secret, service).serve(listening))
        code = 0
    finally:
        os._exit(code)


class Gate:
    """Admits clients to one Unix socket."""

    def __init__(self, server: str, secret: str, service: str, most: int = 256) -> None:
        self.server, self.secret, self.service = server, secret, service
        self.admission = ConnectionLimiter(service, most, mutual_auth.HANDSHAKE_SECONDS)
        self.connecting: set[asyncio.Task[None]] = set()

    async def serve(self, listening: socket.socket) -> None:
        """Serve for good."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Client(self), sock=listening, backlog=_BACKLOG)
        async with server:
            await server.serve_forever()


class _Client(asyncio.Protocol):
    """One client: its handshake, then what it sends, which goes to a connection to the server of its own."""

    _transport: asyncio.Transport
    _server: asyncio.Transport | None = None
    _expected = b""
    """The proof that it must give, once it has sent its nonce."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._received = gate, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # asyncio sets it only on sockets made for TCP by number, which one that accepts for a held port is not. Without
        # it the second of several small answers waits 40 ms for the client to acknowledge the first.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._gate.admission.admit(transport)

    def data_received(self, data: bytes) -> None:
        if self._server is not None:
            self._server.write(data)
            return
        self._received += data
        if not self._expected and len(self._received) >= mutual_auth.NONCE_BYTES:
            nonce, self._received = self._received[: mutual_auth.NONCE_BYTES], self._received[mutual_auth.NONCE_BYTES :]
            answer, self._expected = mutual_auth.welcome_answer(self._gate.secret, self._gate.service, nonce)
            self._transport.write(answer)
        if self._expected and len(self._received) >= mutual_auth.PROOF_BYTES:
            self._judge()

    def _judge(self) -> None:
        given, self._received = self._received[: mutual_auth.PROOF_BYTES], self._received[mutual_auth.PROOF_BYTES :]
        if not hmac.compare_digest(given, self._expected):
            self._transport.abort()
            return
        self._gate.admission.release(self._transport)
        self._transport.pause_reading()  # until there is somebody to pass it on to
        task = asyncio.create_task(self._connect())
        self._gate.connecting.add(task)
        task.add_done_callback(self._gate.connecting.discard)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            server, _ = await loop.create_unix_connection(lambda: _Server(self._transport), self._gate.server)
        except OSError:
            self._transport.close()  # the server is not there: a client tries again
            return
        if self._transport.is_closing():
            server.close()
            return
        server.write(self._received)
        self._server = server
        self._transport.resume_reading()

    def pause_writing(self) -> None:
        if self._server is not None:
            self._server.pause_reading()

    def resume_writing(self) -> None:
        if self._server is not None:
            self._server.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.admission.release(self._transport)
        if self._server is not None:
            self._server.close()


class _Server(asyncio.Protocol):
    """A client's connection to the server: what comes from it goes to the client."""

    def __init__(self, client: asyncio.Transport) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    def pause_writing(self) -> None:
        self._client.pause_reading()

    def resume_writing(self) -> None:
        self._client.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.close()
