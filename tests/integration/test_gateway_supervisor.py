"""The gateway under its keeper: killed, stopped, and not able to start."""

import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from pipeline.errors import ConfigError
from pipeline.tinker.gateway_settings import Address, Settings, settings_of
from pipeline.utils import shared_files
from pipeline.utils.waiting import wait_for
from slurm.submission import gateway_supervisor
from slurm.submission.gateway_supervisor import GatewaySupervisor
from tests.patience import WAIT_SECONDS
from tests.support.models.jobs import config_of
from tests.support.strangers import as_stranger, needs_another_user

pytestmark = pytest.mark.integration


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    config = config_of(tmp_path)
    serve = config.serve.model_copy(update={"enabled": True, "port": 0})
    return settings_of(config.model_copy(update={"serve": serve}), tmp_path / "api")


@pytest.fixture
def keeper(settings: Settings, tmp_path: Path) -> Iterator[GatewaySupervisor]:
    made = GatewaySupervisor(settings, tmp_path / "gateway.log", unresponsive_seconds=5.0)
    yield made
    made.stop()


def test_a_gateway_that_was_killed_or_answers_nothing_is_replaced_at_its_address(
    keeper: GatewaySupervisor, settings: Settings
) -> None:
    first = keeper.start()
    earlier = first
    for number in (signal.SIGKILL, signal.SIGSTOP):
        gone = earlier.pid
        os.kill(gone, number)

        def another(gone: int = gone) -> Address | None:
            found = shared_files.read_document(settings.address, Address)
            return (
                found
                if found is not None and found.pid != gone and gateway_supervisor._answers(found.url, 5.0)
                else None
            )

        earlier = wait_for("another gateway", another, WAIT_SECONDS)
        assert (earlier.url, earlier.secret) == (first.url, first.secret)
    keeper.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(earlier.pid, 0)


SQUAT = """
import socket, sys
server = socket.socket()
for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
    server.setsockopt(socket.SOL_SOCKET, option, 1)
try:
    server.bind((sys.argv[1], int(sys.argv[2])))
    server.listen()
except OSError as error:
    print(error.strerror)
"""


@needs_another_user
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_nobody_else_can_listen_at_the_address_while_the_gateway_is_away(
    host: str, keeper: GatewaySupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_supervisor, "_FIRST_PAUSE", WAIT_SECONDS)  # until the next one starts
    address = keeper.start()
    port = int(address.url.rpartition(":")[2])
    os.kill(address.pid, signal.SIGKILL)
    wait_for("the gateway to be away", lambda: not gateway_supervisor._answers(address.url, 1.0), WAIT_SECONDS)
    assert as_stranger(SQUAT, host, port).stdout == "Address already in use\n"
    keeper.stop()
    assert as_stranger(SQUAT, host, port).stdout == ""


def test_a_port_that_another_process_has_is_refused_by_its_name(settings: Settings, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        keeper = GatewaySupervisor(msgspec.structs.replace(settings, port=port), tmp_path / "gateway.log")
        with pytest.raises(ConfigError, match=rf"serve.port='127.0.0.1:{port}': .*in use.*pid {os.getpid()}"):
            keeper.start()
        keeper.stop()


def test_a_chosen_port_is_had_again_at_once_although_connections_linger(settings: Settings, tmp_path: Path) -> None:
    first = GatewaySupervisor(settings, tmp_path / "gateway.log")
    port = int(first.start().url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)):
        first.stop()  # its end of the connection is closed first, so it lingers
        second = GatewaySupervisor(msgspec.structs.replace(settings, port=port), tmp_path / "gateway.log")
        assert second.start().url.endswith(f":{port}")
        second.stop()


def test_idle_connections_of_strangers_make_no_gateway_deaf(keeper: GatewaySupervisor) -> None:
    """More of them than the open files that systemd and sshd give a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))  # the gateway inherits it
    address = keeper.start()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    host, _, port = address.url.removeprefix("http://").partition(":")
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            opened.enter_context(socket.create_connection((host, int(port)), timeout=WAIT_SECONDS))
        for _ in range(3):
            assert gateway_supervisor._answers(address.url, 30.0)


def test_a_gateway_that_cannot_start_is_one_line(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("no key\n")
    wrong = msgspec.structs.replace(settings, keys=str(tmp_path / "keys"))
    keeper = GatewaySupervisor(wrong, tmp_path / "gateway.log")
    with pytest.raises(ConfigError, match=r"serve.keys='.*line 1': expected <sha256 of the key>"):
        keeper.start()
    keeper.stop()
