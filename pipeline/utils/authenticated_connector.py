"""An aiohttp connector that verifies each server's proof of a secret (`pipeline.utils.authenticated_http`)."""

import asyncio
import errno
from collections.abc import Callable
from typing import Any

import aiohttp

from pipeline.errors import ImpostorError
from pipeline.utils.authenticated_http import MAX_ANSWER, ROUTE, check_answer
from pipeline.utils.mutual_auth import HANDSHAKE_SECONDS, new_nonce


class AuthenticatedConnector(aiohttp.TCPConnector):
    """Connects to servers that know the secret. Raises `aiohttp.ClientConnectorError` for other servers."""

    def __init__(self, secret: Callable[[], str], **options: Any) -> None:
        super().__init__(**options)
        self._secret = secret

    async def _create_connection(self, req: Any, *arguments: Any) -> Any:
        handler = await super()._create_connection(req, *arguments)
        try:
            # Python 3.11's `wait_for` loses a cancellation that comes just as the proof does.
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self._prove(handler)
        except BaseException as error:
            handler.close()
            if isinstance(error, (ImpostorError, OSError, EOFError, ValueError, asyncio.LimitOverrunError)):
                refusal = OSError(errno.ECONNREFUSED, str(error) or type(error).__name__)
                raise aiohttp.ClientConnectorError(req.connection_key, refusal) from error
            raise
        return handler

    async def _prove(self, handler: Any) -> None:
        """Request and verify the proof, then return the connection to aiohttp's response handler."""
        transport, nonce = handler.transport, new_nonce()
        address = transport.get_extra_info("peername") if transport is not None else None
        if address is None:
            raise ConnectionResetError(errno.ECONNRESET, "the server closed the connection at once")
        host, port = address[:2]
        reader = asyncio.StreamReader(limit=MAX_ANSWER)
        transport.set_protocol(asyncio.StreamReaderProtocol(reader))
        transport.write(f"GET {ROUTE}?nonce={nonce.hex()} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = dict(line.lower().partition(":")[::2] for line in lines)
        body = await reader.readexactly(min(int(fields.get("content-length", 0)), MAX_ANSWER))
        _, _, status = status.partition(" ")
        check_answer(self._secret(), host, port, nonce, int(status[:3]), status[4:], body)
        transport.set_protocol(handler)
