"""A process that makes the calls of a task, one after the other.

Owns what happens in it: how it loads the task, the frames it reads and writes, and what keeps it in bounds. Promises
one reply for each item of a call, in order; that a copy of it which a task forked never replies; that its memory is
bounded; and that the kernel, short of memory, ends it before anybody else. The pool ends it
(`pipeline.environments.worker_pool`). Imports neither torch nor transformers, unless the task does.

Frames, both ways: 4 bytes of length, little-endian, then a pickle. First a `Setup` comes and None goes back, or the
reason why there is no task; then each `Call` is answered by one reply for each of its items.
"""

import os
import pickle
import resource
import socket
import sys
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import RewardConfig, TaskConfig
from pipeline.environments import check_sandbox, load_task, sandbox
from pipeline.environments.chat_template import ChatTemplate
from pipeline.environments.guarded_call import call_guarded, failure_reason
from pipeline.environments.rewards import load_rewards
from pipeline.environments.task_calls import InProcessCalls
from pipeline.errors import RollcallError
from pipeline.utils.subprocesses import adopt_orphans

LENGTH_BYTES = 4


@dataclass(frozen=True)
class Setup:
    """What a worker is made from: the task, the run's seed, the directory of the model whose template it uses, and what
    rewards are made of."""

    task: TaskConfig
    seed: int
    model: Path
    reward: RewardConfig = field(default_factory=RewardConfig)


@dataclass(frozen=True)
class Call:
    """`method` of `InProcessCalls`, called with `shared` and each of `items`."""

    method: str
    shared: tuple[Any, ...]
    items: tuple[Any, ...]


def frame(message: object) -> bytes:
    """A message as it travels."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class Channel:
    """The worker's end of the connection, in the place of its standard input, of which there is none."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=os.dup(0))
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        self._reader = self._socket.makefile("rb")

    def receive(self) -> Any:
        """The next message; `EOFError` when the pool is gone."""
        length = self._reader.read(LENGTH_BYTES)
        if len(length) < LENGTH_BYTES:
            raise EOFError
        return pickle.loads(self._reader.read(int.from_bytes(length, "little")))

    def reply(self, value: object) -> None:
        """Send a value; one that cannot travel is told as such."""
        try:
            data = frame(value)
        except Exception as error:  # noqa: BLE001 what a task puts into its prompts is its own
            data = frame(failure_reason("prompt cannot be pickled", error))
        self._socket.sendall(data)


def serve(channel: Channel, calls: InProcessCalls) -> None:
    """Answer calls until the pool is gone."""
    me = os.getpid()
    while True:
        call: Call = channel.receive()
        replies, left = calls.replies(call.method, call.shared, call.items), len(call.items)
        while left:
            value = call_guarded("task raised", lambda: (next(replies),))  # noqa: B023
            if os.getpid() != me:
                os._exit(0)  # the task forked, and its copy came back here
            # After what could not be held there are no more: it is the reason of all that are left.
            for each in value if isinstance(value, tuple) else [value] * left:
                channel.reply(each)
                left -= 1


def _bound_memory(limit: int) -> None:
    if limit:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    with suppress(OSError):  # where /proc is read-only the kernel chooses by size alone
        Path("/proc/self/oom_score_adj").write_text("1000")


def main() -> None:
    """The worker's process."""
    adopt_orphans()
    channel = Channel()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        setup: Setup = channel.receive()
        _bound_memory(setup.task.memory_bytes)
        try:
            sandbox.choose_mode(setup.task.sandbox)
            task = load_task(setup.task, setup.seed)
            check_sandbox(task, setup.task)
            functions = load_rewards(setup.reward, task)
            calls = InProcessCalls(task, ChatTemplate(setup.model), functions, setup.task.seconds)
        except RollcallError as error:
            channel.reply(str(error))
            sys.exit(error.exit_code)
        channel.reply(None)
        with closing(calls):
            serve(channel, calls)


if __name__ == "__main__":
    main()
