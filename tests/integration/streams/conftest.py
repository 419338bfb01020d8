"""An attempt with streams, on each backend."""

import shutil
from collections.abc import Iterator

import pytest

from pipeline.roles.role_context import RoleContext
from pipeline.transport import Streams, connect
from tests.support.servers.redis_attempts import an_attempt, raw_client
from tests.support.servers.redis_binaries import redis_servers
from tests.support.streams import BUDGET, Open


@pytest.fixture(scope="module", params=[*redis_servers(), "files"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleContext]:
    """An attempt with a real Redis, shared by the tests of this module, or with files."""
    with an_attempt(tmp_path_factory.mktemp("run"), request.param, BUDGET) as context:
        yield context


@pytest.fixture
def context(place: RoleContext) -> RoleContext:
    """An attempt with empty streams, budget 64 KiB a topic."""
    if place.config.streams.backend == "files":
        shutil.rmtree(place.run.streams, ignore_errors=True)
        return place
    with raw_client(place) as client:
        client.flushall()
    return place


@pytest.fixture
def another(context: RoleContext) -> Iterator[Open]:
    """Opens the attempt's streams as another process would; closed after the test."""
    opened: list[Streams] = []

    def open_them() -> Streams:
        opened.append(connect(context))
        return opened[-1]

    yield open_them
    for streams in opened:
        streams.close()


@pytest.fixture
def streams(another: Open) -> Streams:
    return another()
