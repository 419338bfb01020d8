"""A proxy process that admits only peers with the secret to a Unix socket.

For a server without mutual authentication, such as Redis. The server listens on a Unix socket in a private folder, and
the gate on the TCP port. After the handshake (`pipeline.utils.mutual_auth`) the gate copies bytes in both directions.
No byte reaches the server before its client has proved knowledge of the secret, and the client verifies the gate
likewise. A flood of unauthenticated connections keeps no peer out (`pipeline.utils.connection_limits`).
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

    The secret stays in memory and appears in no argument and no environment variable.
    """
    parent = os.getpid()
    if os.fork():
        return
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # INT is for the server; the kernel kills this process after it
        exit_with_parent()
        if os.getppid() == parent:
            raise_open_files()
            asyncio.run(Gate(server, secret, service).serve(listening))
        code = 0
    finally:
        os._exit(code)


class Gate:
    """Accepts clients, verifies their proofs, and connects them to one Unix socket."""

    def __init__(self, server: str, secret: str, service: str, most: int = 256) -> None:
        self.server, self.secret, self.service = server, secret, service
        self.admission = ConnectionLimiter(service, most, mutual_auth.HANDSHAKE_SECONDS)
        self.connecting: set[asyncio.Task[None]] = set()

    async def serve(self, listening: socket.socket) -> None:
        """Serve until the process ends."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Client(self), sock=listening, backlog=_BACKLOG)
        async with server:
            await server.serve_forever()


class _Client(asyncio.Protocol):
    """One client's connection: its handshake, then the copying of its bytes to a separate connection to the server."""

    _transport: asyncio.Transport
    _server: asyncio.Transport | None = None
    _expected = b""
    """The proof that the client must send after its nonce; empty until the nonce has arrived."""

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
            self._check_proof()

    def _check_proof(self) -> None:
        answer, self._received = self._received[: mutual_auth.PROOF_BYTES], self._received[mutual_auth.PROOF_BYTES :]
        if not hmac.compare_digest(answer, self._expected):
            self._transport.abort()
            return
        self._gate.admission.release(self._transport)
        self._transport.pause_reading()  # until the connection to the server exists
        task = asyncio.create_task(self._connect())
        self._gate.connecting.add(task)
        task.add_done_callback(self._gate.connecting.discard)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            server, _ = await loop.create_unix_connection(lambda: _Server(self._transport), self._gate.server)
        except OSError:
            self._transport.close()  # the server does not listen (yet): the client retries
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
    """A client's connection to the server: copies the server's bytes to the client."""

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
