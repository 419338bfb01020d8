"""How long streams wait for their Redis."""

from functools import partial
from pathlib import Path

import pytest

from pipeline.errors import StreamError
from pipeline.rundir.events import Events
from pipeline.streams import connect, redis
from pipeline.system.process import hold_port
from pipeline.system.waiting import Deadline
from tests.fakes.clock import FakeClock
from tests.integration.redis_attempts import redis_context


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(redis, "CLOCK", fake)
    monkeypatch.setattr(redis, "Deadline", partial(Deadline, clock=fake))
    return fake


def test_a_redis_that_starts_slowly_has_as_long_as_any_role(tmp_path: Path, clock: FakeClock) -> None:
    with hold_port() as holder:
        context = redis_context(tmp_path, "7-0", holder.getsockname()[1])
        with pytest.raises(StreamError, match="ConnectionError"):
            connect(context)
    assert clock.time >= context.config.cluster.startup_seconds


def test_nobody_waits_for_a_lost_redis_once_the_attempt_has_failed(tmp_path: Path, clock: FakeClock) -> None:
    with hold_port() as holder:
        context = redis_context(tmp_path, "7-0", holder.getsockname()[1])
        Events(context.paths).publish("failed", "redis.0")
        with pytest.raises(StreamError, match="ConnectionError"):
            connect(context)
    assert clock.time == 0
