"""A process that makes the calls of a task, one after the other.

Owns the worker's side: loading the task, answering calls, and enforcing its limits. Promises one reply per
item of a call, in order; that a copy of the process which a task forked never replies; that its memory is bounded; and
that the kernel's OOM killer prefers it to other processes. The pool ends it (`pipeline.environments.worker_pool`).
Imports neither torch nor transformers, unless the task does.

The pool first sends a `Setup` and receives None, or the reason why the task could not be loaded. Each `Call` is then
answered by one reply per item (`pipeline.environments.worker_process` has the frames).
"""

import os
import resource
import sys
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import RewardConfig, TaskConfig
from pipeline.environments import check_sandbox, load_task, sandbox
from pipeline.environments.chat_template import ChatTemplate
from pipeline.environments.guarded_call import call_guarded
from pipeline.environments.rewards import load_rewards
from pipeline.environments.task_calls import InProcessCalls
from pipeline.environments.worker_process import Channel
from pipeline.errors import RollcallError
from pipeline.utils.subprocesses import adopt_orphans


@dataclass(frozen=True)
class Setup:
    """All inputs of a worker: the task, the run's seed, the directory of the model with the chat template, and the
    reward's configuration."""

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


def serve(channel: Channel, calls: InProcessCalls) -> None:
    """Answer calls until the pool closes the connection."""
    me = os.getpid()
    while True:
        call: Call = channel.receive()
        replies, left = calls.replies(call.method, call.shared, call.items), len(call.items)
        while left:
            value = call_guarded("task raised", lambda: (next(replies),))  # noqa: B023
            if os.getpid() != me:
                os._exit(0)  # the task forked, and the copy returned to this loop
            # A reason instead of a reply means that the generator is exhausted: it applies to all remaining items.
            for reply in value if isinstance(value, tuple) else [value] * left:
                channel.reply(reply)
                left -= 1


def _bound_memory(limit: int) -> None:
    if limit:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    with suppress(OSError):  # where /proc is read-only the OOM killer chooses by size alone
        Path("/proc/self/oom_score_adj").write_text("1000")


def main() -> None:
    """Run the worker until the pool closes the connection."""
    adopt_orphans()
    channel = Channel()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        setup: Setup = channel.receive()
        _bound_memory(setup.task.memory_bytes)
        try:
            sandbox.choose_sandbox(setup.task.sandbox)
            task = load_task(setup.task, setup.seed)
            check_sandbox(task, setup.task)
            functions = load_rewards(setup.reward, task)
            task.prepare_worker()
            calls = InProcessCalls(task, ChatTemplate(setup.model), functions, setup.task.seconds)
        except RollcallError as error:
            channel.reply(str(error))
            sys.exit(error.exit_code)
        channel.reply(None)
        with closing(calls):
            serve(channel, calls)


if __name__ == "__main__":
    main()
