"""A server of two processes, each with its part of every layer: its updates, and what follows failed ones.

When a call fails in one process, vLLM leaves the answers of the others unread, and each later call gets those of the
call before: no failed update may be such a call.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.inference.weight_sync.server_admin_client import ServerAdminClient
from pipeline.utils.subprocesses import Child, tail
from pipeline.utils.waiting import Deadline, wait_for
from tests.patience import WAIT_SECONDS
from tests.support import forks
from tests.support.servers.traffic import APART, CLOSE, PROBE, probe
from tests.support.servers.vllm import (
    FORKS,
    SECRET,
    Served,
    a_model,
    a_sender,
    distance,
    model_directory,
    publish_to_all,
    starting_of,
    tensor_arguments,
    tiny_config,
)

pytestmark = pytest.mark.integration

ADDRESS = "127.0.0.3"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = model_directory(tmp_path_factory.mktemp("server") / "untied", tied=False)
    with starting_of(tiny_config(model, extra_args=list(tensor_arguments(2))), ADDRESS, FORKS) as ready:
        yield ready()


def call(server: Served, method: str) -> Any:
    """The answers of both processes."""
    with ServerAdminClient(server.endpoint, SECRET) as control:
        return control.post("/collective_rpc", Deadline("answers", 30), method=method)["results"]


def test_each_process_gets_its_part(server: Served) -> None:
    first, second = (a_model(server.model, seed) for seed in (1, 2))
    with a_sender([server]) as sender:
        for version, (new, old) in enumerate([(first, second), (second, first)]):
            publish_to_all(sender, version, new)
            assert call(server, "served_weights") == [[version], [version]]
            assert distance(new, PROBE, probe(server, version)) < CLOSE
            assert distance(old, PROBE, probe(server, version)) > APART


def test_an_update_that_was_not_finished_ends_at_the_next_one(server: Served) -> None:
    model = a_model(server.model, 3)
    with a_sender([server]) as sender:
        publish_to_all(sender, 4, a_model(server.model, 1))
        assert call(server, "begin_update") == [[True], [True]]
        publish_to_all(sender, 5, model)
        assert distance(model, PROBE, probe(server, 5)) < CLOSE


def test_both_processes_report_why_an_update_failed_and_serve_the_next_one(server: Served) -> None:
    model = a_model(server.model, 1)
    with a_sender([server]) as sender:
        publish_to_all(sender, 6, a_model(server.model, 3))
    # The sender has left. While it runs, it would bring the server up to date again by itself.
    assert call(server, "begin_update") == [[True], [True]]
    with ServerAdminClient(server.endpoint, SECRET) as control:
        control.post("/update_weights", Deadline("an answer", 30), update_info={"version": 7})
    reasons = call(server, "weights_failure")
    assert len(reasons) == 2
    assert all("has not met the trainer" in reason for (reason,) in reasons)
    assert call(server, "served_weights") == [[None], [None]]
    with a_sender([server]) as sender:
        publish_to_all(sender, 8, model)
        assert call(server, "weights_failure") == [[""], [""]]
        assert distance(model, PROBE, probe(server, 8)) < CLOSE


def test_a_trainer_killed_while_it_sends_leaves_a_server_that_the_next_one_can_use(
    server: Served, tmp_path: Path
) -> None:
    before, after = (a_model(server.model, seed) for seed in (5, 6))
    with a_sender([server]) as sender:
        publish_to_all(sender, 0, before)
    command = [sys.executable, "-m", "tests.support.ranks.half_trainer", "sending", server.endpoint, str(server.model)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    killed = Child(command, tmp_path / "log", environment, forks.request())
    try:
        wait_for("the trainer to be killed", lambda: killed.poll() is not None, WAIT_SECONDS)
    finally:
        assert killed.kill() == -signal.SIGKILL, "\n".join(tail(killed.log))
    assert distance(before, PROBE, probe(server, 0)) < CLOSE
    with a_sender([server]) as sender:
        publish_to_all(sender, 7, after)
        assert distance(after, PROBE, probe(server, 7)) < CLOSE
