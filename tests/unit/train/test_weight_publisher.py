"""What the trainer does around an update of the servers, with the dispatch and the sender written down."""

from collections.abc import Callable
from typing import Any, cast

import torch

from pipeline.inference.weight_sync.publication import Publication, SenderSettings
from pipeline.inference.weight_sync.server_sync import MeetingPoint
from pipeline.inference.weight_sync.sync_round import SyncReport
from pipeline.inference.weight_sync.transports.gloo import WeightLayout
from pipeline.inference.weight_sync.weight_sender import WeightSender
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_publication import ReportedSource
from pipeline.train.loop.weight_publisher import WeightPublisher


class Recorder:
    """Stands in for dispatch and sender; `calls` is what was asked of them, in order."""

    settings = SenderSettings(MeetingPoint("127.0.0.2", 1, ""), {}, "cpu", on_host=False)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def layout(self, name: str) -> WeightLayout:
        return WeightLayout.of([("w", torch.empty(2, device="meta"))])

    def run_on_all_models(self, function: Callable[..., Any], name: str, *args: Any, **needs: Any) -> list[Any]:
        self.calls.append(f"{function.__name__} of {name}")
        return [ReportedSource(rows, "") for rows in (((0, 1),), ((1, 2),))]

    def finish_weight_sync(self, name: str) -> None:
        self.calls.append(f"finish {name}")

    def open(self, publication: Publication) -> None:
        self.calls.append(f"open {len(publication.sources)} ranks")

    def take(self, version: int) -> None:
        self.calls.append(f"take {version}")

    def wait_until_synced(self, pulse: Any) -> SyncReport:
        self.calls.append("settle")
        phases = {"a": {"send": 0.05, "update": 0.02}, "b": {"send": 0.01, "update": 0.04, "pause": 0.03}}
        return SyncReport(1, 0.5, {"a": 0.1, "b": 0.2}, {"c": "late"}, phases)


def a_publisher() -> tuple[WeightPublisher, list[str]]:
    recorder = Recorder()
    publisher = WeightPublisher(cast(RankGroup, recorder), cast(WeightSender, recorder), lambda: None)
    return publisher, recorder.calls


def test_the_ranks_are_opened_once_and_asked_for_each_version() -> None:
    publisher, calls = a_publisher()
    assert publisher.start(1).keys() == {"sync/handover_seconds"}
    publisher.start(2)
    opened = ["open_publication of policy", "open 2 ranks"]
    assert calls == [*opened, "take 1", "finish policy", "take 2", "finish policy"]


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
