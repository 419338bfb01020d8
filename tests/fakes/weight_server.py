"""A server that takes weights as vLLM with Rollcall's engine does: the same routes, the same group, no model.

with WeightServer("127.0.0.5") as server:
    with server.held("/update_weights"):        # that route does not answer within this block
        ...
    server.answers["/collective_rpc"] = b"[]"   # what it says instead of the truth
    server.failing.add("/pause")                # answers with status 500
    server.calls                                # routes asked, in order
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import torch

from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync.transports.gloo import (
    SERVER,
    TransferGroup,
    WeightLayout,
    connect_store,
    publish_key,
)
from pipeline.utils.waiting import Deadline
from tests.fakes.http_server import HttpServer, Request


class WeightServer(HttpServer):
    """One server; serves from its construction to the end of its block.

    Attributes:
        version: what it says that it serves.
        loaded: versions whose bytes came to their end, in order.
        hears: whether it hears the trainer say that it leaves.
    """

    def __init__(self, address: str) -> None:
        self.version: int | None = None
        self.hears = True
        self.loaded, self.calls = list[int](), list[str]()
        self.answers: dict[str, bytes] = {}
        self.failing: set[str] = set()
        self._gates: dict[str, tuple[Event, Event]] = {}
        self._address, self._password = address, ""
        self._group: TransferGroup | None = None
        super().__init__(address)

    @contextmanager
    def held(self, route: str) -> Iterator[Event]:
        """Do not answer `route` until the block ends; the value is set when it is asked."""
        asked, free = self._gates[route] = Event(), Event()
        try:
            yield asked
        finally:
            del self._gates[route]
            free.set()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors that were loaded last."""
        return dict(self._layout.views(self._buffer))

    def respond(self, request: Request) -> tuple[int, bytes]:
        self._password = request.headers.get("Authorization", "").removeprefix("Bearer ")
        answer = self._answer(request.route, json.loads(request.body) if request.body else {})
        return 500 if request.route in self.failing else 200, answer

    def _answer(self, route: str, body: dict[str, Any]) -> bytes:
        """Do what `route` asks for; the answer's body."""
        self.calls.append(route)
        if route in self._gates:
            asked, free = self._gates[route]
            asked.set()
            assert free.wait(20)
        match route:
            case "/init_weight_transfer_engine":
                self._meet(**body["init_info"])
            case "/start_weight_update":
                self._receive()
            case "/update_weights":
                self._reception.join()
                assert self.loaded[-1] == body["update_info"]["version"]
            case "/finish_weight_update":
                self.version = int(body["weight_version"])
            case "/get_world_size":
                return self.answers.get(route, b'{"world_size": 1}')
            case "/collective_rpc":
                return self.answers.get(route, json.dumps({"results": [[self._asked(body["method"])]]}).encode())
        return self.answers.get(route, b"")

    def _asked(self, method: str) -> int | bool | None:
        """What a process of the server answers; see `pipeline.inference.vllm.worker_extension`."""
        match method:
            case "leave_weights":
                heard = self._group is None or (self.hears and self._group.wait_for_leaving())
                self._group = None
                return heard
            case "served_weights":
                return self.version
        raise AssertionError(method)

    def _meet(
        self,
        host: str,
        port: int,
        group: str,
        address: str,
        seconds: float,
        layout: list[list[Any]],
        adapter: dict[str, Any],
        gpu: str,
        at_once: bool,
    ) -> None:
        self._layout, self.adapter = WeightLayout.parse(layout), adapter
        self._buffer = torch.empty(self._layout.bytes, dtype=torch.uint8)
        store = connect_store(host, port, self._password, seconds)
        publish_key(store, f"{group}/0")
        self._group = TransferGroup(store, f"{group}/0", SERVER, address, seconds)

    def _receive(self) -> None:
        group = self._group
        assert group is not None

        def receive() -> None:
            try:
                version = group.receive(self._buffer, Deadline("weights", 20))
                self.loaded.append(version)
                group.report_prepared(version)
            except WeightSyncError:
                return

        self._reception = Thread(target=receive)
        self._reception.start()
