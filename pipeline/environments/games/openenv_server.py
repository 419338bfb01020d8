"""A local server of OpenEnv, and the sessions of a process with it.

Owns the server's process, its port and its readiness, and one WebSocket for each session. Promises that the
server is killed by its id, with all processes that it started, at the latest when its owner ends; that every wait has a
deadline; and that an error of the server, a closed connection and a malformed reply raise `OpenEnvError` with the
reason. Must not import openenv.

Messages, as in `openenv.core.env_server.types`: `{"type": "reset", "data": {"seed": 3}}`, `{"type": "step", "data":
{…}}` and `{"type": "close"}`. Replies: `{"type": "observation", "data": {"observation": {…}, "reward": 0.5, "done":
false}}`, or `{"type": "error", "data": {"message": …, "code": …}}`.
"""

import asyncio
import os
import shutil
import socket
import subprocess
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import cache
from threading import Thread
from typing import Any, TypeVar

import aiohttp

from pipeline.environments.agent_task import OutputTail
from pipeline.environments.games.game_protocol import GameLost
from pipeline.utils.subprocesses import Leader, describe_exit
from pipeline.utils.waiting import Deadline

T = TypeVar("T")
STARTS = 3
"""Attempts to start a server: another process may take the port in between."""
POLL_SECONDS = 0.05
MAX_MESSAGE = 1 << 26
CAPACITY_SECONDS = 5.0
"""Time for a server to release the session of a connection that was closed."""
_CLOSING = aiohttp.ClientWSTimeout(ws_close=2.0)
INVALID_ACTION = "VALIDATION_ERROR"
NO_REPLY, UNREACHABLE = "NO_REPLY", "UNREACHABLE"
"""Codes of an `OpenEnvError` without a reply of the server: a timeout, and a connection that failed."""


class OpenEnvError(Exception):
    """A server or a session failed; `code` is the server's error code, one of the above, or empty."""

    def __init__(self, why: str, code: str = "") -> None:
        super().__init__(why)
        self.code = code


class SessionLost(OpenEnvError, GameLost):
    """The server closed the connection of a session, as when it ends."""


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """An event loop in a thread, which answers the pings of idle connections."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _run(work: Coroutine[Any, Any, T], what: str, seconds: float) -> T:
    """The result of a coroutine on the loop; `OpenEnvError` for a deadline and for errors of the network."""

    async def bounded() -> T:
        async with asyncio.timeout(seconds):
            return await work

    try:
        return asyncio.run_coroutine_threadsafe(bounded(), _loop()).result()
    except TimeoutError:
        raise OpenEnvError(f"no reply to {what} after {seconds:g} s", NO_REPLY) from None
    except (aiohttp.ClientError, OSError) as error:
        code = UNREACHABLE if isinstance(error, OSError) else ""
        raise OpenEnvError(f"{what} failed: {type(error).__name__}: {error}", code) from None


class LocalServer:
    """A server that this process starts, on a free port of the loopback interface."""

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        """`command` has `{port}` in the place of the port. Returns when the server is ready, within `seconds`;
        `OpenEnvError` if it is not."""
        if shutil.which(command[0]) is None:
            raise OpenEnvError(f"the server cannot be started: no program {command[0]}")
        deadline, why = Deadline("the server of OpenEnv", seconds), ""
        for _ in range(STARTS):
            self._start(command)
            why = self._wait(deadline)
            if not why:
                return
            self.end()
            if deadline.passed:
                break
        raise OpenEnvError(f"the server {why}")

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    def _start(self, command: Sequence[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        argv = [part.replace("{port}", port) for part in command]
        reader, writer = os.pipe()
        try:
            environment = {**os.environ, "PORT": port, "HOST": "127.0.0.1"}
            self._process = Leader(argv, environment, stdin=subprocess.DEVNULL, output=writer)
        except OSError as error:
            os.close(reader)
            raise OpenEnvError(f"the server cannot be started: {error}") from None
        finally:
            os.close(writer)
        self._tail = OutputTail(reader)
        self.end = weakref.finalize(self, _end, self._process, reader)

    def _wait(self, deadline: Deadline) -> str:
        """Wait until the server is healthy. Returns the reason if it is not in time."""
        while not deadline.passed:
            code = self._process.poll()
            if code is not None:
                return ": ".join(filter(None, (describe_exit(code), self._tail.text())))
            with suppress(OpenEnvError):
                if _run(_status(f"{self.url}/health"), "its health check", min(5.0, deadline.left + 0.1)) == 200:
                    return ""
            deadline.clock.sleep(POLL_SECONDS)
        return f"was not healthy after {deadline.seconds:g} s"


def _end(process: Leader, reader: int) -> None:
    process.kill_all()
    os.close(reader)


async def _status(url: str) -> int:
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        return response.status


class Session:
    """One environment of a server, over one WebSocket."""

    def __init__(self, url: str, seconds: float) -> None:
        """Connect to the server at `url`. `seconds` bounds each exchange."""
        self._seconds = seconds
        self._replies: asyncio.Queue[Any] = asyncio.Queue()
        _run(self._connect(f"{url.rstrip('/')}/ws"), f"the connection to {url}", seconds)

    def exchange(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The data of the reply to a message; `OpenEnvError` if the reply is an error or malformed."""
        message = _run(self._exchange({"type": kind, "data": dict(data)}), kind, self._seconds)
        if isinstance(message, Exception):
            raise OpenEnvError(f"the server's reply to {kind} is no JSON: {message}")
        content = message.get("data") if isinstance(message, Mapping) else None
        if not isinstance(content, dict):
            raise OpenEnvError(f"the server's reply to {kind} has no data")
        if message.get("type") == "error":
            code = str(content.get("code"))
            raise OpenEnvError(f"{kind}: {code}: {content.get('message')}", code)
        return content

    def close(self) -> None:
        """End the session; the server releases its environment."""
        with suppress(OpenEnvError):
            _run(self._close(), "close", self._seconds)

    async def _connect(self, url: str) -> None:
        self._http = aiohttp.ClientSession()
        try:
            self._socket = await self._http.ws_connect(url, max_msg_size=MAX_MESSAGE, timeout=_CLOSING)
        except BaseException:
            await self._http.close()
            raise
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Queue replies. Receiving also answers pings."""
        async for message in self._socket:
            try:
                self._replies.put_nowait(message.json())
            except (ValueError, TypeError, RecursionError) as error:
                self._replies.put_nowait(error)
        self._replies.put_nowait(None)

    async def _exchange(self, message: Mapping[str, Any]) -> Any:
        with suppress(ConnectionError, RuntimeError):  # a closed connection has queued its end, or an error before it
            await self._socket.send_json(message)
        reply = await self._replies.get()
        if reply is None:
            self._replies.put_nowait(None)
            raise SessionLost(f"{message['type']} failed: the server closed the connection")
        return reply

    async def _close(self) -> None:
        try:
            with suppress(ConnectionError, RuntimeError):
                await self._socket.send_json({"type": "close"})
            await self._socket.close()
        finally:
            self._reading.cancel()
            await self._http.close()
