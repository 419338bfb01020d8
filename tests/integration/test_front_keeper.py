"""The front under its keeper: killed, stopped, and not able to start."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline.api.settings import Address, Settings, settings_of
from pipeline.errors import ConfigError
from pipeline.system import files
from pipeline.system.waiting import wait_for
from slurm.launch import front
from slurm.launch.front import FrontKeeper
from tests.patience import WAIT_SECONDS
from tests.support.models.jobs import config_of

pytestmark = pytest.mark.integration


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    config = config_of(tmp_path)
    serve = config.serve.model_copy(update={"enabled": True, "port": 0})
    return settings_of(config.model_copy(update={"serve": serve}), tmp_path / "api")


@pytest.fixture
def keeper(settings: Settings, tmp_path: Path) -> Iterator[FrontKeeper]:
    made = FrontKeeper(settings, tmp_path / "front.log", deaf_seconds=5.0)
    yield made
    made.stop()


def test_a_front_that_was_killed_or_answers_nothing_is_replaced_at_its_address(
    keeper: FrontKeeper, settings: Settings
) -> None:
    first = keeper.start()
    earlier = first
    for number in (signal.SIGKILL, signal.SIGSTOP):
        gone = earlier.pid
        os.kill(gone, number)

        def another(gone: int = gone) -> Address | None:
            found = files.read_document(settings.address, Address)
            return found if found is not None and found.pid != gone and front._answers(found.url, 5.0) else None

        earlier = wait_for("another front", another, WAIT_SECONDS)
        assert (earlier.url, earlier.secret) == (first.url, first.secret)
    keeper.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(earlier.pid, 0)


def test_a_front_that_cannot_start_is_one_line(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("no key\n")
    wrong = msgspec.structs.replace(settings, keys=str(tmp_path / "keys"))
    keeper = FrontKeeper(wrong, tmp_path / "front.log")
    with pytest.raises(ConfigError, match=r"serve.keys='.*line 1': expected <sha256 of the key>"):
        keeper.start()
    keeper.stop()
