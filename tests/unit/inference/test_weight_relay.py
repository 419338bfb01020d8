"""Servers that forward weights: whole and true versions, one send of the trainer, and what follows when one is lost."""

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from threading import Event, Thread, current_thread

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from pipeline.config import InferenceConfig
from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync import server_shards
from pipeline.inference.weight_sync.rank_rows import RowSource
from pipeline.inference.weight_sync.relay_link import RelayError, RelayLink
from pipeline.inference.weight_sync.server_shards import Shard
from pipeline.inference.weight_sync.server_sync import MeetingPoint
from pipeline.inference.weight_sync.transfer_route import SEAL_BYTES, RowReceiver, group_name
from pipeline.inference.weight_sync.transports.gloo import (
    SERVER,
    SOURCE_LOST,
    ProcessSignals,
    TransferGroup,
    WeightLayout,
    connect_store,
    create_store,
    publish_key,
)
from pipeline.inference.weight_sync.transports.gpu_group import Receiver
from pipeline.inference.weight_sync.weight_relay import FEED, IDLE_VERSIONS, WeightRelay
from pipeline.inference.weight_sync.weight_sender import WeightSender
from pipeline.utils.subprocesses import hold_port
from pipeline.utils.waiting import Deadline, wait_for
from tests.fakes.http_server import PASSWORD
from tests.fakes.weight_server import WeightServer
from tests.patience import WAIT_SECONDS

CHUNK_BYTES = 1 << 14
TENSORS = 16
MODEL_BYTES = TENSORS * CHUNK_BYTES
Changes = list[tuple[str, int | None]]


def weights(version: int) -> list[tuple[str, Tensor]]:
    """Sixteen tensors, each as large as a chunk."""
    torch.manual_seed(version)
    return [(f"w{index:02}", torch.randn(CHUNK_BYTES // 4)) for index in range(TENSORS)]


def digest(version: int) -> str:
    value = hashlib.sha256()
    for name, tensor in weights(version):
        value.update(name.encode() + tensor.numpy().tobytes())
    return value.hexdigest()


class ServerProcess:
    """A server in another process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.support.servers.weight_server_process", "127.0.0.5", str(CHUNK_BYTES)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def digest(self) -> str:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self.line()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Trainer:
    """A sender to some servers.

    Attributes:
        sent: the bytes that it has sent, without those that servers of this process have forwarded.
        after_chunk: what to do after it has sent so many chunks.
        changes: what it announced.
    """

    def __init__(
        self,
        stack: ExitStack,
        monkeypatch: pytest.MonkeyPatch,
        endpoints: Sequence[str],
        fanout: int,
        update_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.sent, self.after_chunk, self.changes = 0, dict[int, Callable[[], None]](), Changes()
        monkeypatch.setattr(server_shards, "WEIGHT_CHUNK", CHUNK_BYTES)
        stock, chunks = TransferGroup.send, count(1)

        def send(group: TransferGroup, version: int, buffer: Tensor, deadline: Deadline) -> None:
            stock(group, version, buffer, deadline)
            if current_thread().name != FEED:
                self.sent += len(buffer)
                self.after_chunk.pop(next(chunks), lambda: None)()

        monkeypatch.setattr(TransferGroup, "send", send)
        meeting = MeetingPoint("127.0.0.2", stack.enter_context(hold_port()).getsockname()[1], PASSWORD)
        config = InferenceConfig(relay_fanout=fanout, update_seconds=update_seconds)
        announce = self.changes.append
        self.sender = stack.enter_context(
            WeightSender(endpoints, meeting, config, WAIT_SECONDS, lambda *change: announce(change))
        )

    def publish(self, version: int, endpoints: Sequence[str]) -> int:
        """Publish to these servers; the bytes that the trainer has sent for it."""
        before = self.sent
        self.sender.publish(version, weights(version))

        def have_it() -> bool:
            versions = self.sender.versions()
            return all(versions[endpoint] == version for endpoint in endpoints)

        wait_for("all servers", have_it, WAIT_SECONDS)
        return self.sent - before

    @property
    def evicted(self) -> set[str]:
        return {server for server, version in self.changes if version is None}


@pytest.mark.parametrize(("fanout", "models"), [(0, 3), (1, 1), (2, 1)])
def test_three_servers_get_the_same_bits_and_with_a_relay_the_trainer_sends_them_once(
    monkeypatch: pytest.MonkeyPatch, fanout: int, models: int
) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(WeightServer("127.0.0.5")) for _ in range(3)]
        endpoints = [server.endpoint for server in servers]
        trainer = Trainer(stack, monkeypatch, endpoints, fanout)
        for version in (1, 2):
            assert trainer.publish(version, endpoints) == models * MODEL_BYTES
            for name, tensor in weights(version):
                assert all(torch.equal(server.weights[name], tensor) for server in servers)
        assert not trainer.evicted


def test_the_children_of_a_relay_that_is_killed_in_a_transfer_are_fed_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ExitStack() as stack:
        processes = [ServerProcess() for _ in range(3)]
        for process in processes:
            stack.callback(process.end)
        servers = {process.line(): process for process in processes}
        trainer = Trainer(stack, monkeypatch, list(servers), 2)
        trainer.publish(1, list(servers))
        (root,) = (server for server in servers if trainer.sender._plan.source_of(server) is None)
        half = TENSORS + TENSORS // 2
        trainer.after_chunk[half] = servers[root].process.kill
        children = [server for server in servers if server != root]
        sent = trainer.publish(2, children)
        assert {servers[server].digest() for server in children} == {digest(2)}
        assert MODEL_BYTES < sent < 1.7 * MODEL_BYTES, "half to the killed one, and one model to its substitute"
        assert trainer.evicted == {root}


def test_a_source_that_does_not_meet_its_child_costs_time_and_not_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightRelay, "_meet", lambda relay, process, route: None)
    with ExitStack() as stack:
        servers = [stack.enter_context(WeightServer("127.0.0.5")) for _ in range(2)]
        endpoints = [server.endpoint for server in servers]
        trainer = Trainer(stack, monkeypatch, endpoints, 1, update_seconds=8.0)
        assert trainer.publish(1, endpoints) == 2 * MODEL_BYTES
        assert not trainer.evicted
        assert {server.update_seconds for server in servers} == {8.0}, "a late meeting must not shorten later updates"
        meetings = [server.calls.count("/init_weight_transfer_engine") for server in servers]
        assert trainer.publish(2, endpoints) == 2 * MODEL_BYTES
        assert [server.calls.count("/init_weight_transfer_engine") for server in servers] == meetings, "tried again"


def test_a_slow_child_does_not_cost_the_other_children_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, slow, is_over = TransferGroup.receive, list[str](), Event()

    def receive(group: TransferGroup, buffer: Tensor, deadline: Deadline) -> int:
        if group._name.partition("/")[0] in slow:
            slow.clear()
            is_over.wait(WAIT_SECONDS)
        return stock(group, buffer, deadline)

    monkeypatch.setattr(TransferGroup, "receive", receive)
    with ExitStack() as stack:
        servers = [stack.enter_context(WeightServer("127.0.0.5")) for _ in range(3)]
        endpoints = [server.endpoint for server in servers]
        trainer = Trainer(stack, monkeypatch, endpoints, 2, update_seconds=8.0)
        stack.callback(is_over.set)
        trainer.publish(1, endpoints)
        plan = trainer.sender._plan
        (root,) = (server for server in endpoints if plan.source_of(server) is None)
        child, other = (server for server in endpoints if server != root)
        slow.append(child)
        assert trainer.publish(2, endpoints) == 2 * MODEL_BYTES, "one for the slow child"
        assert [plan.source_of(server) for server in (root, child, other)] == [None, None, root]
        assert not trainer.evicted


def test_a_server_that_cannot_serve_what_it_received_does_not_blame_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RelayLink, "_call_source", lambda *_, **__: None)
    signals = [ProcessSignals(HashStore(), f"child/1/{process}") for process in range(2)]
    signals[0].report_prepared(1)
    signals[1].report_prepared(1, "no such tensor")
    signals[1].report_lost("no such tensor")
    link = RelayLink("source:1", PASSWORD, "child/1", signals)
    with pytest.raises(WeightSyncError, match="no such tensor") as failure:
        link.transfer(1, Deadline("weights", WAIT_SECONDS), Deadline("weights", WAIT_SECONDS))
    assert not isinstance(failure.value, RelayError)
    signals[0].report_lost("the connection was closed")
    with pytest.raises(RelayError, match="the connection was closed"):
        link.transfer(2, Deadline("weights", WAIT_SECONDS), Deadline("weights", WAIT_SECONDS))


@contextmanager
def a_relay_with_a_child() -> Iterator[tuple[WeightRelay, Tensor, TransferGroup, RowReceiver, Tensor]]:
    """A relay, its buffer, and a child's group, receiver and buffer."""
    layout = WeightLayout.of(weights(0))
    with hold_port() as holder:
        port = holder.getsockname()[1]
        store = create_store("127.0.0.2", port, PASSWORD, WAIT_SECONDS)

        def connect() -> object:
            return connect_store("127.0.0.2", port, PASSWORD, WAIT_SECONDS)

        buffer, other = (torch.zeros(layout.bytes, dtype=torch.uint8) for _ in range(2))
        relay = WeightRelay(layout, buffer, "127.0.0.5", connect, WAIT_SECONDS)  # type: ignore[arg-type]
        relay.adopt("child/1/0")
        publish_key(store, "child/1/0", Receiver(gpu="", slices=[]).text())
        group = TransferGroup(store, group_name("child/1/0", 0), SERVER, "127.0.0.6", WAIT_SECONDS)
        receiver = RowReceiver(
            Shard.whole(layout), [RowSource(layout)], other, False, [0], torch.device("cpu"), sealed=True
        )
        try:
            yield relay, buffer, group, receiver, other
        finally:
            relay.close()


def receive(group: TransferGroup, receiver: RowReceiver) -> int:
    deadline = Deadline("weights", WAIT_SECONDS)
    return receiver.receive([group], lambda source, part: source.receive(part, deadline), deadline)


def keep_failure(group: TransferGroup, receiver: RowReceiver, errors: list[str]) -> None:
    """Receive, and append the text of a failure to `errors`."""
    try:
        receive(group, receiver)
    except WeightSyncError as error:
        errors.append(str(error))


def test_a_relay_forwards_bytes_as_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_shards, "WEIGHT_CHUNK", CHUNK_BYTES)
    with a_relay_with_a_child() as (relay, buffer, group, receiver, other):
        received = list[int]()
        thread = Thread(target=lambda: received.append(receive(group, receiver)))
        thread.start()
        relay.begin()
        assert relay.feed("child/1/0", 5, WAIT_SECONDS)
        assert not relay.feed("stranger/1/0", 5, WAIT_SECONDS)
        buffer[:CHUNK_BYTES] = 1
        relay.note(5, CHUNK_BYTES, False)
        wait_for("the first chunk", lambda: bool((other[:CHUNK_BYTES] == 1).all()), WAIT_SECONDS)
        assert not received
        buffer[CHUNK_BYTES:] = 2
        relay.note(5, len(buffer), True)
        thread.join(WAIT_SECONDS)
        assert received == [5]
        assert torch.equal(other, buffer)


@pytest.mark.parametrize("chunks", [1, TENSORS])
def test_a_version_that_the_next_one_overwrites_is_never_accepted(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """Also when every chunk had been sent before: only the seal makes a version whole."""
    monkeypatch.setattr(server_shards, "WEIGHT_CHUNK", CHUNK_BYTES)
    errors = list[str]()
    with a_relay_with_a_child() as (relay, _, group, receiver, _):
        relay.note(5, chunks * CHUNK_BYTES, chunks == TENSORS)
        stock = TransferGroup.send

        def send(self: TransferGroup, version: int, part: Tensor, deadline: Deadline) -> None:
            stock(self, version, part, deadline)
            sent.append(len(part))
            if len(sent) == chunks:
                relay.begin()
                relay.note(6, CHUNK_BYTES, False)

        sent = list[int]()
        monkeypatch.setattr(TransferGroup, "send", send)

        thread = Thread(target=keep_failure, args=(group, receiver, errors))
        thread.start()
        assert relay.feed("child/1/0", 5, WAIT_SECONDS)
        thread.join(WAIT_SECONDS)
    assert len(errors) == 1
    assert SOURCE_LOST in errors[0]


def test_a_relay_that_loses_its_source_says_so_to_a_child_that_waits() -> None:
    errors = list[str]()
    with a_relay_with_a_child() as (relay, _, group, receiver, _):
        thread = Thread(target=keep_failure, args=(group, receiver, errors))
        thread.start()
        relay.begin()
        assert relay.feed("child/1/0", 5, WAIT_SECONDS)
        relay.close()
        thread.join(WAIT_SECONDS)
        assert not relay.feed("child/1/0", 5, WAIT_SECONDS)
    assert SOURCE_LOST in errors[0]


def test_a_relay_ends_the_group_of_a_child_that_another_server_feeds() -> None:
    errors = list[str]()
    with a_relay_with_a_child() as (relay, buffer, group, receiver, _):
        relay.begin()
        relay.note(5, len(buffer), True)
        assert relay.feed("child/1/0", 5, WAIT_SECONDS)
        assert receive(group, receiver) == 5
        thread = Thread(target=keep_failure, args=(group, receiver, errors))
        thread.start()
        for version in range(6, 7 + IDLE_VERSIONS):
            assert not errors
            relay.begin()
            relay.note(version, len(buffer), True)
        thread.join(WAIT_SECONDS / 10)
        assert errors, "the connection is still open"
        assert not relay.feed("child/1/0", 6 + IDLE_VERSIONS, WAIT_SECONDS)


def test_a_relay_seals_a_version_only_after_its_own_seal() -> None:
    """It has every byte before, but its source may have overwritten one of them before it was sent."""
    received, errors = list[int](), list[str]()
    with a_relay_with_a_child() as (relay, buffer, group, receiver, _):
        layout = WeightLayout.of(weights(0))
        middle = RowReceiver(
            Shard.whole(layout),
            [RowSource(layout)],
            buffer,
            False,
            [0],
            torch.device("cpu"),
            arrived=relay.note,
            sealed=True,
        )

        def receive_below() -> None:
            keep_failure(group, receiver, errors)
            received.extend([] if errors else [5])

        thread = Thread(target=receive_below)
        thread.start()

        def lose_the_seal(source: TransferGroup, part: Tensor) -> int:
            if len(part) == SEAL_BYTES:
                thread.join(0.5)  # the child has all chunks by then, and would accept a seal
                raise WeightSyncError(SOURCE_LOST)
            return 5

        relay.begin()
        assert relay.feed("child/1/0", 5, WAIT_SECONDS)
        with pytest.raises(WeightSyncError, match=SOURCE_LOST):
            middle.receive([group], lose_the_seal, Deadline("weights", WAIT_SECONDS))
        relay.close()
        thread.join(WAIT_SECONDS)
    assert not received
    assert SOURCE_LOST in errors[0]
