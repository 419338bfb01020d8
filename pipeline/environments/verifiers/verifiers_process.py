"""The process that environments of verifiers run in, as its parent sees it.

Owns its start with another interpreter, the deadline of the start, and its end. Promises that a process whose loop is
blocked by an environment is ended with all that it started, and that the other episodes in it end with `ProcessLost`,
so that they can be run again elsewhere. Must not know tasks or policies.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from pipeline.errors import DeadlineError, TaskError
from pipeline.utils.subprocesses import Leader, describe_exit
from pipeline.utils.waiting import run_within

BRIDGE = Path(__file__).with_name("bridge.py")
STALL_SECONDS = 60.0
"""Without a sign of life from the loop that all episodes of a process share, it is ended."""
MAX_LINE = 1 << 26


class ProcessLost(Exception):
    """The process ended while an episode ran in it; the message says how."""


class EnvironmentMissing(TaskError):
    """The environment cannot be had. `key` is the option that is to blame."""

    def __init__(self, why: str, key: str) -> None:
        super().__init__(why)
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.key)


class EnvironmentProcess:
    """One process; lives in one event loop."""

    def __init__(self, python: str, setup: Mapping[str, Any]) -> None:
        """Start it; it is of use once it is `ready`."""
        ours, its = socket.socketpair()
        self._setup, self._numbers = setup, count()
        self._open: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._ended = ""
        try:
            argv = (python, str(BRIDGE))
            environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # as roles have it, wherever it is started
            self._process = Leader(argv, environment, stdin=its.fileno(), output=sys.stderr.fileno())
        except OSError:
            ours.close()
            raise
        finally:
            its.close()
        self._socket = ours

    @property
    def ended(self) -> bool:
        """Whether it can run nothing any more."""
        return bool(self._ended)

    @property
    def load(self) -> int:
        """Episodes in it."""
        return len(self._open)

    async def ready(self, seconds: float) -> dict[str, int]:
        """How many tasks it has in each part; `EnvironmentMissing` when it has none, `DeadlineError` after
        `seconds`."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=MAX_LINE)
        self._send(self._setup)
        try:
            line = await run_within("the environment to be loaded", self._reader.readline(), seconds)
        except DeadlineError:
            await self.end("it was not loaded in time")
            raise
        except OSError:
            line = b""  # it ended before it read what was sent
        if not line:
            await self.end()
            raise EnvironmentMissing(f"{self._ended} while the environment was loaded", "python")
        told = json.loads(line)
        if "wrong" in told:
            await self.end("refused")
            raise EnvironmentMissing(told["wrong"], told.get("key", "id"))
        self._reading = asyncio.create_task(self._read())
        return dict(told["counts"])

    async def episode(self, **asked: Any) -> Mapping[str, Any]:
        """What came of an episode; `ProcessLost` when the process ended. Cancelling this ends the episode there."""
        if self._ended:
            raise ProcessLost(self._ended)
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        self._send({"id": number, **asked})
        try:
            ended: Mapping[str, Any] = await answer
            return ended
        except asyncio.CancelledError:
            if not self._ended:
                self._send({"id": number, "cancel": True})
            raise
        finally:
            self._open.pop(number, None)

    async def end(self, why: str = "") -> None:
        """End it with all that it started; whoever waits for an episode is told `why`, or how it ended by itself."""
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
        """Pass answers on until the process ends, or shows no sign of life."""
        why = ""
        try:
            while True:
                async with asyncio.timeout(STALL_SECONDS):
                    line = await self._reader.readline()
                if not line:
                    break
                told = json.loads(line)
                answer = self._open.get(told.get("id"))
                if answer is not None and not answer.done():
                    answer.set_result(told)
        except TimeoutError:
            why = f"its process stood still for more than {STALL_SECONDS:g} s, in a call that blocks it"
        except (OSError, ValueError) as error:
            why = f"its process cannot be heard: {error}"
        await self.end(why)
