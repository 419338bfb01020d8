"""A process that lets only peers with the secret through to a Unix socket.

For a server that can prove nothing by itself, such as Redis: it listens on a Unix socket in a folder of the owner's,
and the gate on the TCP port. Owns the handshake (`pipeline.system.proof`) and the copying of bytes. Promises that no
byte reaches the server before its client has proved that it knows the secret, that a client knows the same about the
gate, and that a flood of strangers keeps no peer out (`pipeline.system.admission`). Reads nothing of what it copies.
"""

import asyncio
import hmac
import os
import signal
import socket
from contextlib import suppress

from pipeline.system import proof
from pipeline.system.admission import Admission, raise_open_files
from pipeline.system.process import die_with_parent

_CHUNK_BYTES, _BACKLOG = 1 << 18, 1024


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
        die_with_parent()
        if os.getppid() == parent:
            raise_open_files()
            asyncio.run(Gate(server, secret, service).serve(listening))
        code = 0
    finally:
        os._exit(code)


class Gate:
    """Admits clients to one Unix socket."""

    def __init__(self, server: str, secret: str, service: str, most: int = 256) -> None:
        self._server, self._secret, self._service = server, secret, service
        self._admission = Admission(service, most, proof.HANDSHAKE_SECONDS)

    async def serve(self, listening: socket.socket) -> None:
        """Serve for good."""
        async with await asyncio.start_server(
            self._meet, sock=listening, limit=_CHUNK_BYTES, backlog=_BACKLOG
        ) as server:
            await server.serve_forever()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._admission.admit(writer.transport)
        try:
            if await self._is_peer(reader, writer):
                self._admission.release(writer.transport)
                await self._connect(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            return  # the client is gone, or the server is not there: a client tries again
        finally:
            self._admission.release(writer.transport)
            writer.close()

    async def _is_peer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        nonce = await reader.readexactly(proof.NONCE_BYTES)
        answer, expected = proof.welcome_answer(self._secret, self._service, nonce)
        writer.write(answer)
        return hmac.compare_digest(await reader.readexactly(proof.PROOF_BYTES), expected)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_unix_connection(self._server, limit=_CHUNK_BYTES)
        try:
            copies = [asyncio.create_task(_copy(reader, to_server)), asyncio.create_task(_copy(from_server, writer))]
            _, left = await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            for copy in left:
                copy.cancel()
            await asyncio.gather(*copies, return_exceptions=True)
        finally:
            to_server.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(_CHUNK_BYTES):
            target.write(data)
            await target.drain()
