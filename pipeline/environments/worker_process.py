"""A child process that answers calls of the actor over a pair of sockets.

Owns the parent's side of one process: its start, the frames of its messages, its output, and its end with every process
that it started. Must not know the meaning of a call, nor deadlines and queues (`pipeline.environments.worker_pool`,
`pipeline.environments.reward_model_queue`).

Frames, both ways: 4 bytes of length, little-endian, then a pickle. The parent first sends a setup and receives None, or
the reason why it cannot be used.
"""

import asyncio
import os
import pickle
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.environments.guarded_call import call_guarded, failure_reason
from pipeline.errors import DeadlineError, TaskError
from pipeline.utils.subprocesses import describe_exit, start_connected
from pipeline.utils.waiting import run_within, wait_for

LENGTH_BYTES = 4
END_SECONDS = 2.0
PRINT_BYTES = 1 << 14


def frame(message: object) -> bytes:
    """A message as bytes with its length."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class WorkerProcess:
    """One process. `broken` once it can take no more calls."""

    def __init__(self, module: str, title: str, variables: Mapping[str, str]) -> None:
        """Start `python -m module` with additional environment `variables`; it is usable after `ready`. Errors call it
        `title`."""
        self.broken = False
        self._title = title
        self._ending: asyncio.Task[None] | None = None
        printed, output = os.pipe()
        os.set_blocking(printed, False)
        self._printed: int | None = printed
        argv = (sys.executable, "-P", "-m", module)
        try:
            self._process, self._socket = start_connected(argv, {**os.environ, **variables}, output)
        except OSError:
            os.close(printed)
            raise
        finally:
            os.close(output)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    async def ready(self, setup: object, seconds: float) -> None:
        """Send the setup and await the process; `TaskError` when it refuses or ends, `DeadlineError` after
        `seconds`."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        self._writer.write(frame(setup))
        try:
            wrong = await run_within(f"{self._title} to load it", self._reply(), seconds)
        except (EOFError, OSError):
            raise TaskError(f"{self._title} {await self._end_of_process()} while it loaded it") from None
        if wrong is not None:
            raise TaskError(f"{self._title} cannot load it: {wrong}")

    def pass_on_print(self) -> None:
        """Write up to `PRINT_BYTES` of its output since the last call to this process's log; nothing after its end."""
        if self._printed is None:
            return
        with suppress(BlockingIOError):
            sys.stderr.write(os.read(self._printed, PRINT_BYTES).decode(errors="replace"))

    async def ended(self) -> None:
        """End the process once, and completely even if the caller is cancelled."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        # With all processes that it started, also those in other sessions: they are its descendants.
        await asyncio.to_thread(self._process.kill_all)
        self.pass_on_print()
        if hasattr(self, "_writer"):
            self._writer.close()
        self._socket.close()
        if self._printed is not None:
            os.close(self._printed)
            self._printed = None  # another file may get its number

    async def _reply(self) -> Any:
        length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
        body = await self._reader.readexactly(length)
        return call_guarded("prompt cannot be pickled", lambda: pickle.loads(body))

    async def _end_of_process(self) -> str:
        """A description of its end, which may be only a closed connection."""
        try:
            code = await asyncio.to_thread(wait_for, "its end", self._process.poll, END_SECONDS)
        except DeadlineError:
            return "closed its connection"
        return describe_exit(code)


class Channel:
    """The process's end of the connection, inherited as standard input, which then becomes empty."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=os.dup(0))
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        self._reader = self._socket.makefile("rb")

    def receive(self) -> Any:
        """The next message; `EOFError` when the parent has closed the connection."""
        length = self._reader.read(LENGTH_BYTES)
        if len(length) < LENGTH_BYTES:
            raise EOFError
        return pickle.loads(self._reader.read(int.from_bytes(length, "little")))

    def reply(self, value: object) -> None:
        """Send a value; for a value that cannot be pickled, send the reason."""
        try:
            data = frame(value)
        except Exception as error:  # noqa: BLE001 a task may put any object into its prompts
            data = frame(failure_reason("prompt cannot be pickled", error))
        self._socket.sendall(data)
