"""What the tests of the SDK do with the connections that it leaves open."""

import asyncio
import gc
import socket
import threading
import time
import warnings
from collections.abc import Iterator

import pytest

from tests.integration.tinker_client import forget_clients
from tests.patience import WAIT_SECONDS


class Kept(asyncio.Protocol):
    """As in anyio: a connection outlives its peer until somebody closes it, and nobody does."""

    def eof_received(self) -> bool:
        return True


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own."""
    started = asyncio.new_event_loop()
    thread = threading.Thread(target=started.run_forever)
    thread.start()
    yield started
    started.call_soon_threadsafe(started.stop)
    thread.join(WAIT_SECONDS)
    started.close()


def test_a_connection_whose_end_was_not_seen_yet_is_closed_without_a_warning(loop: asyncio.AbstractEventLoop) -> None:
    async def connect(port: int) -> None:
        await loop.create_connection(Kept, "127.0.0.1", port)

    with socket.create_server(("127.0.0.1", 0)) as server:
        asyncio.run_coroutine_threadsafe(connect(server.getsockname()[1]), loop).result(WAIT_SECONDS)
        peer, _ = server.accept()
        loop.call_soon_threadsafe(time.sleep, 0.3)  # it is busy while the server ends
        peer.close()
    forget_clients()
    with warnings.catch_warnings(record=True) as later:
        warnings.simplefilter("always")
        time.sleep(0.5)
        gc.collect()
    assert [str(each.message) for each in later if "unclosed" in str(each.message)] == []
