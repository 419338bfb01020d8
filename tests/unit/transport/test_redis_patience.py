"""How long streams wait for their Redis, and who waits with them."""

import math
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline import transport
from pipeline.errors import StreamError
from pipeline.run.events import EventPoller, Events
from pipeline.transport import connect, redis_streams
from pipeline.transport.ending_patience import PATIENCE_FRACTION, ShutdownPatience
from pipeline.utils.subprocesses import hold_port
from pipeline.utils.waiting import Deadline
from tests.fakes.clock import FakeClock
from tests.support.servers.redis_attempts import redis_context


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(redis_streams, "CLOCK", fake)
    monkeypatch.setattr(redis_streams, "Deadline", partial(Deadline, clock=fake))
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


def test_an_attempt_that_ends_leaves_most_of_its_grace_to_the_commit(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "ShutdownPatience", partial(ShutdownPatience, clock=clock, wall_clock=lambda: 0.0))
    with hold_port() as holder:
        context = redis_context(tmp_path, "7-0", holder.getsockname()[1])
        Events(context.paths).publish("draining", "agent.0", "SIGTERM")
        with pytest.raises(StreamError, match="ConnectionError"):
            connect(context)
    assert clock.time == pytest.approx(PATIENCE_FRACTION * context.config.cluster.grace_seconds)


@pytest.mark.parametrize(("told_before", "left"), [(0.0, 6.0), (4.0, 2.0), (-3600.0, 6.0), (60.0, 0.0)])
def test_the_time_that_is_left_counts_from_the_word_to_end_whatever_clock_dates_it(
    tmp_path: Path, told_before: float, left: float
) -> None:
    """A process that was busy notices it late; an agent's clock may be ahead."""
    clock, events = FakeClock(100.0), Events(redis_context(tmp_path, "7-0", 1).paths)
    ending = ShutdownPatience(EventPoller(events, 1, clock), 24.0, clock, lambda: time.time() + told_before)
    assert ending.time_left() == math.inf
    events.publish("draining", "agent.0", "SIGTERM")
    clock.sleep(2.0)
    assert ending.time_left() == pytest.approx(left, abs=1.0)
    clock.sleep(3.0)
    assert ending.time_left() <= 3.0
    events.publish("failed", "agent.0")
    clock.sleep(2.0)
    assert ending.time_left() == 0.0


class AwayOnce:
    """A client whose first post is lost; what it has then is in `values`."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._away = iter([True])

    def client(self, **_: object) -> SimpleNamespace:
        return SimpleNamespace(ping=lambda: True, register_script=lambda text: None, hset=self._hset)

    def _hset(self, _: str, key: str, value: bytes) -> None:
        if next(self._away, False):
            raise redis_streams.Disconnected("away")
        self.values[key] = value


@pytest.mark.parametrize(("key", "left"), [("b", {"a": b"1", "b": b"2"}), ("a", {"a": b"2"})])
def test_others_post_while_one_waits_for_its_next_try_and_the_last_value_stays(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, key: str, left: dict[str, bytes]
) -> None:
    away = AwayOnce()
    monkeypatch.setattr(redis_streams.redis, "Redis", away.client)
    backend = redis_streams.RedisStreams("127.0.0.1", 1, "s", budget=1, attempt="7-0")
    other = threading.Thread(target=backend.put, args=(key, b"2"), daemon=True)
    posted = []

    def meanwhile(seconds: float) -> None:
        other.start()
        other.join(10)
        posted.append(dict(away.values))

    monkeypatch.setattr(clock, "sleep", meanwhile)
    backend.put("a", b"1")
    other.join(10)
    assert posted == [{key: b"2"}]
    assert away.values == left
