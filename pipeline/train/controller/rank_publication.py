"""Publication of a model by the trainer's ranks: each copies its own rows of a version and sends them.

Owns the operations of the dispatch for it, and the snapshots of each rank. Promises that all ranks copy the rows of one
version in one operation, so that they are of one step. Only the ranks of the first replica take part. Must not know
servers, nor when a version is taken.

    publication = RankPublication(dispatch, "policy", sender.settings)
    sender.open(publication)
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from pipeline.errors import TrainingError
from pipeline.inference.weight_sync.publication import SenderSettings
from pipeline.inference.weight_sync.rank_orders import OrderedRank
from pipeline.inference.weight_sync.rank_rows import Rows, RowSource
from pipeline.inference.weight_sync.transfer_route import SendingRank
from pipeline.inference.weight_sync.weight_snapshot import RankSnapshots, WeightSnapshot
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.utils.network_interfaces import address_towards

_CONNECT_SECONDS = 60.0


class RankPublication:
    """A model of the dispatch, as a `pipeline.inference.weight_sync.publication.Publication`."""

    def __init__(self, dispatch: RankGroup, name: str, settings: SenderSettings) -> None:
        self._dispatch, self._name = dispatch, name
        layout = dispatch.layout(name)
        sources = dispatch.run_on_all_models(open_publication, name, settings)
        self.sources: Sequence[RowSource] = [
            RowSource(layout, source.rows, source.gpu) for source in sources if source is not None
        ]

    def take(self, version: int, in_use: Collection[int]) -> WeightSnapshot:
        self._dispatch.run_on_all_models(
            take_rows, self._name, version, in_use, needs={self._name: "prepare_weight_sync"}
        )
        return self._dispatch.snapshots.held(version)

    def close(self) -> None:
        self._dispatch.snapshots.close()


@dataclass(frozen=True)
class ReportedSource:
    """A sending rank's report to rank 0: its `rows` of each tensor (None: all), and its GPU."""

    rows: tuple[Rows, ...] | None
    gpu: str


def open_publication(site: RankState, name: str, settings: SenderSettings) -> ReportedSource | None:
    """Prepare a rank to publish the model `name`; None on a rank that does not send."""
    worker = site.worker(name)
    if worker.replica:
        site.snapshots = None
        return None
    ranks = dist.get_world_size(worker.group)
    site.snapshots = settings.snapshots(worker.layout, None if ranks == 1 else worker.public.rows)
    if site.rank:
        _follow_orders(site.snapshots, settings, dist.get_rank(worker.group), ranks)
    return ReportedSource(site.snapshots.source.rows, site.snapshots.source.gpu)


def take_rows(site: RankState, name: str, version: int, in_use: Collection[int]) -> None:
    """Copy the present rows of this rank as `version`."""
    if site.snapshots is not None:
        public, own = site.worker(name).public, site.snapshots.source.own
        site.snapshots.take(version, lambda buffer: public.fill_rows([view for _, view in own.views(buffer)]), in_use)


def _follow_orders(snapshots: RankSnapshots, settings: SenderSettings, number: int, ranks: int) -> None:
    def connect() -> Store:
        return settings.meeting.connect(_CONNECT_SECONDS)

    address = address_towards(settings.meeting.address)
    if not address:
        raise TrainingError(
            f"rank {number} has no route to rank 0 at {settings.meeting.address}: check cluster.network"
        )
    rank = SendingRank(number, ranks, snapshots.source, settings.device_here, address)
    OrderedRank(rank, snapshots, connect)
