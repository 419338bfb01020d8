"""The parent's side of the process that runs environments of verifiers.

Owns the start of the process with another interpreter, the deadline of the start, and the end. Promises that a process
whose event loop is blocked by an environment is ended with all its child processes, and that its other episodes end
with `ProcessLost`, so that they can be run again in another process. Must not know tasks or policies.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from pipeline.errors import DeadlineError, TaskError
from pipeline.utils.subprocesses import describe_exit, start_connected
from pipeline.utils.waiting import run_within

BRIDGE = Path(__file__).with_name("verifiers_bridge.py")
STALL_SECONDS = 60.0
"""A process is ended after this time without a heartbeat from the event loop that all its episodes share."""
MAX_LINE = 1 << 26


class ProcessLost(Exception):
    """The process ended while an episode ran in it; the message has the reason."""


class EnvironmentMissing(TaskError):
    """The environment cannot be loaded. `key` is the option to blame."""

    def __init__(self, why: str, key: str) -> None:
        super().__init__(why)
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.key)


class EnvironmentProcess:
    """One process, used by one event loop."""

    def __init__(self, python: str, setup: Mapping[str, Any]) -> None:
        """Start the process; it is usable after `ready`."""
        self._setup, self._numbers = setup, count()
        self._open: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._ended = ""
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # as in roles, independent of the working directory
        self._process, self._socket = start_connected((python, str(BRIDGE)), environment, sys.stderr.fileno())

    @property
    def ended(self) -> bool:
        """Whether the process can run no more episodes."""
        return bool(self._ended)

    @property
    def load(self) -> int:
        """Number of running episodes."""
        return len(self._open)

    async def ready(self, seconds: float) -> dict[str, int]:
        """Wait for the number of tasks in each part; `EnvironmentMissing` if the environment cannot be loaded,
        `DeadlineError` after `seconds`."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=MAX_LINE)
        self._send(self._setup)
        try:
            line = await run_within("the environment to be loaded", self._reader.readline(), seconds)
        except DeadlineError:
            await self.end("it was not loaded in time")
            raise
        except OSError:
            line = b""  # the process exited before it read the setup
        if not line:
            await self.end()
            raise EnvironmentMissing(f"{self._ended} while the environment was loaded", "python")
        message = json.loads(line)
        if "wrong" in message:
            await self.end("refused")
            raise EnvironmentMissing(message["wrong"], message.get("key", "id"))
        self._reading = asyncio.create_task(self._read())
        return dict(message["counts"])

    async def episode(self, **request: Any) -> Mapping[str, Any]:
        """The report of an episode; `ProcessLost` when the process ended. Cancelling this cancels the episode."""
        if self._ended:
            raise ProcessLost(self._ended)
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        self._send({"id": number, **request})
        try:
            report: Mapping[str, Any] = await answer
            return report
        except asyncio.CancelledError:
            if not self._ended:
                self._send({"id": number, "cancel": True})
            raise
        finally:
            self._open.pop(number, None)

    async def end(self, why: str = "") -> None:
        """End the process with all its child processes. Waiting episodes fail with `why`, or with its exit status."""
        if self._ended:
            return
        self._ended = why or "its process ended"
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()
        code = await asyncio.to_thread(self._process.kill_all)
        self._ended = why or f"its process {describe_exit(code)}"
        self._writer.close()
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(ProcessLost(self._ended))

    def _send(self, value: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(value).encode() + b"\n")

    async def _read(self) -> None:
        """Pass on responses until the process ends, or its heartbeat stops."""
        why = ""
        try:
            while True:
                async with asyncio.timeout(STALL_SECONDS):
                    line = await self._reader.readline()
                if not line:
                    break
                message = json.loads(line)
                answer = self._open.get(message.get("id"))
                if answer is not None and not answer.done():
                    answer.set_result(message)
        except TimeoutError:
            why = f"its process stood still for more than {STALL_SECONDS:g} s, in a call that blocks it"
        except (OSError, ValueError) as error:
            why = f"its process cannot be read: {error}"
        await self.end(why)
