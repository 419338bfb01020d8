"""Two processes leave their group: the server ends its part only once its trainer has said that it leaves."""

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync.transports.gloo import TRAINER, PreparedSignal, TransferGroup, create_store
from pipeline.utils.subprocesses import hold_port
from pipeline.utils.waiting import Deadline
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
SERVER = """
import sys, torch
from pipeline.utils.waiting import Deadline
from pipeline.inference.weight_sync.transports.gloo import SERVER, TransferGroup, connect_store
port, patience, seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
group = TransferGroup(connect_store("127.0.0.2", port, "s3cret", seconds), "g", SERVER, "127.0.0.3", seconds)
print(group.receive(torch.empty(8, dtype=torch.uint8), Deadline("weights", seconds)), flush=True)
print(group.wait_for_leaving(patience), flush=True)
"""


@contextmanager
def a_group(patience: float) -> Iterator[tuple[TransferGroup, subprocess.Popen[str]]]:
    """The trainer's side of a group over which weights 7 came to a server, and the server, which now leaves."""
    with hold_port() as holder:
        port = holder.getsockname()[1]
        store = create_store("127.0.0.2", port, "s3cret", WAIT_SECONDS)
        command = [sys.executable, "-c", SERVER, str(port), str(patience), str(WAIT_SECONDS)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
            try:
                group = TransferGroup(store, "g", TRAINER, "127.0.0.2", WAIT_SECONDS)
                group.send(7, torch.zeros(8, dtype=torch.uint8), Deadline("weights", WAIT_SECONDS))
                assert server.stdout is not None
                assert server.stdout.readline() == "7\n"
                yield group, server
            finally:
                server.kill()


def test_a_server_ends_its_part_once_its_trainer_says_that_it_leaves() -> None:
    with a_group(WAIT_SECONDS) as (group, server):
        assert server.stdout is not None
        assert not select.select([server.stdout], [], [], 0.3)[0], "it left by itself"
        group.announce_leaving()
        assert server.stdout.readline() == "True\n"
        assert server.wait(WAIT_SECONDS) == 0


def test_a_server_whose_trainer_says_nothing_leaves_alone() -> None:
    with a_group(0.2) as (_, server):
        assert server.stdout is not None
        assert server.stdout.readline() == "False\n"
        assert server.wait(WAIT_SECONDS) == 0


def test_a_trainer_hears_that_a_version_is_prepared_and_waits_no_longer_than_it_says() -> None:
    with hold_port() as holder:
        store = create_store("127.0.0.2", holder.getsockname()[1], "s3cret", WAIT_SECONDS)
        server, trainer = PreparedSignal(), PreparedSignal()
        for member in (server, trainer):
            member._store, member._name = store, "g"
        server.report_prepared(7)
        trainer.await_prepared(7, Deadline("version 7", WAIT_SECONDS))
        with pytest.raises(WeightSyncError, match="version 8: a process did not report"):
            trainer.await_prepared(8, Deadline("version 8", 0.2))
        server.report_prepared(9, "no such layer")
        with pytest.raises(WeightSyncError, match="no such layer"):
            trainer.await_prepared(9, Deadline("version 9", WAIT_SECONDS))
