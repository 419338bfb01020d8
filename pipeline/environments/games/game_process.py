"""The process that opens games for processes which must not: the actor, the trainer and the launcher.

Owns the process, its calls and their deadline. A call names a method of the task, which runs in a copy of the task in
that process. Promises that a call that misses its deadline, and the end of the owner, end the process with all
processes that it started.

    with shared_games():             # one process for all tasks with the same options
        task.held_out(), other.demonstration(0)
"""

import os
import pickle
import socket
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.config import TaskConfig
from pipeline.environments import load_task
from pipeline.environments.worker_process import LENGTH_BYTES, Channel, frame
from pipeline.errors import DeadlineError, RollcallError, TaskError, one_line
from pipeline.utils.subprocesses import Leader, adopt_orphans, describe_exit, start_connected


class GameProcess:
    """A process with a copy of the task, used by one thread."""

    def __init__(self, task: TaskConfig, seed: int) -> None:
        argv = (sys.executable, "-P", "-m", "pipeline.environments.games.game_process")
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        self._process, self._socket = start_connected(argv, environment, sys.stderr.fileno())
        self.end = weakref.finalize(self, _end, self._process, self._socket)
        self._setup: bytes = frame((task, seed))

    def call(self, method: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        """The result of a method of the task. Raises what the method raises: a `RollcallError`, or else a `TaskError`
        with its text; `DeadlineError` after `seconds` without a reply."""
        setup, self._setup = self._setup, b""
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(setup + frame((method, arguments)))
            size = int.from_bytes(self._received(LENGTH_BYTES), "little")
            reply = pickle.loads(self._received(size))
        except TimeoutError:
            self.end()
            raise DeadlineError(f"{method} of the environment", seconds) from None
        except (EOFError, OSError):
            code = self._process.kill_all()
            self.end()
            raise TaskError(f"the environment's process {describe_exit(code)} during {method}") from None
        if isinstance(reply, RollcallError):
            raise reply
        return reply

    def _received(self, size: int) -> bytes:
        parts, missing = [], size
        while missing:
            part = self._socket.recv(min(missing, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


_shared: "dict[bytes, GameProcess] | None" = None


@contextmanager
def shared_games() -> Iterator[None]:
    """Give tasks with the same options and seed one process within the block, which ends with the block.

    The checks of a submission make such tasks again and again, and the imports of a process take seconds.
    """
    global _shared
    if _shared is not None:
        yield
        return
    _shared = {}
    try:
        yield
    finally:
        processes, _shared = _shared, None
        for process in processes.values():
            process.end()


def shared_process(task: TaskConfig, seed: int) -> GameProcess | None:
    """The process of all tasks with these options; None outside a block of `shared_games`."""
    if _shared is None:
        return None
    key = frame((task, seed))
    if key not in _shared or not _shared[key].end.alive:
        _shared[key] = GameProcess(task, seed)
    return _shared[key]


def _end(process: Leader, connection: socket.socket) -> None:
    process.kill_all()
    connection.close()


def _reply(task: Any, method: str, arguments: tuple[Any, ...]) -> Any:
    try:
        return getattr(task, method)(*arguments)
    except RollcallError as error:
        return error
    except Exception as error:  # noqa: BLE001 a library's error is the reason why there is no value
        return TaskError(one_line(error))


def main() -> None:
    """Answer calls until the owner closes the connection."""
    adopt_orphans()
    channel = Channel()
    try:
        config, seed = channel.receive()
        task: Any = None
        while True:
            method, arguments = channel.receive()
            try:
                task = task or load_task(config, seed)
            except RollcallError as error:
                channel.reply(error)
                continue
            channel.reply(_reply(task, method, arguments))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    main()
