"""Which data the Redis of an attempt starts from, and what is done to data that it could not load."""

import os
from pathlib import Path

import pytest

from pipeline.errors import StreamError
from pipeline.transport.redis_persistence import ONE_FILE, SEVERAL_FILES, inherit, mark_served, needs_redis_7
from pipeline.transport.redis_repair import make_loadable


def test_a_copy_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    first, second = tmp_path / "7-0", tmp_path / "7-1"
    assert inherit(first).number == 1
    (first / ONE_FILE).write_bytes(b"whole")
    second.mkdir()
    (second / ONE_FILE).write_bytes(b"wh")
    assert inherit(second).origin == "7-0"
    assert (second / ONE_FILE).read_bytes() == b"whole"


def test_the_newest_data_is_the_latest_copy_whatever_names_and_times_say(tmp_path: Path) -> None:
    for order, name in enumerate(["99-0", "5-0", "100-0"]):
        folder = tmp_path / name
        assert inherit(folder).number == order + 1
        (folder / ONE_FILE).write_text(name)
    os.utime(tmp_path / "5-0" / ONE_FILE, (2e9, 2e9))
    assert inherit(tmp_path / "6-0").origin == "100-0"
    assert (tmp_path / "6-0" / ONE_FILE).read_text() == "100-0"


def test_an_attempt_that_starts_again_keeps_its_own_data(tmp_path: Path) -> None:
    inherit(tmp_path / "7-0")
    (tmp_path / "7-0" / ONE_FILE).write_text("mine")
    inherit(tmp_path / "7-1")
    assert inherit(tmp_path / "7-0").number == 1
    assert (tmp_path / "7-0" / ONE_FILE).read_text() == "mine"


def test_an_attempt_whose_redis_never_was_ready_starts_again_from_the_same_data(tmp_path: Path) -> None:
    inherit(tmp_path / "7-0")
    assert inherit(tmp_path / "7-0").number == 1
    (tmp_path / "7-0" / ONE_FILE).write_text("first")
    made = inherit(tmp_path / "7-1")
    (tmp_path / "7-1" / ONE_FILE).unlink()
    assert inherit(tmp_path / "7-1") == made
    assert (tmp_path / "7-1" / ONE_FILE).read_text() == "first"


def test_an_attempt_whose_own_data_is_gone_does_not_start_again_empty(tmp_path: Path) -> None:
    inherit(tmp_path / "7-0")
    mark_served(tmp_path / "7-0")
    (tmp_path / "7-0" / ONE_FILE).write_text("mine")
    (tmp_path / "7-0" / ONE_FILE).unlink()
    with pytest.raises(StreamError, match=r"the data of this attempt's Redis is gone from .*7-0"):
        inherit(tmp_path / "7-0")


@pytest.mark.parametrize("content", [b"", b"{torn"])
def test_an_attempt_that_starts_again_keeps_its_own_data_though_its_document_cannot_be_read(
    tmp_path: Path, content: bytes
) -> None:
    for name in ("7-0", "7-1"):
        inherit(tmp_path / name)
        (tmp_path / name / ONE_FILE).write_text(name)
        (tmp_path / name / "generation.json").write_bytes(content)
        inherit(tmp_path / name)
        assert (tmp_path / name / ONE_FILE).read_text() == name
    assert inherit(tmp_path / "7-1").number == 2


@pytest.mark.parametrize("unreadable", ["5-0", "3-0"])
def test_the_newest_data_is_found_though_a_document_cannot_be_read(tmp_path: Path, unreadable: str) -> None:
    for name in ("9-0", "5-0", "3-0"):
        inherit(tmp_path / name)
        (tmp_path / name / ONE_FILE).write_text(name)
    (tmp_path / unreadable / "generation.json").write_bytes(b"")
    made = inherit(tmp_path / "4-0")
    assert (made.origin, made.number) == ("3-0", 4)
    assert (tmp_path / "4-0" / ONE_FILE).read_text() == "3-0"


def test_only_the_data_of_the_last_two_attempts_is_kept(tmp_path: Path) -> None:
    for restart in range(5):
        inherit(tmp_path / f"7-{restart}")
        (tmp_path / f"7-{restart}" / ONE_FILE).write_text("data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7-3", "7-4"]


def test_an_earlier_attempt_that_starts_again_removes_nothing_of_a_later_one(tmp_path: Path) -> None:
    for name in ("7-0", "7-1"):
        inherit(tmp_path / name)
        (tmp_path / name / ONE_FILE).write_text(name)
    inherit(tmp_path / "7-0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7-0", "7-1"]


def test_a_check_that_does_not_end_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ONE_FILE).write_bytes(b"")
    slow = tmp_path / "redis-server"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    with pytest.raises(StreamError, match="redis-check-aof took more than 0 s"):
        make_loadable(slow, tmp_path, 0.1, 6)


def test_data_of_redis_7_is_recognised(tmp_path: Path) -> None:
    assert not needs_redis_7(tmp_path)
    (tmp_path / SEVERAL_FILES).mkdir()
    assert needs_redis_7(tmp_path)


def test_an_older_server_sets_the_data_of_redis_7_aside_and_finds_none(tmp_path: Path) -> None:
    (tmp_path / SEVERAL_FILES).mkdir()
    message = make_loadable(tmp_path / "redis-server", tmp_path, 1, 6)
    assert "redis-server is older than Redis 7" in message
    assert not needs_redis_7(tmp_path)
    assert (tmp_path / "newer-1" / SEVERAL_FILES).is_dir()
