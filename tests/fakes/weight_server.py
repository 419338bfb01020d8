"""A server that takes weights as vLLM with Rollcall's engine does: the same routes, the same group, no model.

with WeightServer("127.0.0.5") as server:
    with server.held("/update_weights"):        # that route, or method, does not answer within this block
        ...
    server.answers["/collective_rpc"] = b"[]"   # what it says instead of the truth
    server.failing.add("/pause")                # answers with status 500
    server.calls                                # routes asked, in order
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event, Thread
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync.rank_rows import RowSource, receiving_order
from pipeline.inference.weight_sync.server_shards import Shard, Slice, whole_slice
from pipeline.inference.weight_sync.transfer_route import RowReceiver, group_name, process_name
from pipeline.inference.weight_sync.transports.gloo import (
    SERVER,
    TransferGroup,
    WeightLayout,
    connect_store,
    publish_key,
)
from pipeline.inference.weight_sync.transports.gpu_group import Receiver
from pipeline.inference.weight_sync.weight_relay import WeightRelay
from pipeline.utils.waiting import Deadline
from tests.fakes.http_server import HttpServer, Request

RECEIVE_SECONDS = 20


def tensor_slices(layout: WeightLayout, process: int, processes: int) -> list[Slice]:
    """What a process of a tensor-parallel server needs: of matrices in turn a part of the rows, and of the columns."""
    slices = []
    for index, parameter in enumerate(layout.parameters):
        whole = whole_slice(index, parameter.shape)
        if len(whole.shape) > 1:
            part = whole.shape[index % 2] // processes
            whole = whole.narrow(index % 2, process * part, part)
        slices.append(whole)
    return slices


class _Process:
    """One process of a server: its buffer, and its groups with the trainer's ranks."""

    def __init__(
        self,
        store: Store,
        name: str,
        address: str,
        shard: Shard,
        receiver: RowReceiver,
        relay: WeightRelay | None = None,
    ) -> None:
        self.shard, self._receiver, self.relay = shard, receiver, relay
        self._store, self._name, self._address = store, name, address
        self.groups: list[TransferGroup] = []
        publish_key(store, name, Receiver(gpu="", slices=shard.plain(), relays=relay is not None).text())

    def meet(self, ranks: int, seconds: float) -> None:
        for number in range(ranks):
            name = group_name(self._name, number)
            self.groups.append(TransferGroup(self._store, name, SERVER, self._address, seconds))

    def receive(self) -> int:
        deadline = Deadline("weights", RECEIVE_SECONDS)
        version = self._receiver.receive(self.groups, lambda group, part: group.receive(part, deadline), deadline)
        self.groups[0].report_prepared(version)
        return version

    def lose(self, reason: str) -> None:
        """Give up a version, so that every rank and every child notices."""
        with suppress(WeightSyncError):
            self.groups[0].report_lost(reason)
        self.groups.clear()
        self.end()

    def end(self) -> None:
        if self.relay is not None:
            self.relay.close()


class WeightServer(HttpServer):
    """One server; serves from its construction to the end of its block.

    Attributes:
        version: the version that it reports.
        loaded: versions received completely, in order.
        sees_signal: whether it sees the trainer's signal to leave.
        update_seconds: the deadline of each update, as the trainer announced it.
    """

    def __init__(self, address: str, processes: int = 1) -> None:
        """A tensor-parallel one with several `processes`; see `tensor_slices`."""
        self._count = processes
        self.version: int | None = None
        self.sees_signal, self.update_seconds, self._failure = True, 0.0, ""
        self.loaded, self.calls = list[int](), list[str]()
        self.answers: dict[str, bytes] = {}
        self.failing: set[str] = set()
        self._gates: dict[str, tuple[Event, Event]] = {}
        self._address, self._password = address, ""
        self._processes: list[_Process] = []
        self._buffers: list[torch.Tensor] = []
        super().__init__(address)

    @contextmanager
    def held(self, route: str) -> Iterator[Event]:
        """Do not answer `route`, or this method of `/collective_rpc`, until the block ends; the value is set when it is
        asked."""
        asked, free = self._gates[route] = Event(), Event()
        try:
            yield asked
        finally:
            del self._gates[route]
            free.set()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors that were loaded last, by the first process."""
        return dict(self.parts[0])

    @property
    def parts(self) -> list[list[tuple[str, torch.Tensor]]]:
        """What each process loaded last: its slices, as tensors of the layout."""
        pairs = zip(self._processes, self._buffers, strict=True)
        return [process.shard.staged.views(buffer) for process, buffer in pairs]

    def restart(self) -> None:
        """Be as one that was just started: without weights, in no group."""
        for process in self._processes:
            process.end()
        self.version, self._processes = None, []

    def respond(self, request: Request) -> tuple[int, bytes]:
        self._password = request.headers.get("Authorization", "").removeprefix("Bearer ")
        answer = self._answer(request.route, json.loads(request.body) if request.body else {})
        return 500 if request.route in self.failing else 200, answer

    def _answer(self, route: str, body: dict[str, Any]) -> bytes:
        """Do what `route` asks for; the answer's body."""
        self.calls.append(route)
        if gate := self._gates.get(body.get("method", route)):
            asked, free = gate
            asked.set()
            assert free.wait(20)
        match route:
            case "/init_weight_transfer_engine":
                self._meet(**body["init_info"])
            case "/update_weights":
                self._reception.join()
                self.version = body["update_info"]["version"]
                assert self.loaded[-1] == self.version
            case "/finish_weight_update":
                assert self.version == int(body["weight_version"])
            case "/get_world_size":
                return self.answers.get(route, json.dumps({"world_size": self._count}).encode())
            case "/collective_rpc":
                answer = self._asked(body["method"], **body.get("kwargs", {}))
                return self.answers.get(route, json.dumps({"results": [[answer]] * self._count}).encode())
        return self.answers.get(route, b"")

    def _asked(self, method: str, group: str = "", version: str = "", seconds: str = "") -> int | bool | str | None:
        """What a process of the server answers; see `pipeline.inference.vllm.worker_extension`."""
        match method:
            case "leave_weights":
                groups = [group for process in self._processes for group in process.groups[:1]]
                left = self.sees_signal and all(group.wait_for_leaving() for group in groups)
                self._processes = []
                return left
            case "served_weights":
                return self.version
            case "weights_failure":
                return self._failure
            case "begin_update":
                self._receive()
                return True
            case "adopt_server":
                relays = [process.relay for process in self._processes if process.relay is not None]
                for number, relay in enumerate(relays):
                    relay.adopt(process_name(group, number))
                return len(relays) == self._count
            case "feed_server":
                return len(self._processes) == self._count and all(
                    process.relay.feed(process_name(group, number), int(version), float(seconds))
                    for number, process in enumerate(self._processes)
                    if process.relay is not None
                )
        raise AssertionError(method)

    def _meet(
        self,
        host: str,
        port: int,
        group: str,
        processes: int,
        address: str,
        seconds: float,
        meeting_seconds: float,
        layout: list[list[Any]],
        sources: list[dict[str, Any]],
        adapter: dict[str, Any],
        at_once: bool,
        on_host: bool,
        relays: bool = False,
        relayed: bool = False,
    ) -> None:
        assert processes == self._count
        self.update_seconds, self._failure = seconds, ""
        for process in self._processes:
            process.end()
        self._layout, self.adapter = WeightLayout.parse(layout), adapter
        ranks = [RowSource.parse(self._layout, plain) for plain in sources]
        shards = [self.shard_of(number) for number in range(self._count)]
        self._buffers = [torch.empty(shard.staged.bytes, dtype=torch.uint8) for shard in shards]
        self._processes = []
        for number, (shard, buffer) in enumerate(zip(shards, self._buffers, strict=True)):
            order = receiving_order(group, number, len(ranks), processes)
            connect = partial(connect_store, host, port, self._password, seconds)  # one that waits serves nobody else
            relay = WeightRelay(self._layout, buffer, address, connect, seconds) if relays else None
            at_once, arrived = at_once and not relays, relay.note if relay else lambda version, end, accepted: None
            receiver = RowReceiver(shard, ranks, buffer, at_once, order, buffer.device, arrived=arrived, sealed=relayed)
            self._processes.append(_Process(connect(), process_name(group, number), address, shard, receiver, relay))
        self._in_each(lambda process: self._join(process, len(ranks), meeting_seconds))

    def _join(self, process: _Process, ranks: int, seconds: float) -> None:
        try:
            process.meet(ranks, seconds)
        except WeightSyncError as error:
            self._failure = str(error)

    def shard_of(self, number: int) -> Shard:
        """What a process needs."""
        if self._count == 1 or self.adapter:
            return Shard.whole(self._layout)
        return Shard(self._layout, tuple(tensor_slices(self._layout, number, self._count)))

    def _receive(self) -> None:
        def fill(process: _Process) -> None:
            try:
                self.loaded.append(process.receive())
            except WeightSyncError as error:
                process.lose(str(error))

        for process in self._processes:
            if process.relay is not None:
                process.relay.begin()
        self._reception = Thread(target=self._in_each, args=(fill,))
        self._reception.start()

    def _in_each(self, work: Callable[[_Process], None]) -> None:
        threads = [Thread(target=work, args=(process,)) for process in self._processes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
