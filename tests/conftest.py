"""Settings of all tests, and the order in which they run."""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.servers.redis_binaries import redis_servers

os.environ["OMP_NUM_THREADS"] = "1"
"""Before torch is loaded, here and in what tests start. The models are too small to share among threads, and threads
that wait for each other spin: beside other files of tests that took six times the CPU time."""

settings.register_profile("rollcall", deadline=None)
settings.load_profile("rollcall")

LONGEST_FIRST = ("tests/cluster/", "tests/integration/", "tests/protocol/")


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say with which Redis servers the tests of the streams ran."""
    there = ", ".join(f"{name} ({path})" for name, path in redis_servers().items())
    terminalreporter.write_line(f"redis servers: {there or 'none'}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that wait longest."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    return next((place for place, folder in enumerate(LONGEST_FIRST) if folder in item.nodeid), len(LONGEST_FIRST))
