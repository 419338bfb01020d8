"""What the integration tests share."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import pytest

from tests.support.servers.redis_binaries import redis_servers, taken_first

if TYPE_CHECKING:
    from pipeline.config import RunConfig
    from pipeline.train.controller.rank_group import RankGroup
    from tests.support.runs.launched import Launches


@pytest.fixture(params=redis_servers())
def each_redis(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test runs once with every Redis server of this machine."""
    with taken_first(request.param):
        yield


@pytest.fixture
def launches(tmp_path: Path) -> "Iterator[Launches]":
    """Starts runs as a user does, below `runs/`; what is left of them ends with the test."""
    from tests.support.runs.launched import Launches

    with Launches(tmp_path / "runs") as started:
        yield started


@pytest.fixture(scope="module")
def dispatch() -> "Iterator[RankGroup]":
    """The dispatch of a world of this process alone; for tests of jobs, as the two after it."""
    from tests.support.models.jobs import world_of_one

    with world_of_one() as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with weights."""
    from tests.support.models.jobs import write_model

    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


@pytest.fixture(scope="module")
def config(model: Path) -> "RunConfig":
    """The config of jobs that start from `model`."""
    from tests.support.models.jobs import config_of

    return config_of(model)


@pytest.fixture(params=["disk", "object store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty place for checkpoints."""
    if request.param == "disk":
        yield str(tmp_path / "checkpoints")
        return
    memory = fsspec.filesystem("memory")
    yield "memory://bucket/checkpoints"
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


@pytest.fixture
def disk(tmp_path: Path) -> str:
    """An empty place for checkpoints, on the disk alone."""
    return str(tmp_path / "checkpoints")
