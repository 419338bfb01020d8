"""Commands that these benchmarks start: each has a deadline, and of one that has to be ended no process is left. One
that ends by itself is trusted to have ended what it started."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

import psutil

OUT_OF_TIME = 124
"""The exit code of `timeout`."""
END_SECONDS = 20.0


@contextmanager
def started(
    command: Sequence[str],
    output: IO[Any] | None = None,
    environment: Mapping[str, str] = os.environ,
    end_seconds: float = END_SECONDS,
) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs within the block, and is told to end (INT) after it; then it has `end_seconds`."""
    process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        yield process
    finally:
        end(process, end_seconds)


def wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code of a process, None if it still runs then."""
    try:
        return process.wait(max(seconds, 0))
    except subprocess.TimeoutExpired:
        return None


def end(process: subprocess.Popen[bytes], seconds: float = END_SECONDS) -> int:
    """Tell a process to end; after `seconds` kill it and all that it started. Its exit code."""
    if process.poll() is None:
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        if wait(process, seconds) is None:
            below += psutil.Process(process.pid).children(recursive=True)
            process.kill()
        for child in below:
            with suppress(psutil.Error):
                child.kill()
    return process.wait()


def call(
    command: Sequence[str],
    seconds: float,
    output: IO[Any] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> int:
    """The exit code of a command, or `OUT_OF_TIME`."""
    with started(command, output, environment) as process:
        code = wait(process, seconds)
    return OUT_OF_TIME if code is None else code


def torchrun(ranks: int, module: str, *arguments: str) -> list[str]:
    """A module in a world of its own on this node."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*command, "-m", module, *arguments]
