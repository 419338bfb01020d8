"""Which source a child has after one that hangs."""

from socket import socket
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from pipeline.errors import DeadlineError
from pipeline.inference.weight_sync.relay_link import RelayedUpdates
from pipeline.inference.weight_sync.relay_plan import RelayPlan
from pipeline.inference.weight_sync.server_admin_client import ServerAdminClient
from pipeline.utils.waiting import Deadline
from tests.fakes.http_server import PASSWORD


def test_a_source_that_hangs_leaves_its_child_seconds_for_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*about: Any) -> None:
        raise DeadlineError("weights", 0.0)

    monkeypatch.setattr(RelayedUpdates, "_receive_from", wait)
    plan = RelayPlan(1)
    with socket() as hung, ServerAdminClient("127.0.0.6:1", PASSWORD) as control:
        hung.bind(("127.0.0.5", 0))
        hung.listen()  # it answers nothing
        source = f"127.0.0.5:{hung.getsockname()[1]}"
        for server in (source, control.server):
            plan.join(server)
        plan.note_begun(source, 1)
        deadline = Deadline("weights", 1.5)
        updates = RelayedUpdates(control.server, PASSWORD, lambda seconds: HashStore(), plan)
        assert not updates.receive(control, 1, 1, lambda name, seconds: {}, deadline)
        assert plan.source_of(control.server) is None
        assert deadline.left > 0
