"""How long streams wait for their Redis, and who waits with them."""

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.errors import StreamError
from pipeline.rundir.events import Events
from pipeline.streams import connect, redis
from pipeline.system.process import hold_port
from pipeline.system.waiting import Deadline
from tests.fakes.clock import FakeClock
from tests.support.servers.redis_attempts import redis_context


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


class AwayOnce:
    """A client whose first post is lost; what it has then is in `values`."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._away = iter([True])

    def client(self, **_: object) -> SimpleNamespace:
        return SimpleNamespace(ping=lambda: True, register_script=lambda text: None, hset=self._hset)

    def _hset(self, _: str, key: str, value: bytes) -> None:
        if next(self._away, False):
            raise redis.Disconnected("away")
        self.values[key] = value


@pytest.mark.parametrize(("key", "left"), [("b", {"a": b"1", "b": b"2"}), ("a", {"a": b"2"})])
def test_others_post_while_one_waits_for_its_next_try_and_the_last_value_stays(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, key: str, left: dict[str, bytes]
) -> None:
    away = AwayOnce()
    monkeypatch.setattr(redis.redis, "Redis", away.client)
    streams = redis.RedisStreams("127.0.0.1", 1, "s", budget=1, attempt="7-0")
    other = threading.Thread(target=streams.put, args=(key, b"2"), daemon=True)
    posted = []

    def meanwhile(seconds: float) -> None:
        other.start()
        other.join(10)
        posted.append(dict(away.values))

    monkeypatch.setattr(clock, "sleep", meanwhile)
    streams.put("a", b"1")
    other.join(10)
    assert posted == [{key: b"2"}]
    assert away.values == left
