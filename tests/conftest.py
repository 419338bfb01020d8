"""Settings of all tests, and the order in which they run."""

import gc
import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import forks
from tests.support.servers.redis_binaries import redis_servers

os.environ["OMP_NUM_THREADS"] = "1"
"""Before torch is loaded, here and in what tests start. The models are too small to share among threads, and threads
that wait for each other spin: beside other files of tests that took six times the CPU time."""

WRITES_NO_BYTECODE = sys.dont_write_bytecode
sys.dont_write_bytecode = False
"""Where PYTHONDONTWRITEBYTECODE is set, each worker would compile all tests, and each process that a test starts all of
the project, which is a third of the CPU time of collecting. Only until all test files are imported: tests that change a
module within a second of its first import would get its old bytecode."""

gc.disable()
"""Until all test files are imported, a fifth of whose CPU time it takes; see `pytest_collection_finish`."""

settings.register_profile("rollcall", deadline=None)
settings.load_profile("rollcall")

TIMES = Path(__file__).with_name("times.json")
"""Seconds of each file of tests in some run; `tests.times` writes it. Only the order of the files depends on it."""

TOLD_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the code under test handles or ignores for the rest of its process's life."""


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """What a test leaves ignored or blocked, the processes that later tests start would not hear."""
    handlers = {number: signal.getsignal(number) for number in TOLD_BY}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def pytest_configure(config: pytest.Config) -> None:
    """Start the fork server of the session, in the process that reports; its workers inherit the address."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        server = forks.start_server()
        config.add_cleanup(server.close)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say with which Redis servers the tests of the streams ran."""
    there = ", ".join(f"{name} ({path})" for name, path in redis_servers().items())
    terminalreporter.write_line(f"redis servers: {there or 'none'}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, and with those whose time is not known yet."""
    seconds = json.loads(TIMES.read_text())
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], math.inf))


def pytest_collection_finish() -> None:
    """What was imported is never garbage. The code under test collects garbage, which takes a second among so much."""
    sys.dont_write_bytecode = WRITES_NO_BYTECODE
    gc.freeze()
    gc.enable()
