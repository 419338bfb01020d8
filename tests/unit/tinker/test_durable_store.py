"""The gateway's file."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from pipeline.errors import RunStateError
from pipeline.tinker import durable_store
from pipeline.tinker.api_errors import OverLimitError
from pipeline.tinker.durable_store import Store
from tests.patience import WAIT_SECONDS


def test_what_was_kept_is_there_for_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    first = Store(path)

    async def keep() -> None:
        await first.keep(durable_store.fact("session", "s", b"1"), durable_store.request("m:1", "m", 1, b"body"))
        await first.keep(durable_store.fact("session", "s", b"2"), durable_store.result("m:1", b"result"))
        await first.keep(durable_store.result("m:1", b"another"))
        await asyncio.gather(*(first.keep(durable_store.request(f"m:{n}", "m", n, b"b")) for n in range(2, 50)))
        await first.keep(durable_store.cursor_passed("m", 40))

    asyncio.run(keep())
    first.close()
    second = Store(path)
    assert list(second.facts("session")) == [("s", b"2")]
    kept = {each.id: each for each in second.requests()}
    assert len(kept) == 49
    assert kept["m:1"].result == b"result", "what a client may have seen never changes"
    assert second.body("m:1") is None
    assert second.body("m:2") == b"b", "a request without a result is never dropped"
    second.close()


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    first = Store(path)
    with pytest.raises(RunStateError, match="nobody else has"):
        Store(path)
    first.close()
    Store(path).close()


def test_changes_that_fail_are_not_made_and_harm_no_others(tmp_path: Path) -> None:
    opened = Store(tmp_path / "store.sqlite")

    async def keep() -> list[object]:
        bad = opened.keep(durable_store.fact("session", "bad", b""), ("INSERT INTO nowhere VALUES (1)", ()))
        return await asyncio.gather(
            opened.keep(durable_store.fact("session", "good", b"")), bad, return_exceptions=True
        )

    good, bad = asyncio.run(keep())
    assert good is None
    assert isinstance(bad, OverLimitError)
    assert [key for key, _ in opened.facts("session")] == ["good"]
    opened.close()


def test_a_value_that_sqlite_cannot_take_fails_its_caller_alone(tmp_path: Path) -> None:
    opened = Store(tmp_path / "store.sqlite")

    async def keep() -> list[object]:
        wrong = [opened.keep(durable_store.fact("session", key, b"")) for key in ("\ud800", 1 << 70)]  # type: ignore[arg-type]
        good = opened.keep(durable_store.fact("session", "good", b""))
        together = await asyncio.wait_for(asyncio.gather(*wrong, good, return_exceptions=True), WAIT_SECONDS)
        await asyncio.wait_for(opened.keep(durable_store.fact("session", "later", b"")), WAIT_SECONDS)
        return list(together)

    surrogate, large, good = asyncio.run(keep())
    assert isinstance(surrogate, UnicodeEncodeError)
    assert isinstance(large, OverflowError)
    assert good is None
    assert [key for key, _ in opened.facts("session")] == ["good", "later"]
    opened.close()


def test_a_caller_whose_loop_has_ended_stops_no_other(tmp_path: Path) -> None:
    opened = Store(tmp_path / "store.sqlite")

    gone = asyncio.new_event_loop()
    answer = gone.create_future()
    gone.close()
    opened._waiting.put(((durable_store.fact("session", "first", b""),), answer))

    async def keep() -> None:
        await asyncio.wait_for(opened.keep(durable_store.fact("session", "later", b"")), WAIT_SECONDS)

    asyncio.run(keep())
    assert [key for key, _ in opened.facts("session")] == ["first", "later"]
    opened.close()


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as link:
        link.execute("PRAGMA user_version = 99")
    link.close()
    with pytest.raises(RunStateError, match="version 99"):
        Store(path)
