"""What the trainer does around an update of the servers, with the dispatch and the sender written down."""

from collections.abc import Iterator
from typing import Any, cast

import torch

from pipeline.inference.weight_sync.transports.gloo import WeightLayout
from pipeline.inference.weight_sync.weight_sender import SyncReport, WeightSender
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.weight_publisher import WeightPublisher


class Recorder:
    """Stands in for dispatch and sender; `calls` is what was asked of them, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def full_parameters(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        self.calls.append(f"gather {name}")
        yield "w", torch.ones(2)

    def layout(self, name: str) -> WeightLayout:
        return WeightLayout.of([("w", torch.empty(2, device="meta"))])

    def finish_weight_sync(self, name: str) -> None:
        self.calls.append(f"finish {name}")

    def start(self, version: int, parameters: Any, layout: WeightLayout) -> None:
        assert len(layout.pack(parameters)) == layout.bytes
        self.calls.append(f"start {version} with {len(layout.parameters)}")

    def wait_until_synced(self, pulse: Any) -> SyncReport:
        self.calls.append("settle")
        phases = {"a": {"send": 0.05, "update": 0.02}, "b": {"send": 0.01, "update": 0.04, "pause": 0.03}}
        return SyncReport(1, 0.5, {"a": 0.1, "b": 0.2}, {"c": "late"}, phases)


def a_publisher() -> tuple[WeightPublisher, list[str]]:
    recorder = Recorder()
    publisher = WeightPublisher(cast(RankGroup, recorder), cast(WeightSender, recorder), lambda: None)
    return publisher, recorder.calls


def test_what_gathering_the_policy_took_is_returned() -> None:
    publisher, calls = a_publisher()
    publisher.start(1)
    assert calls == ["gather policy", "start 1 with 1", "finish policy"]


def test_a_version_is_settled_once_and_says_how_many_servers_have_it() -> None:
    publisher, calls = a_publisher()
    assert publisher.wait_until_synced() == {}
    publisher.start(1)
    assert publisher.wait_until_synced() == {
        "sync/seconds": 0.5,
        "sync/servers": 2.0,
        "sync/send_seconds": 0.05,
        "sync/update_seconds": 0.04,
        "sync/pause_seconds": 0.03,
    }
    assert publisher.wait_until_synced() == {}
    assert calls.count("settle") == 1
