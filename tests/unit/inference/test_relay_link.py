"""Which source a child has after one that was late or hangs."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from socket import socket
from threading import Event
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from pipeline.errors import DeadlineError
from pipeline.inference.weight_sync import relay_link
from pipeline.inference.weight_sync.relay_link import RelayedUpdates
from pipeline.inference.weight_sync.relay_plan import RelayPlan
from pipeline.inference.weight_sync.server_admin_client import ServerAdminClient
from pipeline.utils.waiting import Deadline, wait_for
from tests.fakes.http_server import PASSWORD
from tests.fakes.weight_server import WeightServer
from tests.patience import WAIT_SECONDS
from tests.unit.inference.test_weight_relay import MODEL_BYTES, TENSORS, Trainer


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


def test_children_of_a_source_that_waits_for_a_slow_trainer_stay_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_late(awaited: str, is_ready: Callable[[], bool], *about: Any, **options: Any) -> None:
        try:
            wait_for(awaited, is_ready, *about, **options)
        except DeadlineError:
            time.sleep(0.3)  # the trainer's machine is busy
            if not is_ready():
                raise

    monkeypatch.setattr(relay_link, "wait_for", look_late)
    leave, are_late, late = RelayedUpdates._leave_source, Event(), list[str]()

    def left(updates: RelayedUpdates, *about: Any) -> bool:
        try:
            return leave(updates, *about)
        finally:
            late.append(updates._server)
            if len(late) == 2:
                are_late.set()

    def wait() -> None:
        are_late.wait(WAIT_SECONDS)

    monkeypatch.setattr(RelayedUpdates, "_leave_source", left)
    with ExitStack() as stack:
        servers = [stack.enter_context(WeightServer("127.0.0.5")) for _ in range(3)]
        endpoints = [server.endpoint for server in servers]
        trainer = Trainer(stack, monkeypatch, endpoints, 2, update_seconds=8.0)
        trainer.publish(1, endpoints)
        plan = trainer.sender._plan
        (root,) = (server for server in endpoints if plan.source_of(server) is None)
        trainer.after_chunk[TENSORS + 3] = wait
        assert trainer.publish(2, endpoints) == MODEL_BYTES
        assert {plan.source_of(server) for server in endpoints if server != root} == {root}
        assert len(late) == 2
        assert not trainer.evicted
